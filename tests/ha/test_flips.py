"""Thousands of flips: histories fit in a HELLO, and a forgotten range costs a copy, but no data.

The nodes of the simulation with the product's own bounds; a failure prints its seed.
"""

import contextlib
import logging
import os
import random

import pytest

from hastore.errors import PromotionRefused
from hastore.ha.promoter import Flags
from hastore.ha.rules import epochs
from hastore.ha.rules.epochs import FLOOR_EPOCH, Standing, check_position
from hastore.protocol.hello import HELLO_BYTES_MAX, Purpose, encode_hello
from tests.ha.sim_queues import QueueWorld
from tests.ha.simulation import (
    NESTED_MAX,
    PLAIN,
    Crash,
    SimNode,
    Violation,
    World,
    installed,
    size_of,
)

FLIPS = (1_500, pytest.param(5_000, marks=pytest.mark.full))
NODE_FILE_BYTES_MAX = 100 * 1024


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Flips:
    """A group whose only faults are those of a test, and the records acknowledged in it."""

    def __init__(
        self, seed: int, *, entries: int = epochs.ENTRIES_MAX, world: World | None = None
    ) -> None:
        self.world = world or World(seed, nodes=3, entries=entries, crash_rate=0.0)
        self.world.loss_rate = 0.0
        self.world.depth = NESTED_MAX  # nothing happens between two calls
        self.written = 0
        self.acked: dict[int, int] = {}  # offset: value
        self.positions: list[tuple[int, int]] = []  # (epoch, offset) of each

    @property
    def up(self) -> list[SimNode]:
        return [node for node in self.world.nodes.values() if node.up]

    def node(self, number: int) -> SimNode:
        return self.world.nodes[number]

    def promote(self, number: int, flags: Flags = PLAIN) -> SimNode:
        node = self.node(number)
        for each in self.up:
            each.end_stream()
        node.promoter.begin()
        self.world.do_promote(node, flags)
        self.world.connections = [c for c in self.world.connections if not c.closed]
        return node

    def put(self, master: SimNode) -> int:
        """Append one record in the master's log; return its offset."""
        self.written += 1
        value, start = 1 + self.written % 255, master.store.max_offset
        with master.member.gate.lock:
            master.store.append_replica(start, bytes([value]) * size_of(value))
            master.ha.on_append(start, master.store.max_offset)
        return start

    def stream(self, master: SimNode, *numbers: int) -> None:
        """Let these nodes follow until they have all of the master's log and it is confirmed."""
        for _ in range(100_000):
            followers = [self.node(number) for number in numbers or self.world.numbers]
            followers = [node for node in followers if node.up and node is not master]
            for node in followers:
                if node.stream is None or node.stream.closed:
                    node.end_stream()
                    node.client._follow_once()
            self.world.do_send(master)
            for node in followers:
                self.world.do_receive(node)
            self.world.do_report(master)
            same = {(n.store.max_offset, n.state.last_epoch) for n in [master, *followers]}
            if len(same) == 1 and master.store.confirmed_offset == master.store.max_offset:
                return
        raise AssertionError("the group does not come together")

    def flip(self, number: int, puts: int) -> SimNode:
        master = self.promote(number)
        starts = [self.put(master) for _ in range(puts)]
        self.stream(master)
        for start in starts:
            self.acked[start] = master.store.data[start]
            self.positions.append((master.state.last_epoch, start))
        return master

    def check(self) -> None:
        """Every running node has all acknowledged records, and every HELLO is short enough."""
        for node in self.up:
            said = len(encode_hello(node.member.hello(Purpose.SURVEY)))
            assert said < HELLO_BYTES_MAX, f"a HELLO of {said} bytes"
            [state] = node.files.files.values()
            assert len(state) < NODE_FILE_BYTES_MAX, f"node.json of {len(state)} bytes"
            for start, value in self.acked.items():
                assert node.store.data[start] == value, f"{start} is lost on node {node.number}"


def standing(node: SimNode, position: tuple[int, int]) -> tuple[Standing, int]:
    history = [(entry.epoch, entry.start) for entry in node.state.history]
    return check_position(history, node.store.max_offset, *position)


