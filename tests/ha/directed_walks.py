"""Walks of the simulated group for mistakes that random walks hardly ever meet.

Each plays one story, and raises Violation where the story ends with a broken promise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from hastore.errors import HastoreError, PromotionRefused
from hastore.ha.promoter import Flags
from tests.ha.simulation import Crash, SimNode, Violation, World, installed, size_of
from tests.ha.test_flips import Flips, follow_until


@contextlib.contextmanager
def a_group(*, flushed: bool = False) -> Iterator[Flips]:
    """Yield three nodes without faults of their own."""
    world = World(7, nodes=3, crash_rate=0.0, flushed=flushed)
    group = Flips(7, world=world)
    with installed(world):
        yield group


def lose_power(node: SimNode) -> None:
    """End a node with all that it has not synced, and start it again."""
    node.die()
    node.store._cut(node.store.flushed_offset)
    node.files.boot += 1
    node.start()


def confirmed_bytes(node: SimNode) -> bytes:
    """Return what this node takes for confirmed."""
    return bytes(node.store.data[: node.store.confirmed_offset])


def must_keep(group: Flips, number: int, confirmed: bytes) -> None:
    """Promote a node: if that opens, its log must have what was confirmed."""
    try:
        with contextlib.suppress(Crash):
            group.promote(number)
    except PromotionRefused:
        return
    node = group.node(number)
    if node.open and bytes(node.store.data[: len(confirmed)]) != confirmed:
        raise Violation(f"node {number} leads without what was confirmed")


def follow(group: Flips, master: SimNode, number: int) -> SimNode:
    """Let a node follow until it has all, or is refused."""
    node = group.node(number)
    node.end_stream()
    with contextlib.suppress(HastoreError, OSError):
        node.client._follow_once()
        for _ in range(500):
            if node.stream is None or node.store.max_offset >= master.store.max_offset:
                break
            group.world.do_send(master)
            group.world.do_receive(node)
    return node


def report(group: Flips, master: SimNode) -> None:
    """Let the master take all reports that are in flight."""
    for _ in range(20):
        group.world.do_report(master)


def a_master_counts_what_it_has_not_synced() -> None:
    """At ack point flushed a master confirms nothing that it has not synced itself."""
    with a_group(flushed=True) as group:
        master = group.promote(1)
        group.put(master)
        two = follow(group, master, 2)
        group.world.do_flush(two)
        report(group, master)
        confirmed = confirmed_bytes(master)
        lose_power(master)
        two.end_stream()
        group.world.cut_off = {2}
        must_keep(group, 3, confirmed)


def a_node_restarts_twice_after_a_power_loss() -> None:
    """A second start in the same boot does not make a node clean that may have lost records."""
    with a_group() as group:
        master = group.promote(1)
        group.put(master)
        two = follow(group, master, 2)
        report(group, master)
        confirmed = confirmed_bytes(master)
        assert confirmed
        lose_power(two)
        two.die()
        two.start()
        master.die()
        must_keep(group, 3, confirmed)


def a_rival(group: Flips, *, own: int, rivals: int) -> int:
    """Let node 1 have `own` records that nobody else has, then node 3 `rivals` in a later epoch.

    Both continue the same log, of which all nodes have everything; return its end. Node 3 is cut
    off.
    """
    master = group.flip(1, 1)
    common = master.store.max_offset
    for _ in range(own):
        group.put(master)
    group.world.cut_off = {1}
    rival = group.promote(3)
    for _ in range(rivals):
        group.put(rival)
    group.world.cut_off = {3}
    return common


def a_slave_has_all_bytes_but_not_the_entry() -> None:
    """A HELLO confirms nothing: its sender may not have taken over its master's epoch yet.

    Node 2 has all bytes of node 1, which leads again, and dies before it has written the entry of
    that epoch. So node 3, with a tail of an epoch in between, wins against it.
    """
    with a_group() as group:
        a_rival(group, own=5, rivals=1)
        master = group.promote(1)
        start, two = master.state.history[-1].start, group.node(2)

        def before_the_entry() -> None:
            if two.store.max_offset == start:
                raise Crash(two.number)

        two.store._effect = before_the_entry
        with contextlib.suppress(Crash):
            follow_until(group, master, 2, start)
        two.die()
        two.store._effect = two._effect
        two.start()
        assert two.store.max_offset == start and two.state.last_epoch < master.state.last_epoch

        def dies(_opened: object) -> bool:
            raise Crash(two.number)

        two.client._act_on = dies
        with contextlib.suppress(Crash):
            two.client._follow_once()
        confirmed = confirmed_bytes(master)
        two.die()
        two.start()
        master.die()
        group.world.cut_off.clear()
        must_keep(group, 3, confirmed)


def a_source_follows_another_master_while_it_is_copied() -> None:
    """A catch-up takes no byte of a source that has another log than it promised with.

    Node 2 becomes master with the log of node 1. In the middle of the copy node 3 is promoted, and
    node 1 follows it and gets other bytes at the same offsets.
    """
    with a_group() as group:
        world = group.world
        common = a_rival(group, own=5, rivals=20)
        one, two = group.node(1), group.node(2)
        tail = bytes(one.store.data)
        moved: list[SimNode] = []

        def meanwhile(_busy: SimNode) -> None:
            if moved or two.store.max_offset <= common:
                return
            moved.append(one)
            world.cut_off = {2}
            rival = group.promote(3)
            while one.store.max_offset <= len(tail):
                follow(group, rival, 1)

        world.nested = meanwhile
        with contextlib.suppress(PromotionRefused):
            group.promote(2)
        assert moved and bytes(one.store.data[: len(tail)]) != tail
        if two.open and bytes(two.store.data[: len(tail)]) != tail:
            raise Violation("node 2 leads with a mixture of two logs")


def a_candidate_asks_late() -> None:
    """A master of a higher epoch does not leave office for a lower one.

    Node 3 has chosen its epoch and asks for promises only after node 1 was promoted twice.
    """
    with a_group() as group:
        world = group.world
        group.flip(2, 1)
        three = group.node(3)
        asks = three.ask_for_promises

        def later() -> None:
            world.cut_off = {3}
            group.promote(1)
            group.promote(1)
            world.cut_off.clear()
            asks()

        three.ask_for_promises = later
        with contextlib.suppress(PromotionRefused):
            group.promote(3)
        master = group.node(1)
        if not master.open or three.open:
            raise Violation(f"epoch {master.state.last_epoch} has ended for a lower one")


def a_node_dies_in_the_middle_of_a_cut() -> None:
    """A cut that a crash interrupts is finished at the next start, before any HELLO.

    Node 1 has noted, for its operator, that its tail is cut, and dies when half of it is gone.
    """
    with a_group() as group:
        world = group.world
        common = a_rival(group, own=5, rivals=1)
        world.cut_off.clear()
        one = group.node(1)
        end = one.store.max_offset
        one.leave_office()

        def in_the_middle() -> None:
            if one.store.max_offset < end:
                raise Crash(one.number)

        store: Any = one.store
        store._effect = in_the_middle
        store._rng = SimpleNamespace(randint=lambda low, high: (low + high) // 2)
        with contextlib.suppress(Crash):
            one.client._follow_once()
        assert common < one.store.max_offset < end
        one.die()
        store._effect, store._rng = one._effect, world.rng
        one.start()
        if one.store.max_offset != common:
            raise Violation("a part of a tail that was cut is back")


def lose_end_and_write_on(group: Flips, master: SimNode, two: SimNode) -> int:
    """Let a master lose what it has not synced, resume its epoch while node 2 is silent, and write
    beyond that one's end; return where their logs part.
    """
    master.die()
    begin = master.store.flushed_offset
    master.store._cut(begin)
    master.start()
    two.end_stream()
    group.world.cut_off = {2}
    if not master.resume():
        raise Violation("a master needs a silent slave")
    while master.store.max_offset <= two.store.max_offset:
        group.put(master)
    group.world.cut_off = set()
    return begin


@contextlib.contextmanager
def a_master_that_wrote_over_a_lost_end(
    more: int = 0,
) -> Iterator[tuple[Flips, SimNode, SimNode, int]]:
    """Yield a group, its master, a slave that was silent when the master resumed its epoch without
    the end of its log, and where their logs part: the master has written beyond the slave's end.
    The slave has `more` records there than one.
    """
    with a_group() as group:
        master = group.promote(1)
        group.put(master)
        group.stream(master)
        master.store.flush()
        for _ in range(1 + more):
            group.put(master)
        two = follow(group, master, 2)
        yield group, master, two, lose_end_and_write_on(group, master, two)


def a_refused_slave_stays_refused() -> None:
    """Neither another restart of the master nor a cut that fails makes the two logs the same, and
    no promotion may mix them.
    """
    with a_master_that_wrote_over_a_lost_end() as (group, master, two, begin):
        kept, epoch = bytes(two.store.data), master.state.last_epoch
        for _ in range(2):
            follow(group, master, 2)
            if bytes(two.store.data) != kept:
                raise Violation("a slave follows over other messages")
            for number in (1, 2, 3):
                with contextlib.suppress(PromotionRefused):
                    group.promote(number)
                if group.node(number).state.data.promised_epoch != epoch:
                    raise Violation("a promotion mixes other messages of one epoch")
            master.die()
            master.start()
            if not master.resume():
                raise Violation("a master must not begin a new epoch with what it has replaced")
        rewind, two.client._rewind = two.client._rewind, no_room
        for _ in range(2):
            two.client.accept_loss = True
            follow(group, master, 2)
            if bytes(two.store.data) != kept:
                raise Violation("a slave follows over other messages after a cut that failed")
        two.client._rewind = rewind
        follow(group, master, 2)
        follow(group, master, 2)
        if two.store.data != master.store.data or begin >= len(kept):
            raise Violation("a slave that gave its messages up does not follow")


def refuses(group: Flips, numbers: Sequence[int], epoch: int) -> None:
    """Let these nodes be promoted in vain: that they try does not raise a promise."""
    for number in numbers:
        with contextlib.suppress(PromotionRefused):
            group.promote(number)
        if group.node(number).state.data.promised_epoch > epoch:
            raise Violation("a promotion mixes other messages of one epoch")


def a_refused_slave_is_promoted(*, gives_up: bool) -> None:
    """The master that has refused a slave is gone: no plain promotion that would open or copy that
    slave's log asks for promises, and nothing is mixed by one that does neither. With `gives_up`
    the slave is promoted by an operator who accepts the loss, and the others part from its log.
    """
    with a_master_that_wrote_over_a_lost_end() as (group, master, two, begin):
        kept, epoch = bytes(two.store.data), master.state.last_epoch
        follow(group, master, 2)
        group.world.cut_off = {1}
        refuses(group, (2, 3), epoch)  # node 3 has nothing of that yet
        group.world.cut_off = set()
        three = follow(group, master, 3)
        if not three.store.data.startswith(master.store.data):
            raise Violation("a slave does not follow")
        master.die()
        two.die()
        two.start()
        refuses(group, (2,), epoch)
        if not gives_up:
            leader = group.promote(3)
            if not leader.open:
                raise Violation("a node that has all of the master's messages is not promoted")
            group.put(leader)
            master.start()
        else:
            leader = group.promote(2, Flags(accept_loss=True))
            if not leader.open or bytes(two.store.data) != kept:
                raise Violation("a slave that shall keep its messages does not")
            group.put(leader)
            master.start()
        if not gives_up:
            follow(group, leader, 2)
            if bytes(two.store.data) != kept:
                raise Violation("confirmed messages are cut without the operator")
            two.client.accept_loss = True
        for number in (1, 2, 3) * 3:
            if number != leader.number:
                follow(group, leader, number)
        if len({bytes(node.store.data) for node in group.world.nodes.values()}) > 1:
            raise Violation("the logs do not become equal")
        if two.store.data.startswith(kept) is not gives_up or begin >= len(kept):
            raise Violation("other messages are kept than the operator wants")


def a_late_slave_comes_in_the_next_epoch(
    *, leader: int = 1, followed: bool = True, confirmed: bool = True
) -> None:
    """A master loses its log's end, writes others messages over it, and its epoch ends, while a
    slave that has the lost end is away all the time. When that one comes, its messages are not
    taken for the new master's, and stay if it knows them as confirmed.

    `leader` begins the new epoch. It has `followed` the old master, or copies its log only then.
    """
    with a_master_that_wrote_over_a_lost_end(more=1) as (group, master, two, begin):
        kept = bytes(two.store.data)
        group.world.cut_off = {2}
        if followed:
            follow(group, master, 3)
        master = group.promote(leader)
        group.put(master)
        group.world.cut_off = set()
        if not master.open or len(kept) >= master.state.history[-1].start:
            raise Violation("a flip without the slave that is away")
        if not confirmed:
            two.store.confirmed_offset = begin
        for accept_loss in (False, True):
            two.client.accept_loss = accept_loss
            for _ in range(3):
                follow(group, master, 2)
                if two.stream is not None and two.store.data != master.store.data:
                    raise Violation("a slave follows over other messages of an older epoch")
            if confirmed and not accept_loss and bytes(two.store.data) != kept:
                raise Violation("confirmed messages are cut without the operator")
            if (accept_loss or not confirmed) and two.stream is None:
                raise Violation("a slave that may cut its log does not follow")


def nobody_leads_who_mixes_a_lost_end() -> None:
    """The master that wrote over its lost end is gone before the slave that has that end meets it.
    Another slave has what the master wrote instead: it leads, without a copy from the first, which
    has more. The first one leads only if an operator gives up what the other one has.
    """
    for number, flags in ((3, Flags()), (2, Flags(accept_loss=True))):
        with a_master_that_wrote_over_a_lost_end(more=1) as (group, master, two, begin):
            three = follow(group, master, 3)
            report(group, master)
            own = {2: bytes(two.store.data), 3: bytes(three.store.data)}
            assert begin < len(own[2]) and own[2][begin] != own[3][begin]
            epoch = master.state.last_epoch
            two.store.data += bytes([200]) * size_of(200)  # it has more than the other one
            own[2] = bytes(two.store.data)
            master.die()
            refuses(group, (2,), epoch)
            leader = group.promote(number, flags)
            if not leader.open or bytes(leader.store.data) != own[number]:
                raise Violation("a promotion mixes other messages of one epoch")
            group.put(leader)
            master.start()
            for each in (1, 2, 3) * 3:
                if each != number:
                    group.node(each).client.accept_loss = True
                    follow(group, leader, each)
            if len({bytes(node.store.data) for node in group.world.nodes.values()}) > 1:
                raise Violation("the logs do not become equal")


def a_master_that_lost_nothing_cuts_nobody() -> None:
    """A master restarts many times in one epoch, and a slave misses some of that: none is refused
    or cut in that epoch or the next, and the history stays short.
    """
    with a_group() as group:
        master = group.promote(1)
        for number in range(12):
            group.put(master)
            follow(group, master, 2)
            if number % 5 == 4:
                follow(group, master, 3)
            group.put(master)
            master.die()
            master.start()
            if not master.resume() or len(master.state.history[-1].resumed or ()) > 3:
                raise Violation("a master that has lost nothing does not go on")
            kept = [bytes(group.node(each).store.data) for each in (2, 3)]
            group.put(master)
        for leader in (1, 3):
            master = group.promote(leader)
            for number, log in enumerate(kept, 2):
                follow(group, master, number)
                node = group.node(number)
                same = node.store.data == master.store.data and node.store.data.startswith(log)
                if not same or node.world.counts.get("lost end"):
                    raise Violation("a slave of a master that has lost nothing is cut")


def a_refused_slave_is_copied_anew() -> None:
    """Retention has removed the place where a refused slave's log and its master's part: it begins
    anew, under that master or a later one, and also after a crash when its new log is still empty.
    """
    with a_master_that_wrote_over_a_lost_end() as (group, master, two, begin):
        follow(group, master, 2)
        follow(group, master, 3)
        two.store.min_offset = begin + 1
        for _ in range(3):
            group.put(master)
        master.store.min_offset = two.store.max_offset + 1
        kept = bytes(two.store.data)
        follow(group, master, 2)
        if bytes(two.store.data) != kept:
            raise Violation("a slave gives its messages up without the operator")

        def dies(_entries: object) -> None:
            raise Crash(two.number)

        two.client.accept_loss = True
        two.state.replace_history = dies  # type: ignore[method-assign]
        with contextlib.suppress(Crash):
            follow(group, master, 2)
        assert two.store.min_offset == two.store.max_offset > begin
        two.die()
        two.start()
        follow(group, master, 2)
        if two.store.data[two.store.min_offset :] != master.store.data[two.store.min_offset :]:
            raise Violation("a slave whose resync was interrupted follows nobody")
    with a_master_that_wrote_over_a_lost_end(more=2) as (group, master, two, begin):
        follow(group, master, 2)
        follow(group, master, 3)
        two.store.min_offset, two.store.confirmed_offset = begin + 1, 0
        assert two.store.max_offset > two.store.min_offset
        master.die()
        leader = group.promote(3)
        group.put(leader)
        follow(group, leader, 2)
        follow(group, leader, 2)
        if two.store.data[two.store.min_offset :] != leader.store.data[two.store.min_offset :]:
            raise Violation("a slave cannot cut where its logs part, and follows nobody")


def a_node_that_refuses_its_promise_vouches_for_nothing() -> None:
    """Of a group of four with two acknowledgements node 2 is refused, and node 4, which has what
    the master wrote instead, answers the survey of node 3 and then refuses the promise. Node 3 must
    not lead: what was confirmed before the logs part is only on nodes that it does not copy.
    """
    world = World(7, nodes=4, acks=2, crash_rate=0.0)
    group = Flips(7, world=world)
    with installed(world):
        master = group.promote(1)
        group.put(master)
        group.stream(master)
        group.put(master)
        two = follow(group, master, 2)
        follow(group, master, 4)
        report(group, master)
        confirmed, begin = confirmed_bytes(master), master.store.flush()
        assert len(confirmed) == begin > group.node(3).store.max_offset
        group.put(master)
        follow(group, master, 2)
        lose_end_and_write_on(group, master, two)
        four, three = follow(group, master, 4), group.node(3)
        follow(group, master, 2)
        master.die()
        asks = three.ask_for_promises

        def too_late() -> None:
            four.state.promise(99 << 16 | 4)
            asks()

        three.ask_for_promises = too_late  # type: ignore[method-assign]
        must_keep(group, 3, confirmed)


def no_room(*_arguments: object) -> None:
    raise OSError("no room for the archive")


def a_master_returns_with_a_shorter_log_than_its_slave(*, late: bool = False) -> None:
    """A disk has dropped pages in silence: a slave has bytes of the epoch that its master lacks.

    `late`: the master cannot ask that slave before it resumes.
    """
    with a_group() as group:
        master = group.promote(1)
        group.put(master)
        group.stream(master)
        master.store.flush()
        group.put(master)
        two = follow(group, master, 2)
        kept = bytes(two.store.data)
        master.die()
        master.store._cut(master.store.flushed_offset)
        master.start()
        two.end_stream()
        group.world.cut_off = {2} if late else set()
        if master.resume() and not late:
            group.put(master)
        elif late:
            group.world.cut_off = set()
            follow(group, master, 2)
            if master.open or bytes(two.store.data) != kept:
                raise Violation("a master that lacks what its slave has goes on")
            group.promote(1)
        else:
            group.promote(1)
        follow(group, master, 2)
        if not master.store.data.startswith(kept) or not two.store.data.startswith(kept):
            raise Violation("what the slave had is lost, and equal offsets have different bytes")
