"""Delayed messages: how late each is, and how many a second a master delivers that are all due.

    python -m benchmarks.delays [--repeats 5] [--scale 1] [--dir FOLDER]

A pair of hastore and a pair of RocketMQ take turns; one slave acknowledges. The client is the same
for both: this process, with frames of RocketMQ's protocol. Messages have 1 KiB.

  * Lateness: 500 messages a second with a delay of 1 s; from the time at which each is due, by its
    birth, to the time at which it is stored in its topic, by the log.
  * Backlog: messages with a delay of 10 s are sent, the master is killed, and started again when
    all are due. The rate is that of the delivered messages, by the times at which they are stored.
"""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Group,
    arguments,
    at_least,
    at_most,
    figure,
    percentile,
    save,
    say,
    scratch,
    wait_until,
)
from benchmarks.maven import peer_version
from benchmarks.receipt import Client
from benchmarks.rocketmq import RocketPair
from benchmarks.side_by_side import OURS, start_peer
from hastore.client.messages import decode_messages
from hastore.protocol.remoting import Code, Frame
from hastore.record.delays import DELAYS_MS

ROCKET = "RocketMQ"
PEER = "RocketMQ, the same client"
QUEUES = 4
SOON, LATER = 1, 3  # levels: 1 s, 10 s
RATE, LATE_COUNT = 500, 2_500  # messages a second, and how many
BACKLOG = 20_000
IN_FLIGHT = 256
LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """A pair whose master can be killed and started again."""

    master: Callable[[], str]
    kill: Callable[[], None]
    restart: Callable[[], None]
    make_topic: Callable[[str], None]


def of_hastore(group: Group) -> System:
    """Return hastore's pair; the killed master becomes the master again."""

    def restart() -> None:
        group[1].start()
        group.wait_in_sync()

    return System(lambda: group[1].api, group[1].kill, restart, lambda _topic: None)


def of_rocketmq(rocket: RocketPair) -> System:
    """Return RocketMQ's pair."""

    def restart() -> None:
        rocket.jvm("master")
        rocket.begin_broker("master")
        rocket.jvms["master"].finish()
        rocket.jvms["master"].wait_slaves(1)

    return System(
        lambda: rocket.master,
        rocket.kill_master,
        restart,
        lambda topic: rocket.add_topic(topic, QUEUES),
    )


class Sender:
    """Sends delayed messages to a topic, many at a time, each acknowledged."""

    def __init__(self, address: str, topic: str, level: int) -> None:
        self._client = Client(address)
        self._open: deque[None] = deque()
        self._body = bytes(BODY_BYTES)
        self._fields = {
            "a": "senders", "b": topic, "c": "TBW102", "d": str(QUEUES), "f": "0", "h": "0",
            "j": "0", "k": "false", "m": "false", "i": f"DELAY\x01{level}\x02",
        }  # fmt: skip
        self._number = 0

    def send(self) -> None:
        """Send one; wait while too many are not acknowledged."""
        while len(self._open) >= IN_FLIGHT:
            self._read()
        born_ms = time.time_ns() // 1_000_000
        queue, self._number = self._number % QUEUES, self._number + 1
        fields = {**self._fields, "e": str(queue), "g": str(born_ms)}
        self._client.send(Code.SEND_MESSAGE_V2, fields, self._body)
        self._open.append(None)

    def finish(self) -> None:
        """Wait until all are acknowledged, and end."""
        while self._open:
            self._read()
        self._client.sock.close()

    def _read(self) -> None:
        for answer in self._client.read():
            if answer.code:
                raise RuntimeError(f"a send was answered {answer.code}: {answer.remark}")
            self._open.popleft()


def delivered(client: Client, topic: str) -> int:
    """Return how many messages are in a topic."""
    total = 0
    for queue in range(QUEUES):
        fields = {"topic": topic, "queueId": str(queue)}
        answer = client.ask(Code.GET_MAX_OFFSET, fields)
        total += int(answer.fields.get("offset", "0"))
    return total