@pytest.mark.parametrize("flips", FLIPS)
def test_thousands_of_flips_never_outgrow_a_hello(flips):
    """One node is away for all flips but the first, another repeatedly for a few."""
    seed = int(os.environ.get("HASTORE_SEED", random.SystemRandom().randrange(1 << 31)))
    print(f"HASTORE_SEED={seed}")
    rng = random.Random(seed)
    group = Flips(seed)
    with installed(group.world):
        group.flip(3, 2)
        group.flip(1, 2)
        group.node(3).die()
        away = 0
        for number in range(flips):
            if away and number >= away:
                away = 0
            if not away and number % 500 == 250:
                away = number + 20
            # Node 2 answers promises and takes no bytes.
            chosen = 1 if away else rng.choice((1, 2))
            if away:
                master = group.promote(chosen)
                if rng.random() < 0.7:
                    group.put(master)
            else:
                master = group.flip(chosen, rng.choice((0, 1, 1, 2)))
            if number % 500 == 499:
                group.check()
        group.node(3).start()
        master = group.flip(2, 1)
        group.check()
        assert group.node(3).state.data.aside == 1  # a full copy; the old store was set aside
        for node in group.up:
            assert node.store.data == master.store.data and not node.state.data.unclean
            assert node.state.history[0].epoch == FLOOR_EPOCH
            assert standing(node, group.positions[-200]) == (
                Standing.AGREED, group.positions[-200][1],
            )  # fmt: skip
            assert standing(node, group.positions[0]) == (Standing.LOST, 0)
        group.flip(3, 1)
        group.check()


def test_flips_without_a_put_forget_nothing():
    """Epochs that wrote nothing are removed first: a node that missed thousands copies nothing."""
    group = Flips(1)
    with installed(group.world):
        first = group.flip(3, 3)
        group.node(3).die()
        for number in range(3 * epochs.ENTRIES_MAX):
            group.promote(1 + number % 2)
        group.node(3).start()
        master = group.flip(1, 1)
        assert first.number == 3 and group.node(3).state.data.aside == 0
        assert master.state.history[0].epoch != FLOOR_EPOCH
        assert standing(master, group.positions[0])[0] is Standing.AGREED
        group.check()


def a_left_out_entry_outlives_a_rewind() -> None:
    """A record confirmed under an epoch whose entry is removed must not lose against an older tail.

    Node 2 has bytes of epoch 1 that were confirmed in epoch 3, and node 3 a tail of epoch 2. The
    master has removed the entry of 3, and dies after it has told node 2 that it does not know 3.
    """
    group = Flips(7, entries=4)
    world = group.world
    with installed(world):
        master = group.flip(1, 2)
        common = master.store.max_offset
        for _ in range(3):
            group.put(master)  # on node 1 alone
        world.cut_off = {1}
        rival = group.promote(3)
        for _ in range(9):
            group.put(rival)  # on node 3 alone, epoch 2
        world.cut_off = {3}
        master = group.promote(1)
        group.stream(master, 2)
        confirmed = master.store.confirmed_offset
        assert common < confirmed < rival.store.max_offset
        held = bytes(master.store.data)
        for _ in range(12):
            group.promote(1)  # node 2 promises, but does not follow
        assert len(master.state.history) <= 4
        two = group.node(2)
        two.end_stream()
        two.store.confirmed_offset = common  # its limits page is an older one
        before = [entry.epoch for entry in two.state.history]
        assert before[-1] not in [entry.epoch for entry in master.state.history]
        two.client._follow_once()  # it learns which entries the master does not know, nothing else
        master.die()
        world.cut_off.clear()
        two.start()
        with contextlib.suppress(Crash):
            try:
                group.promote(2)
            except PromotionRefused as refused:
                raise Violation(f"what was confirmed lost: {refused}") from refused
        if bytes(two.store.data[:confirmed]) != held[:confirmed]:
            raise Violation("what was confirmed is cut")


