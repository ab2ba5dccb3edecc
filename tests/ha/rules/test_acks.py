"""Counting reports, compared with a naive count that sorts all reports each time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hastore.ha.rules.acks import AckTable, ClassicReporter, Intake, own_reports_confirm
from hastore.ha.rules.epochs import EpochEntry

NODES = frozenset({2, 3, 4})


def table(acks=1, start=0, **more):
    return AckTable(acks=acks, epoch_start=start, nodes=NODES, **more)


def joined(acks=1, start=0, flushed=(), **more):
    made = table(acks, start, **more)
    for node in NODES:
        made.join(node, node * 10, node in flushed)
    return made


@given(
    st.integers(1, 3), st.integers(0, 50), st.integers(0, 100),
    st.dictionaries(st.sampled_from(sorted(NODES)), st.integers(0, 100)),
)  # fmt: skip
def test_the_acks_th_greatest_report_counts(acks, start, own, reports):
    made = joined(acks, start)
    for node, offset in reports.items():
        assert made.report(node, node * 10, offset)
    ordered = sorted(reports.values(), reverse=True)
    reached = min(ordered[acks - 1], own) if len(ordered) >= acks else -1
    assert made.confirm(own) == (reached if reached >= start and reached > 0 else 0)


def test_an_older_epochs_tail_waits_for_the_new_start():
    made = joined(1, start=100)
    made.report(2, 20, 99)
    assert made.confirm(500) == 0
    made.report(2, 20, 100)
    assert made.confirm(99) == 0  # the master's own log has not reached it at its ack point
    assert made.confirm(500) == 100


def test_it_never_falls():
    made = joined(1, confirmed_offset=40)
    made.report(2, 20, 90)
    assert made.confirm(100) == 90
    made.join(2, 21, False)
    assert made.confirm(100) == 90
    made.report(2, 21, 50)
    assert made.confirm(100) == 90
    assert joined(1, confirmed_offset=40).confirm(100) == 40


def test_a_node_counts_once_on_its_latest_connection():
    made = joined(2)
    made.report(2, 20, 90)
    made.join(2, 21, False)
    assert not made.report(2, 20, 95)  # the old connection
    assert made.report(2, 21, 80)
    assert made.confirm(100) == 0  # one node, however many connections it has
    made.leave(2, 20)  # the old connection ends late
    made.report(3, 30, 70)
    assert made.confirm(100) == 70
    made.leave(3, 30)
    assert not made.report(3, 30, 99)


def test_a_join_is_no_report():
    made = joined(1)
    assert made.confirm(100) == 0 and made.holders(0) == 0
    assert made.in_sync(0, 1000) == []


def test_only_the_epochs_nodes_count():
    made = joined(1)
    made.join(9, 90, True)
    assert not made.report(9, 90, 100)
    assert made.confirm(100) == 0 and made.in_sync(100, 1000) == []


def test_disks_count_only_where_they_are_promised():
    made = joined(1, flushed={3})
    made.report(2, 20, 90)
    assert made.confirm(100) == 90
    assert made.confirmed_flushed(100) == 0
    made.report(3, 30, 60)
    assert made.confirmed_flushed(100) == 60
    assert made.confirmed_flushed(50) == 50  # this node's own disk
    assert made.in_sync(100, 1000, flushed_only=True) == [3]
    assert made.holders(60) == 2 and made.holders(60, flushed_only=True) == 1


def test_a_group_of_one_confirms_itself():
    made = table(0)
    assert made.confirm(70) == 70
    assert made.confirmed_flushed(30) == 30


@pytest.mark.parametrize(("lag", "in_sync"), [(0, True), (256, True), (257, False)])
def test_in_sync_is_a_lag_of_at_most_the_gap(lag, in_sync):
    made = joined(1)
    made.report(2, 20, 1000 - lag)
    assert (2 in made.in_sync(1000, 256)) == in_sync


@pytest.mark.parametrize(
    ("reports", "stalled"),
    [
        ([(10, 10), (10, 10), (10, 50)], False),  # heartbeats, then something is sent
        ([(10, 50)], False),  # on its way
        ([(10, 50), (10, 60)], True),  # it had 50 before the first of them
        ([(10, 10), (10, 50), (10, 50)], True),
        ([(10, 50), (10, 50), (11, 50)], False),  # it takes something again
        ([(10, 50), (10, 50), (11, 60), (11, 60)], True),
    ],
)
def test_a_slave_that_reports_the_same_offset_again_takes_nothing(reports, stalled):
    intake = Intake()
    changes = [intake.report(*one) for one in reports]
    assert intake.stalled is stalled and sum(changes) % 2 == stalled


def test_an_empty_rocketmq_slave_that_is_sent_nothing_yet_takes_what_it_is_sent():
    """Its stream begins at the log's end. Puts were refused, so nothing came that it could take."""
    intake = Intake(began=50)
    assert [intake.report(0, 50) for _ in range(3)] == [False] * 3 and not intake.stalled
    assert [intake.report(0, 60) for _ in range(2)] == [False, True]
    assert intake.report(60, 60) and not intake.stalled


