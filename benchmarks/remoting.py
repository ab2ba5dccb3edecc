"""RocketMQ's own Java client against a pair of RocketMQ and a pair of hastore, in one run.

    python -m benchmarks.remoting [--repeats 5] [--scale 1] [--dir FOLDER]

Messages of 1 KiB; one slave acknowledges. Both pairs get the same client, in a JVM of its own each,
with the same settings; they take turns.

  * Puts: one at a time, 64 threads, batches of 100 by 8 threads. Reading: the lite pull consumer,
    32 messages an answer; a push consumer, from the send to the receipt.
  * Memory of the master without mapped files, after all that.
  * Failover: a producer with its default settings sends every 5 ms. The master is killed; hastore's
    slave is promoted at once, RocketMQ's master is started again, since no command promotes its
    slave. hastore's group of mode dledger is killed the same way, and nobody acts.
  * Idle: 1,000 consumers in 100 groups, each with a connection, a waiting pull, a heartbeat every
    30 s, a position every 5 s, one way, and a question for its group's members every 20 s.
"""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Cost,
    Group,
    Target,
    arguments,
    at_least,
    at_most,
    ended,
    figure,
    save,
    say,
    scratch,
    wait_until,
)
from benchmarks.failover import promote
from benchmarks.jvm import Jvm
from benchmarks.maven import class_path, peer_version
from benchmarks.quorum import QuorumGroup
from benchmarks.rocketmq import TOPIC, RocketPair
from benchmarks.side_by_side import OURS, Row, run_rounds, share, start_peer
from hastore.demo.java_clients import JavaClients, Told, build, told
from hastore.protocol.remoting import ONE_WAY, Code, Frame, decode_frame, encode_frame

PEER = "RocketMQ, the same client"
ROCKET = "RocketMQ"
PUSHED = "pushed"
READ = 50_000  # messages that the lite pull consumer reads in one round
CONSUMERS, PER_GROUP = 1_000, 10
IDLE_S = 40.0
QUIET_S = 5.0
# By default a node serves 1,000 clients, 500 of one address; all of these come from one.
ROOM = {"max_connections": 4_000, "max_connections_of_address": 4_000}


def addresses(group: Group) -> str:
    """Return what a RocketMQ client is configured with to use a group of hastore."""
    return ";".join(one.removeprefix("tcp://") for one in group.bootstrap)


class JavaClient:
    """The client of one system: RocketMQ's producer and consumers in a JVM."""

    def __init__(self, jvm: Jvm, name_server: str) -> None:
        self.jvm, self.name_server = jvm, name_server

    def start(self) -> None:
        """Start the producer, and wait for its first acknowledgement."""
        self.jvm.call("load.start", topic=TOPIC, size=BODY_BYTES, namesrv=self.name_server)
        self.jvm.call("load.until_acknowledged", limit_s=60)

    def blocking(self, count: int) -> list[float]:
        """Return the ms of each put."""
        took: list[float] = self.jvm.call("load.blocking", count=count)
        return took

    def threads(self, count: int) -> float:
        """Return the puts per second of 64 threads."""
        return count / float(self.jvm.call("load.threads", threads=64, count=count))

    def batches(self, count: int) -> float:
        """Return the messages per second of 8 threads that send batches of 100."""
        took = self.jvm.call("load.batched", batch=100, threads=8, count=count)
        return count / float(took)

    def lite(self, count: int) -> float:
        """Return the messages per second that the lite pull consumer reads."""
        read = self.jvm.call(
            "consume.lite", topic=TOPIC, count=count, batch=32, namesrv=self.name_server
        )
        if read["bytes"] < count * BODY_BYTES:
            raise RuntimeError(f"{read['bytes']} bytes of {count} bodies")
        return count / float(read["seconds"])

    def push(self, count: int) -> list[float]:
        """Return the ms from the send of each message to its receipt by a push consumer."""
        took: list[float] = self.jvm.call(
            "consume.push", topic=PUSHED, count=count, size=BODY_BYTES, namesrv=self.name_server
        )
        return took