def follow_until(group: Flips, master: SimNode, number: int, end: int) -> SimNode:
    """Let a node follow until its log has come to `end`; return it."""
    node = group.node(number)
    node.end_stream()
    node.client._follow_once()
    while node.store.max_offset < end:
        group.world.do_send(master)
        group.world.do_receive(node)
    return node


def a_slave_has_a_part_of_an_older_tail() -> None:
    """A slave's report confirms nothing below the start of its master's epoch.

    Node 1 leads again with a tail of its first epoch, and node 2 has got a part of it. Node 3, with
    an empty epoch in between, wins against that part. Neither node 2 nor node 1, which has its
    report, may have taken the part for confirmed.
    """
    group = Flips(7)
    world = group.world
    with installed(world):
        master = group.flip(1, 2)
        common = master.store.max_offset
        for _ in range(20):
            group.put(master)  # on node 1 alone
        world.cut_off = {1}
        group.promote(3)
        world.cut_off = {3}
        master = group.promote(1)
        two = follow_until(group, master, 2, common + 10)
        assert two.store.max_offset < master.state.history[-1].start
        for _ in range(10):
            world.do_report(master)
        held = {
            node: bytes(node.store.data[: node.store.confirmed_offset]) for node in (master, two)
        }
        master.die()
        world.cut_off.clear()
        winner = group.promote(3)
        assert winner.open and winner.store.max_offset == common
        for node, confirmed in held.items():
            if bytes(winner.store.data[: len(confirmed)]) != confirmed:
                raise Violation(f"what node {node.number} took for confirmed is lost")


def a_master_loses_what_it_had_not_synced() -> None:
    """At ack point flushed a slave's synced copy is one copy, whatever its master has written."""
    world = World(7, nodes=3, crash_rate=0.0, flushed=True)
    group = Flips(7, world=world)
    with installed(world):
        master = group.promote(1)
        group.put(master)
        end = master.store.max_offset
        two = follow_until(group, master, 2, end)
        world.do_flush(two)
        for _ in range(5):  # until the slave receives something again
            world.do_send(master)
            world.do_receive(two)
        confirmed = two.store.confirmed_offset
        master.die()
        master.store._cut(master.store.flushed_offset)
        master.files.boot += 1
        master.start()
        assert master.store.max_offset < end and not master.state.data.unclean
        two.end_stream()
        world.cut_off = {2}
        winner = group.promote(3)
        assert winner.open
        if winner.store.max_offset < confirmed:
            raise Violation("what a slave took for confirmed is lost")


def a_statement_is_cut_by_a_failover(confirmed: int) -> None:
    """A master removes files after it has stated the ends of quiet queues, and is superseded.

    Of the two parts of its statement `confirmed` were confirmed; its rewind cuts the others.
    """
    world = QueueWorld(7, nodes=3, crash_rate=0.0)
    group = Flips(7, world=world)
    with installed(world):
        master = group.promote(1)
        for queue in (1, 2, 0, 0, 0, 0):  # 1 and 2 are quiet from now on
            world.append(master, queue=queue)
        group.stream(master)
        last = max(start for start, _ in master.store.records())
        parts = world.statement(master, last)
        assert len(parts) == 2
        for part in parts[:confirmed]:
            world.append(master, stated=part)
        group.stream(master)
        for part in parts[confirmed:]:
            world.append(master, stated=part)
        master.store.flush()
        for _ in range(30):
            world.do_retain(master)
        master.die()
        rival = group.promote(2)
        world.append(rival, queue=0)
        master.start()
        group.stream(rival)
        assert master.state.data.aside == 0 and master.store.data == rival.store.data
        group.promote(1)
        world.check()
        assert world.ends_of(master) == {0: 5, 1: 1, 2: 1}
        assert (master.store.min_offset > 0) is (confirmed == 2)


@pytest.mark.parametrize("confirmed", [0, 1, 2])
def test_a_statement_counts_once_a_failover_cannot_cut_it(confirmed):
    a_statement_is_cut_by_a_failover(confirmed)


def test_a_left_out_entry_outlives_a_rewind():
    a_left_out_entry_outlives_a_rewind()