def test_a_slave_that_takes_nothing_is_not_in_sync():
    made = joined(1, count_classic=True)
    made.report(2, 20, 990)
    made.note_stalled(2, 19, True)  # of an earlier connection
    made.note_stalled(9, 90, True)
    assert made.missing(1000, 256, flushed=False) is None and made.in_sync(1000, 256) == [2]
    made.note_stalled(2, 20, True)
    assert "0 of 1 slaves in sync" in made.missing(1000, 256, flushed=False)
    assert made.in_sync(1000, 256) == [] and made.confirm(1000) == 990, "its copy counts"
    made.classics[7] = ClassicReporter(began=0, offset=990)
    assert made.missing(1000, 256, flushed=False) is None
    made.note_stalled(None, 7, True)
    assert made.missing(1000, 256, flushed=False) is not None
    made.note_stalled(2, 20, False)
    assert made.missing(1000, 256, flushed=False) is None


def test_classic_slaves_count_beyond_where_their_stream_began():
    made = joined(1, count_classic=True)
    made.classics[7] = ClassicReporter(began=100, offset=300)
    assert made.confirm(500) == 0  # never in confirmed_offset
    assert not made.confirmed_with_classics(100)
    assert made.confirmed_with_classics(101) and made.confirmed_with_classics(300)
    assert not made.confirmed_with_classics(301)
    made.classics[7] = ClassicReporter(began=None, offset=300)
    assert not made.confirmed_with_classics(200)
    uncounted = joined(1)
    uncounted.classics[7] = ClassicReporter(began=100, offset=300)
    assert not uncounted.confirmed_with_classics(200)


def test_levels_say_what_was_observed():
    made = joined(2, flushed={2, 3})
    for node in NODES:
        made.report(node, node * 10, 100)
    assert made.confirm(100) == 100
    assert made.level(100, flushed=False) == "SYNC_MEM(3)"
    assert made.level(100, flushed=True) == "SYNC_DISK(2)"
    for node in NODES:
        made.leave(node, node * 10)
    assert made.level(100, flushed=False) == "SYNC_MEM(2)"  # two were needed, so two held it
    assert made.level(101, flushed=False) == "MASTER_MEM"


@pytest.mark.parametrize(
    ("acks", "nodes", "written", "begins"),
    [
        (1, (1, 2), True, 100),  # from the epoch's start on: below may be a part of an older tail
        (1, (1, 3), True, None),  # a promotion would not ask node 2
        (1, (1, 2), False, None),  # only the master knows what it has synced
        (2, (1, 2, 3), True, None),  # only the master knows what node 3 has
        (0, (1,), True, 100),  # the master alone confirms
        (0, (1,), False, None),
    ],
)
def test_where_a_slaves_own_reports_confirm(acks, nodes, written, begins):
    entry = EpochEntry(1 << 16 | 1, 100, acks, nodes)
    assert own_reports_confirm(entry, 2, written=written) == begins


class Counting(RuleBasedStateMachine):
    """Joins, leaves and reports in any order, compared with a list of all reports."""

    def __init__(self):
        super().__init__()
        self.table = table(2, 10)
        self.links, self.said, self.best, self.next = {}, {}, 0, 1

    @rule(node=st.sampled_from(sorted(NODES)))
    def join(self, node):
        self.next += 1
        self.table.join(node, self.next, False)
        self.links[node] = self.next
        self.said.pop(node, None)

    @rule(node=st.sampled_from(sorted(NODES)), old=st.booleans())
    def leave(self, node, old):
        self.table.leave(node, self.links.get(node, 0) - old)
        if not old and node in self.links:
            del self.links[node]
            self.said.pop(node, None)

    @rule(node=st.sampled_from(sorted(NODES)), offset=st.integers(0, 50), old=st.booleans())
    def report(self, node, offset, old):
        counts = node in self.links and not old
        assert self.table.report(node, self.links.get(node, 1) - old, offset) == counts
        if counts:
            self.said[node] = offset

    @rule(own=st.integers(0, 60))
    def confirm(self, own):
        ordered = sorted(self.said.values(), reverse=True)
        reached = min(ordered[1], own) if len(ordered) > 1 else 0
        if reached >= 10:
            self.best = max(self.best, reached)
        assert self.table.confirm(own) == self.best

    @invariant()
    def never_beyond_what_two_said(self):
        assert self.table.confirmed_offset == self.best


TestCounting = Counting.TestCase


def test_a_flushed_put_waits_in_vain_only_where_no_slave_to_come_helps():
    made = AckTable(acks=1, epoch_start=0, nodes=frozenset({1, 2, 3}))
    assert made.never_flushed(1) is None  # no slave is connected yet
    made.join(2, 20, False)
    assert made.never_flushed(1) is None  # node 3 may still connect with ack point flushed
    made.join(3, 30, False)
    assert "ha.ack_point: flushed" in made.never_flushed(1)
    made.join(3, 31, True)
    assert made.never_flushed(1) is None
    alone = AckTable(acks=0, epoch_start=0, nodes=frozenset({1}))
    assert alone.never_flushed(1) is None