def rows_of(ours: JavaClient, theirs: JavaClient | None) -> list[Row]:
    """Return the rows of puts and reads."""

    def both(count: int, load: Callable[[JavaClient], Callable[[int], Any]]) -> dict[str, Any]:
        return {
            name: (count, load(client))
            for name, client in ((OURS, ours), (ROCKET, theirs))
            if client is not None
        }

    one: Any = {ROCKET: (PEER, at_most(1.0))}
    return [
        Row("one blocking send", "ms", both(2_000, lambda c: c.blocking), one),
        Row("64 threads, synchronous", "msg/s", both(20_000, lambda c: c.threads),
            {ROCKET: (PEER, at_least(1.0))}),
        Row("batches of 100, 8 threads", "msg/s", both(100_000, lambda c: c.batches),
            {ROCKET: (PEER, at_least(0.8))}),
        Row("lite pull, 32 an answer", "msg/s", both(READ, lambda c: c.lite),
            {ROCKET: (PEER, at_least(1.0))}),
        Row("push consumer, send to receipt", "ms", both(500, lambda c: c.push),
            {ROCKET: (PEER, at_most(0.5))}),
    ]  # fmt: skip


def figures_of(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the figures of all rows: p50 and p99 of a send, p50 of a receipt, and the rates."""
    sends, *rates, receipts = rows
    found = sends.figures(f"{sends.name}, p50", share(0.50))
    sends.peers = {ROCKET: (PEER, at_most(0.8))}
    found += sends.figures(f"{sends.name}, p99", share(0.99))
    for row in rates:
        found += row.figures()
    return found + receipts.figures(f"{receipts.name}, p50", share(0.50))


# ---- failover


def through_a_kill(
    clients: JavaClients, name_server: str, kill: Callable[[], None], name: str
) -> tuple[Told, float]:
    """Send every 5 ms with a default client, kill the master; return what was seen, and when."""
    clients.call("producer.start", name=name, namesrv=name_server)
    clients.call(
        "load.start", load=name, name=name, topic="failover", every_ms=5, streams=1, size=BODY_BYTES
    )
    wait_until(lambda: clients.call("load.count", load=name) > 200, 60.0, "nothing is acknowledged")
    killed_ms = time.monotonic() * 1000
    kill()
    wait_until(
        lambda: clients.call("load.first", load=name, since_ms=killed_ms + 500),
        120.0,
        "nothing is acknowledged after the kill",
        0.1,
    )
    time.sleep(QUIET_S)
    seen = told(clients.call("load.stop", load=name), [])
    clients.call("producer.stop", name=name)
    return seen, killed_ms


def gap_s(seen: Told, killed_ms: float) -> float:
    """Return the longest gap of acknowledgements around a kill, in seconds."""
    return seen.acknowledgement_gap(killed_ms - 500).ms / 1000


def kill_and_promote(group: Group) -> Callable[[], None]:
    """Return a function that kills node 1 and promotes node 2 at once."""

    def kill() -> None:
        group[1].kill()
        order = promote(group[2])
        said = order.communicate(timeout=60.0)[0]
        if order.returncode:
            raise RuntimeError(f"the promotion failed: {said}")

    return kill


def kill_and_restart(rocket: RocketPair) -> Callable[[], None]:
    """Return a function that kills RocketMQ's master and starts it again."""

    def kill() -> None:
        rocket.kill_master()
        rocket.jvm("master")
        rocket.begin_broker("master")

    return kill


def failovers(given: Any, folder: pathlib.Path, rocket: RocketPair | None) -> list[dict[str, Any]]:
    """Measure the kills of each kind, `repeats` times, each of ours with a new group."""
    ours: list[float] = []
    led: list[float] = []
    theirs: list[float] = []
    lost: dict[str, list[int]] = {"three": [], "dledger": [], "rocketmq": []}
    clients = JavaClients(build(folder / "clients-build"), folder)
    with contextlib.closing(clients):
        for number in range(given.repeats):
            for kind, gaps in (("three", ours), ("dledger", led)):
                place = folder / f"{kind}{number}"
                place.mkdir()
                with Group(place, 3) if kind == "three" else QuorumGroup(place) as group:
                    group.start()
                    kill = kill_and_promote(group) if kind == "three" else killer(group)
                    name = f"{kind}{number}"
                    seen, at = through_a_kill(clients, addresses(group), kill, name)
                gaps.append(gap_s(seen, at))
                lost[kind].append(len(seen.failed))
            if rocket is not None:
                kill = kill_and_restart(rocket)
                seen, at = through_a_kill(clients, rocket.name_server, kill, f"rocketmq{number}")
                theirs.append(gap_s(seen, at))
                lost["rocketmq"].append(len(seen.failed))
                rocket.jvms["master"].finish()
                rocket.jvms["master"].wait_slaves(1)
            say(f"failover {number + 1}/{given.repeats}: {ours[-1]:.2f} s, {led[-1]:.2f} s "
                f"(dledger), RocketMQ {theirs[-1:]}; failed sends {lost}")  # fmt: skip
    limit, none = Target(0.6, "at most", "figure"), Target(0.0, "at most", "figure")
    restart = "RocketMQ, restart as master"
    return [
        figure("kill -9 and `promote`, longest gap of acknowledgements", "s", ours, restart, theirs,
               limit),
        figure("kill -9 and `promote`, failed sends", "sends", lost["three"], None, (), none,
               rocketmq=lost["rocketmq"]),
        figure("kill -9 of the leader, longest gap of acknowledgements", "s", led, None, (), limit),
        figure("kill -9 of the leader, failed sends", "sends", lost["dledger"], None, (), none),
    ]  # fmt: skip


def killer(group: Group) -> Callable[[], None]:
    """Return a function that kills the leader of a group of mode dledger."""
    assert isinstance(group, QuorumGroup)
    return lambda: group.leader().kill()


# ---- idle consumers


def idle(address: str, ready: Any, stop: Any) -> None:
    """Hold 1,000 connections of idle consumers until told to stop; runs in its own process."""
    asyncio.run(_idle(address, ready, stop))


async def _idle(address: str, ready: Any, stop: Any) -> None:
    host, _, port = address.rpartition(":")
    numbers = itertools.count(1)
    async with asyncio.TaskGroup() as tasks:
        running = []
        for number in range(CONSUMERS):  # one after the other: they are no flood of newcomers
            reader, writer = await asyncio.open_connection(host, int(port))
            known = asyncio.Event()
            client = _consumer(number, reader, writer, numbers, known)
            running.append(tasks.create_task(client))
            await known.wait()
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.1)
        for one in running:
            one.cancel()


