"""Each call of a client ends by its own timeout, whichever nodes are down or silent.

The readers run in virtual time over simulated nodes, so a test sees how long a call waits to the
millisecond; the producers have a real node that holds its answers, and a clock that jumps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from hastore import Producer, aio
from hastore.client.connections import requester as requester_module
from hastore.client.connections.transport import Arrival, NoAnswer, Quiet
from hastore.client.consumer.admin import Admin
from hastore.client.consumer.consumer import Consumer
from hastore.client.consumer.positions_client import Positions
from hastore.client.producer import cluster_producer
from hastore.client.producer.cluster_producer import ClusterProducer
from hastore.clock import SystemClock
from hastore.errors import NotStoredError, UnreachableError
from hastore.protocol import api
from tests.client.conftest import Node
from tests.client.producer.test_producer_lifecycle import OneGroup
from tests.ha.nodes import wait_for

MASTER, SLAVE = NODES = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
DOWN, SILENT, WELL = "down", "connected, but without an answer", "well"
EPOCH = 65537


class World:
    """Virtual time, and two nodes that answer 1 ms later, never, or are not there."""

    source = None
    unsent_bytes = 0

    def __init__(self, master: str, slave: str) -> None:
        self.now = 1_000.0
        self.nodes = {MASTER: master, SLAVE: slave}
        self.up: set[str] = set()
        self.arriving: list[tuple[float, Arrival]] = []
        self.asked: list[tuple[str, api.Request]] = []
        self.addresses: list[str] = []

    def monotonic_ms(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return 0

    # -- the transport

    def open(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            if address not in self.addresses:
                self.addresses.append(address)

    def is_up(self, address: str) -> bool:
        return address in self.up

    def heard_ms(self, _address: str) -> float:
        return 0.0

    def silence(self, address: str) -> NoAnswer | None:
        return None if address in self.up else NoAnswer(Quiet.REFUSED, "nobody is there")

    def send(self, address: str, message: api.Request, _payload: bytes | None = None) -> bool:
        self.asked.append((address, message))
        if address not in self.up:
            return False
        if self.nodes[address] == WELL:
            later, reply = self.answer(address, message)
            self.arriving.append((self.now + later, Arrival(address, reply)))
        return True

    def answer(self, address: str, message: api.Request) -> tuple[float, api.Reply]:
        rid = message.rid
        if isinstance(message, api.AskMap):
            return 1.0, api.Map(rid, api.MapInfo(
                NODES.index(address) + 1, "MASTER" if address == MASTER else "SLAVE", EPOCH,
                address == MASTER, 10, 1, MASTER, dict(enumerate(NODES, 1)),
            ))  # fmt: skip
        if isinstance(message, api.Pull):
            return float(message.wait_ms), api.Pulled(rid, api.PullStatus.NO_NEW, 0, 0, 0)
        replies: dict[type, api.Reply] = {
            api.AskTopics: api.Topics(rid, {"t": {0: (0, 0)}}, 1),
            api.AskStatus: api.NodeStatus(rid, {"node": NODES.index(address) + 1}),
            api.Fetch: api.Positions(rid, {}),
            api.FindTime: api.TimeFound(rid, 0),
            api.Commit: api.PutDone(rid, api.Status.PUT_OK, EPOCH),
        }
        return 1.0, replies[type(message)]

    def collect(self) -> list[Arrival]:
        for address in self.addresses:
            there = self.nodes[address] != DOWN
            if there != (address in self.up):
                self.up ^= {address}
                if not there:
                    self.arriving = [a for a in self.arriving if a[1].address != address]
                self.arriving.insert(0, (0.0, Arrival(address, None, up=there)))
        due = [arrival for at, arrival in self.arriving if at <= self.now]
        self.arriving = [one for one in self.arriving if one[0] > self.now]
        return due

    def wait(self, timeout_s: float) -> list[Arrival]:
        found = self.collect()
        if not found and timeout_s > 0.0:
            events = [at for at, _ in self.arriving]
            self.now = min([self.now + timeout_s * 1000.0, *events])
            found = self.collect()
        return found

    def due_s(self) -> float:
        return -1.0

    def sleep(self, _timeout_s: float) -> None: ...
    def wake(self) -> None: ...
    def reopen(self, _address: str) -> None: ...
    def close(self, linger_s: float = 1.0) -> None: ...
    def abandon(self) -> None: ...


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(master: str = WELL, slave: str = WELL) -> World:
        world = World(master, slave)
        monkeypatch.setattr(
            requester_module, "make_transport", lambda addresses, *_: (addresses, world)
        )
        return world

    return make


def consumer_of(world: World, **options: Any) -> Consumer:
    return Consumer("t", list(NODES), clock=world, **options)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("state", [DOWN, SILENT])
@pytest.mark.parametrize("timeout_s", [0.0, 0.2, 1.0, 30.0])
def test_the_first_poll_keeps_its_timeout_when_no_node_answers(
    make_world: Any, state: str, timeout_s: float
) -> None:
    world = make_world(state, state)
    with consumer_of(world, group="g") as consumer:
        began = world.now
        assert consumer.poll(timeout_s=timeout_s) == []
        assert world.now - began == pytest.approx(timeout_s * 1000.0, abs=1e-6)


def test_short_polls_get_as_far_as_a_long_one(make_world: Any) -> None:
    world = make_world()
    with consumer_of(world, group="g") as consumer:
        for _ in range(20):
            assert consumer.poll(timeout_s=0.0) == []
            world.now += 1.0  # what the program does between them
        assert consumer.source == SLAVE
    assert sum(isinstance(one, api.AskTopics) for _, one in world.asked) == 1


def test_polls_warn_once_when_no_node_answers_and_say_once_when_one_does(
    make_world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(DOWN, SILENT)
    with consumer_of(world) as consumer:
        for _ in range(10):
            assert consumer.poll(timeout_s=1.0) == []
        (warning,) = warnings_in(caplog)
        assert "consumer of t: no answer from" in warning
        assert MASTER in warning and SLAVE in warning
        assert f"({MASTER}: nobody is there)" in warning, "and why, as far as that is known"
        world.nodes[SLAVE] = WELL
        for _ in range(10):
            consumer.poll(timeout_s=1.0)
        assert consumer.source == SLAVE
        assert "nodes answer again" in warnings_in(caplog)[1]
        world.nodes[SLAVE] = SILENT  # later too
        for _ in range(10):
            assert consumer.poll(timeout_s=1.0) == []
        world.nodes[MASTER] = WELL
        for _ in range(10):
            consumer.poll(timeout_s=1.0)
    assert ["no answer" in one for one in warnings_in(caplog)] == [True, False, True, False]


def test_time_in_which_nobody_polls_is_no_silence(
    make_world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    with consumer_of(world) as consumer:
        for _ in range(5):
            consumer.poll(timeout_s=0.1)
            world.now += 3_600_000.0
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("call", ["positions", "commit", "committed", "seek_to_earliest"])
@pytest.mark.parametrize("silent", [(SILENT, SILENT), (DOWN, DOWN), (DOWN, SILENT)])
def test_other_calls_of_a_consumer_have_one_timeout(
    make_world: Any, call: str, silent: tuple[str, str]
) -> None:
    world = make_world(*silent)
    with consumer_of(world, group="g", timeout_s=4.0) as consumer:
        began = world.now
        with pytest.raises(UnreachableError):
            getattr(consumer, call)()
        assert world.now - began <= 4_000.0 + 1.0


@pytest.mark.parametrize("silent", [DOWN, SILENT])
def test_a_silent_node_leaves_time_for_the_others(make_world: Any, silent: str) -> None:
    world = make_world(WELL, silent)
    with consumer_of(world, group="g", timeout_s=4.0) as consumer:
        began = world.now
        consumer.commit()  # the first survey, the topic, the positions, the commit
        consumer.seek_to_time(5)
        assert world.now - began <= 8_000.0
    positions = Positions(list(NODES), timeout_s=4.0, clock=world)
    began = world.now
    positions.commit("g", "t", {0: 0})
    assert world.now - began <= 4_000.0
    positions.close()


def test_the_calls_of_an_administrator_have_one_timeout(make_world: Any) -> None:
    world = make_world(WELL, SILENT)
    with Admin(list(NODES), timeout_s=4.0, clock=world) as admin:
        for call in (admin.status, admin.topics, admin.maps):
            began = world.now
            assert len(call()) == 1
            assert world.now - began <= 4_000.0
        world.nodes[MASTER] = SILENT
        for call in (admin.status, admin.topics, admin.maps):
            began = world.now
            with pytest.raises(UnreachableError):
                call()
            assert world.now - began <= 4_000.0


# -- producers


class JumpingClock(SystemClock):
    """The machine's clock, further on by `jump_ms`."""

    jump_ms = 0.0

    def monotonic_ms(self) -> float:
        return super().monotonic_ms() + self.jump_ms


