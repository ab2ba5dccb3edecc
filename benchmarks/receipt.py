"""From a send of RocketMQ's protocol to its receipt by a waiting pull, and what the node spends.

    python -m benchmarks.receipt [--repeats 5] [--scale 1] [--dir FOLDER] [--base CHECKOUT]

One message of 1 KiB at a time, as a frame of its own; the next one when the pull that waits for it
has been answered and a new one waits. In turn: the pull waits at the master or at another node, in
mode classic (one slave acknowledges) and in mode dledger. With `--base` the nodes of another
checkout of hastore do the same in turn, and each figure is beside theirs.
"""

import contextlib
import pathlib
import select
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import common
from benchmarks.common import BODY_BYTES, MIB, Group, arguments, figure, percentile, save, say
from benchmarks.quorum import QuorumGroup
from hastore.protocol.remoting import Code, Frame, RemotingWire, encode_frame

TOPIC = "receipt"
GROUP = "receivers"
WAIT_S = 30.0
PAUSE_S = 0.002  # between a receipt and the next send: the next pull is parked by then
ROUND = 300
BASE = "the other checkout"


class Client:
    """A connection that sends frames, and reads their answers."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.sock = socket.create_connection((host, int(port)), WAIT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire = RemotingWire()
        self._opaque = 0

    def send(self, code: Code, fields: dict[str, str], body: bytes = b"") -> None:
        """Send a request."""
        self._opaque += 1
        self.sock.sendall(encode_frame(Frame(code, self._opaque, 0, fields, body)))

    def read(self) -> list[Frame]:
        """Return the answers that have come, after the next bytes."""
        data = self.sock.recv(1 << 16)
        if not data:
            raise RuntimeError("the node has closed the connection")
        return [one for one in self._wire.receive(data) if one.is_answer]

    def ask(self, code: Code, fields: dict[str, str], body: bytes = b"") -> Frame:
        """Send a request, and return its answer."""
        self.send(code, fields, body)
        while not (found := self.read()):
            continue
        return found[0]


class Pair:
    """A producer at the master, and a consumer that pulls from one node."""

    def __init__(self, master: str, reader: str) -> None:
        self.producer, self.consumer = Client(master), Client(reader)
        self._body = bytes(BODY_BYTES)
        self._put_fields = {
            "producerGroup": "senders", "topic": TOPIC, "defaultTopic": "TBW102",
            "defaultTopicQueueNums": "4", "queueId": "0", "sysFlag": "0",
            "bornTimestamp": "1700000000000", "flag": "0", "properties": "",
            "reconsumeTimes": "0", "unitMode": "false", "batch": "false",
        }  # fmt: skip
        self._offset = self._put()
        self._catch_up(self._offset)

    def _catch_up(self, offset: int) -> None:
        """Pull until the message at this queue offset has come."""
        while self._offset <= offset:
            self._pull(wait_ms=100)
            self._offset = self._received() or self._offset

    def _put(self) -> int:
        """Send a message, and return its queue offset."""
        answer = self.producer.ask(Code.SEND_MESSAGE, self._put_fields, self._body)
        if answer.code:
            raise RuntimeError(f"a send was answered {answer.code}: {answer.remark}")
        return int(answer.fields["queueOffset"])

    def _pull(self, wait_ms: int = 20_000) -> None:
        self.consumer.send(Code.PULL_MESSAGE, {
            "consumerGroup": GROUP, "topic": TOPIC, "queueId": "0",
            "queueOffset": str(self._offset), "maxMsgNums": "32", "sysFlag": "6",
            "commitOffset": "0", "suspendTimeoutMillis": str(wait_ms), "subscription": "*",
            "subVersion": "1", "expressionType": "TAG",
        })  # fmt: skip

    def _received(self) -> int:
        """Read the answer to a pull; return its next offset, 0 if it has no message."""
        while not (found := self.consumer.read()):
            continue
        return 0 if found[0].code else int(found[0].fields["nextBeginOffset"])

    def round(self, count: int) -> tuple[list[float], list[float]]:
        """Send messages; return the ms from each send to its receipt, and to its answer."""
        received, answered = [], []
        self._catch_up(self._put())
        for _ in range(count):
            self._pull()
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            self.producer.send(Code.SEND_MESSAGE, self._put_fields, self._body)
            waits = [self.producer.sock, self.consumer.sock]
            while waits:
                ready, _, _ = select.select(waits, [], [], WAIT_S)
                if not ready:
                    raise RuntimeError("no answer within 30 s")
                now = (time.perf_counter() - began) * 1000
                if self.consumer.sock in ready:
                    following = self._received()
                    if following != self._offset + 1:
                        raise RuntimeError(f"message {self._offset}: the answer was {following}")
                    self._offset = following
                    received.append(now)
                    waits.remove(self.consumer.sock)
                if self.producer.sock in ready:
                    self.producer.read()
                    answered.append(now)
                    waits.remove(self.producer.sock)
        return received, answered


@contextlib.contextmanager
def checkout(root: pathlib.Path) -> Iterator[None]:
    """Start nodes of another checkout."""
    before, common.ROOT = common.ROOT, root
    try:
        yield
    finally:
        common.ROOT = before


def groups(folder: pathlib.Path, name: str, stack: contextlib.ExitStack) -> dict[str, Pair]:
    """Start the groups of one checkout; return a pair of clients for each place to read from."""
    places = {kind: folder / f"{name}-{kind}" for kind in ("classic", "dledger")}
    for place in places.values():
        place.mkdir()
    classic = stack.enter_context(Group(places["classic"]))
    classic.start()
    quorum = stack.enter_context(QuorumGroup(places["dledger"]))
    quorum.start()
    leader = quorum.leader()
    follower = next(node for node in quorum.running() if node is not leader)
    return {
        "classic, from the master": Pair(classic[1].api, classic[1].api),
        "classic, from the slave": Pair(classic[1].api, classic[2].api),
        "dledger, from the leader": Pair(leader.api, leader.api),
        "dledger, from a follower": Pair(leader.api, follower.api),
    }


def main() -> None:
    """Run the benchmark."""
    base = None
    if "--base" in sys.argv:
        place = sys.argv.index("--base")
        base = pathlib.Path(sys.argv[place + 1]).resolve()
        del sys.argv[place : place + 2]
    given = arguments(__doc__)
    count = max(10, int(ROUND * given.scale))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(common.scratch(given.dir, 1024 * MIB))
        systems = {"ours": groups(folder, "ours", stack)}
        if base is not None:
            with checkout(base):
                systems["base"] = groups(folder, "base", stack)
        found: dict[tuple[str, str], list[tuple[list[float], list[float]]]] = {}
        for number in range(given.repeats):
            for kind in systems["ours"]:
                for name, pairs in systems.items():
                    found.setdefault((kind, name), []).append(pairs[kind].round(count))
            say(f"receipt {number + 1}/{given.repeats}: {latest(found)}")
    figures: list[dict[str, Any]] = []
    for kind in systems["ours"]:
        for what, place in (("to receipt", 0), ("to its answer", 1)):
            samples = {
                name: [percentile(one[place], 0.5) for one in found[kind, name]] for name in systems
            }
            figures.append(figure(f"{kind}, send {what}, p50", "ms", samples["ours"], BASE,
                                  samples.get("base", ())))  # fmt: skip
    save("receipt", figures, {"body": BODY_BYTES})


def latest(found: dict[tuple[str, str], list[tuple[list[float], list[float]]]]) -> str:
    """Return the newest medians, for the person at the terminal."""
    return "; ".join(
        f"{kind} {name} {statistics.median(rounds[-1][0]):.2f}/"
        f"{statistics.median(rounds[-1][1]):.2f}"
        for (kind, name), rounds in found.items()
    )


if __name__ == "__main__":
    main()