async def _consumer(
    number: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    numbers: Any,
    known: asyncio.Event,
) -> None:
    """Send what an idle push consumer sends, and read all answers."""
    group, queue = f"idle{number // PER_GROUP}", number % PER_GROUP
    names = {"consumerGroup": group, "topic": TOPIC, "queueId": str(queue % 4)}
    heart = {
        "clientID": f"127.0.0.1@{number}",
        "producerDataSet": [],
        "consumerDataSet": [{
            "groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "unitMode": False,
            "subscriptionDataSet": [{
                "topic": TOPIC, "subString": "*", "subVersion": 1, "classFilterMode": False,
                "tagsSet": [], "codeSet": [], "expressionType": "TAG",
            }],
        }],
    }  # fmt: skip
    pull = {
        **names, "queueOffset": "1000000000", "maxMsgNums": "32", "sysFlag": "2",
        "commitOffset": "0", "suspendTimeoutMillis": "15000", "subscription": "*",
        "subVersion": "1", "expressionType": "TAG",
    }  # fmt: skip
    kinds = {
        Code.HEART_BEAT: (30.0, {}, json.dumps(heart).encode()),
        Code.UPDATE_CONSUMER_OFFSET: (5.0, {**names, "commitOffset": "0"}, b""),
        Code.GET_CONSUMER_LIST_BY_GROUP: (20.0, {"consumerGroup": group}, b""),
    }
    maximum = Frame(
        code=Code.GET_MAX_OFFSET, opaque=next(numbers),
        fields={"topic": TOPIC, "queueId": str(queue % 4)},
    )  # fmt: skip
    writer.write(encode_frame(maximum))
    end = (await _answer(reader)).fields.get("offset", "0")
    pull["queueOffset"] = end
    known.set()

    async def every(code: Code, period_s: float, fields: dict[str, str], body: bytes) -> None:
        while True:
            # Java's consumers commit one way (RemoteBrokerOffsetStore.persistAll).
            flag = ONE_WAY if code is Code.UPDATE_CONSUMER_OFFSET else 0
            frame = Frame(code=code, opaque=next(numbers), flag=flag, fields=fields, body=body)
            writer.write(encode_frame(frame))
            # At first after a share of the period, so that the clients do not beat as one.
            await asyncio.sleep(period_s if code in begun else period_s * number / CONSUMERS)
            begun.add(code)

    async def pulls() -> None:
        while True:
            asked.append(next(numbers))
            writer.write(encode_frame(Frame(code=Code.PULL_MESSAGE, opaque=asked[-1], fields=pull)))
            if not await asyncio.wait_for(pulled.get(), 60):
                await asyncio.sleep(1.0)  # refused: its heartbeat has not been seen yet

    begun: set[Code] = set()
    asked: list[int] = []
    pulled: asyncio.Queue[bool] = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        for code, (period_s, fields, body) in kinds.items():
            tasks.create_task(every(code, period_s, fields, body))
        tasks.create_task(pulls())
        while True:
            answer = await _answer(reader)
            if asked and answer.opaque == asked[-1]:
                pulled.put_nowait("nextBeginOffset" in answer.fields)