def test_an_asyncio_producers_timeout_counts_from_send(node: Node) -> None:
    clock = JumpingClock()

    async def main() -> None:
        node.backend.transfer.hold = True
        producer = aio.Producer(
            [node.address], max_in_flight=1, delivery_timeout_s=600, clock=clock
        )
        first = asyncio.create_task(producer.send("t", b"1", queue=0))
        while not node.backend.transfer.waiting:
            await asyncio.sleep(0.002)
        waits = asyncio.create_task(producer.send("t", b"2", queue=0))
        batch = asyncio.create_task(producer.send_batch("t", [b"3"], queue=0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        clock.jump_ms = 601_000.0
        producer._driver._on_ready()
        results = await asyncio.gather(first, waits, batch, return_exceptions=True)
        for late in results[1:]:
            assert isinstance(late, NotStoredError) and "max_in_flight" in str(late)
        await producer.close(timeout_s=0)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_message_that_waited_for_room_has_only_the_rest_of_its_time(node: Node) -> None:
    clock = JumpingClock()

    async def main() -> None:
        node.backend.transfer.hold = True
        producer = aio.Producer(
            [node.address], max_in_flight=1, delivery_timeout_s=600, clock=clock
        )
        first = asyncio.create_task(producer.send("t", b"1", queue=0))
        while not node.backend.transfer.waiting:
            await asyncio.sleep(0.002)
        asyncio.create_task(producer.send("t", b"2", queue=0)).add_done_callback(
            lambda task: task.exception()
        )
        await asyncio.sleep(0)
        latest_ms = clock.monotonic_ms() + 600_000.0
        clock.jump_ms = 2_000.0  # less than it takes until the frame is sent again
        node.backend.transfer.end_all()
        await first
        window = producer._driver._window
        while not (entries := window.entries()):
            await asyncio.sleep(0.002)
        assert entries[0].expires_ms <= latest_ms
        await producer.close(timeout_s=0)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("batch", [False, True])
def test_a_blocking_producers_timeout_counts_from_send(node: Node, batch: bool) -> None:
    clock = JumpingClock()
    node.backend.transfer.hold = True
    producer = Producer([node.address], max_in_flight=1, delivery_timeout_s=600, clock=clock)
    producer.send("t", b"1", queue=0)
    wait_for(lambda: node.backend.transfer.waiting)
    late: list[Any] = []

    def send() -> None:
        send = producer.send_batch if batch else producer.send
        late.append(send("t", [b"2"] if batch else b"2", queue=0))  # type: ignore[operator]

    waits = threading.Thread(target=send)
    waits.start()
    wait_for(lambda: producer._driver._progress.sleepers)
    clock.jump_ms = 601_000.0
    producer._driver.wake()
    waits.join(60)
    assert isinstance(late[0].exception(60), NotStoredError)
    producer.close(timeout_s=0)


def test_a_batch_of_many_frames_has_one_timeout(node: Node) -> None:
    """Each frame that found no room had one of its own, one after the other."""
    clock = JumpingClock()
    node.backend.transfer.hold = True
    producer = Producer([node.address], max_in_flight=1, delivery_timeout_s=600, clock=clock)
    producer.send("t", b"1", queue=0)
    wait_for(lambda: node.backend.transfer.waiting)
    late: list[Any] = []

    def send() -> None:
        late.append(producer.send_batch("t", [b"2", b"3", b"4"], queue=0))

    waits = threading.Thread(target=send)
    waits.start()
    wait_for(lambda: producer._driver._progress.sleepers)
    latest_ms = clock.monotonic_ms() + 600_000.0
    clock.jump_ms = 601_000.0
    producer._driver.wake()
    waits.join(60)
    assert isinstance(late[0].exception(60), NotStoredError)
    assert all(entry.expires_ms <= latest_ms for entry in producer._window.entries())
    producer.close(timeout_s=0)


def test_a_batch_for_a_whole_cluster_has_one_timeout(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waits for a group with a master is part of it."""
    clock = JumpingClock()
    monkeypatch.setattr(cluster_producer, "ClusterGroups", lambda *_: OneGroup(node.address))
    node.backend.transfer.hold = True
    node.backend.writable = False
    producer = Producer("zk://127.0.0.1:1/shop", delivery_timeout_s=600, clock=clock)
    assert isinstance(producer, ClusterProducer)
    latest_ms = clock.monotonic_ms() + 600_000.0
    sender = threading.Thread(target=lambda: producer.send_batch("t", [b"1"]))
    sender.start()
    wait_for(lambda: producer._down)  # it has looked at the group
    clock.jump_ms = 400_000.0
    node.backend.writable = True
    wait_for(lambda: node.backend.transfer.waiting)
    sender.join(60)
    [group] = producer._producers.values()
    [entry] = group._window.entries()
    assert entry.expires_ms <= latest_ms + 60_000.0, "the machine may be slow"
    producer.close(timeout_s=0)


@pytest.mark.parametrize(("timeout_s", "most_s"), [(0, 0.0), (0.25, 0.25), (None, 1.0)])
def test_closing_gives_unsent_bytes_no_more_than_its_timeout(
    node: Node, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, most_s: float
) -> None:
    producer = Producer([node.address])
    producer.send_sync("t", b"1", queue=0)
    lingers: list[float] = []
    transport = producer._driver._transport
    close = transport.close

    def noted(linger_s: float = 1.0) -> None:
        lingers.append(linger_s)
        close(linger_s)

    monkeypatch.setattr(transport, "close", noted)
    producer.close(timeout_s)
    assert len(lingers) == 1 and lingers[0] <= most_s