def stored(client: Client, topic: str) -> Iterator[Any]:
    """Yield all messages of a topic."""
    for queue in range(QUEUES):
        offset = 0
        while True:
            answer: Frame = client.ask(Code.PULL_MESSAGE, {
                "consumerGroup": "readers", "topic": topic, "queueId": str(queue),
                "queueOffset": str(offset), "maxMsgNums": "32", "sysFlag": "4",
                "commitOffset": "0", "suspendTimeoutMillis": "0", "subscription": "*",
                "subVersion": "1", "expressionType": "TAG",
            })  # fmt: skip
            if answer.code:
                break
            yield from decode_messages(answer.body, [])[0]
            offset = int(answer.fields["nextBeginOffset"])


def lateness(system: System, topic: str, count: int) -> list[float]:
    """Return how many ms each message was delivered after it was due."""
    system.make_topic(topic)
    sender = Sender(system.master(), topic, SOON)
    began = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, began + number / RATE - time.monotonic()))
        sender.send()
    sender.finish()
    client = Client(system.master())
    wait_until(lambda: delivered(client, topic) >= count, LIMIT_S, "not all are delivered", 0.1)
    due_ms = DELAYS_MS[SOON - 1]
    late = [
        float(one.store_timestamp_ms - one.born_timestamp_ms - due_ms)
        for one in stored(client, topic)
    ]
    if len(late) < count or min(late) < 0:
        raise RuntimeError(f"{len(late)} of {count} messages, the earliest {min(late)} ms late")
    return late


def backlog(system: System, topic: str, count: int) -> float:
    """Return how many messages a second are delivered, by the times at which they are stored."""
    system.make_topic(topic)
    sender = Sender(system.master(), topic, LATER)
    for _ in range(count):
        sender.send()
    sender.finish()
    due = time.monotonic() + DELAYS_MS[LATER - 1] / 1000
    before = delivered(Client(system.master()), topic)
    if before:
        raise RuntimeError(f"{before} were due before all were sent: lower --scale")
    system.kill()
    time.sleep(max(0.0, due + 0.5 - time.monotonic()))
    system.restart()
    client = Client(system.master())
    wait_until(lambda: delivered(client, topic) >= count, LIMIT_S, "not all are delivered", 0.1)
    at_ms = [one.store_timestamp_ms for one in stored(client, topic)]
    if len(at_ms) < count:
        raise RuntimeError(f"{len(at_ms)} of {count} messages can be read")
    return 1000.0 * len(at_ms) / max(1, max(at_ms) - min(at_ms))


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    late: dict[str, list[list[float]]] = {}
    rates: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 12 * 1024 * MIB))
        (folder / "pair").mkdir()
        group = stack.enter_context(Group(folder / "pair"))
        rocket: RocketPair | None = start_peer(stack, ROCKET, lambda: RocketPair(folder))
        group.start()
        systems = {OURS: of_hastore(group)}
        if rocket is not None:
            systems[ROCKET] = of_rocketmq(rocket)
        for number in range(-1, given.repeats):
            for name, system in systems.items():
                few = max(100, int(LATE_COUNT * given.scale))
                many = max(1_000, int(BACKLOG * given.scale))
                samples = lateness(system, f"late{number + 1}", few)
                rate = backlog(system, f"backlog{number + 1}", many)
                if number >= 0:  # the first round is a warm-up
                    late.setdefault(name, []).append(samples)
                    rates.setdefault(name, []).append(rate)
                shown = f"{percentile(samples, 0.5):.0f} ms late, {rate:,.0f} a second"
                say(f"delays {number + 1}/{given.repeats}, {name}: {shown}")
    figures = []
    for share, text in ((0.5, "p50"), (0.99, "p99")):
        ours, theirs = (
            [percentile(one, share) for one in late.get(name, [])] for name in (OURS, ROCKET)
        )
        # A message may be stored in the millisecond in which it is due: then there is no ratio.
        peer = ROCKET if all(theirs) else f"{ROCKET}: {theirs}"
        figures.append(
            figure(f"a delay of 1 s, late by, {text}", "ms", ours, peer,
                   theirs if all(theirs) else (), at_most(1.0))
        )  # fmt: skip
    figures.append(
        figure("a backlog of due messages", "msg/s", rates[OURS], PEER, rates.get(ROCKET, []),
               at_least(0.5))
    )  # fmt: skip
    save("delays", figures, {"body": BODY_BYTES, "rocketmq": peer_version("rocketmq")})


if __name__ == "__main__":
    main()