async def _answer(reader: asyncio.StreamReader) -> Frame:
    """Return the next frame."""
    size = int.from_bytes(await reader.readexactly(4))
    return decode_frame(await reader.readexactly(size))


def idle_cpu(address: str, pid: int) -> float:
    """Return the share of a core that a master uses while 1,000 consumers are idle, in percent."""
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=idle, args=(address, ready, stop))
    process.start()
    with ended(process):
        try:
            wait_until(
                lambda: ready.is_set() or process.exitcode is not None, 120.0, "no connections"
            )
            if process.exitcode is not None:
                raise RuntimeError("the idle consumers could not connect")
            time.sleep(IDLE_S / 2)
            before, began = Cost.of(pid).cpu_s, time.monotonic()
            time.sleep(IDLE_S)
            used = (Cost.of(pid).cpu_s - before) / (time.monotonic() - began)
            if process.exitcode is not None:
                raise RuntimeError("the idle consumers have ended early")
        finally:
            stop.set()
    return 100 * used


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 12 * 1024 * MIB))
        (folder / "pair").mkdir()
        group = stack.enter_context(Group(folder / "pair", api=ROOM))
        rocket: RocketPair | None = start_peer(stack, ROCKET, lambda: RocketPair(folder))
        group.start()
        jvm = Jvm(class_path("rocketmq"), folder, "client of hastore")
        stack.callback(jvm.kill)
        ours = JavaClient(jvm, addresses(group))
        ours.start()
        theirs = None
        systems: dict[str, Any] = {OURS: group.costs}
        if rocket is not None:
            rocket.add_topic(PUSHED, 4)
            theirs = JavaClient(rocket.jvms["client"], rocket.name_server)
            systems[ROCKET] = rocket.costs
        rows = rows_of(ours, theirs)
        run_rounds(
            rows,
            systems,
            given.repeats,
            given.scale,
            lambda number: say(f"remoting {number + 1}/{given.repeats}: {latest(rows)}"),
        )
        figures = figures_of(rows)
        memory = [group.costs()["master"].anonymous_mib]
        peer_memory = [] if rocket is None else [rocket.costs()["master"].anonymous_mib]
        figures.append(
            figure("memory of the master without the map", "MiB", memory, ROCKET, peer_memory,
                   at_most(0.08))
        )  # fmt: skip
        cpu = [idle_cpu(addresses(group).partition(";")[0], group[1].pid)]
        peer_cpu = [] if rocket is None else [idle_cpu(rocket.master, rocket.jvms["master"].pid)]
        limit = Target(10.0, "at most", "figure")
        name = "CPU of the master, 1,000 idle consumers"
        figures.append(figure(name, "% of a core", cpu, ROCKET, peer_cpu, limit))
        jvm.kill()
        group.close()
        figures += failovers(given, folder, rocket)
    settings = {"body": BODY_BYTES, "rocketmq": peer_version("rocketmq")}
    save("remoting", figures, settings)


def latest(rows: list[Row]) -> str:
    """Return the newest figures of all rows, for the person at the terminal."""
    parts = []
    for row in rows:
        found = {name: samples[-1] for name, samples in row.samples.items()}
        shown = {
            name: round(statistics.median(one) if isinstance(one, list) else one, 2)
            for name, one in found.items()
        }
        parts.append(f"{row.name} {shown}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
