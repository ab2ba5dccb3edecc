"""Why a put, a transfer, a change of members or a read is refused; what the driver must not do."""

import pytest

from hastore.dledger.core.core import DLedgerCore
from hastore.dledger.core.dispatcher import split_append
from hastore.dledger.core.events import (
    ChangeMembers,
    DiskFull,
    HardState,
    LinkChanged,
    LogState,
    Persisted,
    Propose,
    ReadIndex,
    Receive,
    Role,
    Settings,
    Start,
    Tick,
    Transfer,
)
from hastore.protocol.dledger import (
    AppendRequest,
    Code,
    CommitRequest,
    HeartBeatRequest,
    HeartBeatResponse,
    PushResponse,
    PushType,
    TakeLeadership,
    TruncateRequest,
    VoteResponse,
    VoteResult,
)
from tests.dledger.core.scenario import Runner

NEEDS_3 = (
    "no majority of the new list answers and takes entries, without these nodes: 3; look at them,"
    " and try again"
)


class Middle:
    """No randomness: the middle of every range."""

    def uniform(self, a, b):
        return (a + b) / 2


EMPTY = LogState(0, -1, ())


def start(members=(1, 2, 3), *, settings=None, log_bytes=None, **options):
    """Return a started node 1 with an empty log."""
    extra = {} if log_bytes is None else {"log_bytes": log_bytes}
    core = DLedgerCore(1, settings or Settings(), Middle(), **extra)
    core.step(Start(0.0, HardState(0, None), EMPTY, -1, members, **options))
    return core


def elect(core):
    """Let node 1 win its election; nothing of its term is committed."""
    core.step(Tick(750.0))
    for pre in (True, False):
        core.step(Receive(1_000.0, 2, VoteResponse(core.term, 1, pre, VoteResult.ACCEPT)))
    assert core.role is Role.LEADER
    return core


def answer(core, peer, index, *, now_ms=1_000.0):
    """Let a peer say that it has everything up to `index`; return the update."""
    for push, at in ((PushType.COMPARE, -1), (PushType.APPEND, index)):
        core.step(Receive(now_ms, peer, HeartBeatResponse(core.term, 1, Code.SUCCESS)))
        message = PushResponse(core.term, push, Code.SUCCESS, at, 0, index)
        update = core.step(Receive(now_ms, peer, message))
    return update


def make_leader(**options):
    """Return a leader that has committed its first entry; both peers have it."""
    core = elect(start(**options))
    core.step(Persisted(1_000.0, 0))
    for peer in (2, 3):
        core.step(
            Receive(1_000.0, peer, PushResponse(1, PushType.COMPARE, Code.SUCCESS, -1, 0, -1))
        )
        answer(core, peer, 0)
    assert core.committed_index == 0
    return core


def test_a_put_is_refused_by_a_node_that_does_not_lead():
    core = start()
    assert core.refusal() == "NOT_LEADER"
    core.step(Tick(750.0))
    assert core.role is Role.CANDIDATE and core.refusal() == "NOT_LEADER"
    assert elect(start()).refusal() is None


def test_a_put_is_refused_on_a_full_disk():
    core = make_leader()
    core.step(DiskFull(1_000.0, True))
    assert core.refusal() == "DISK_FULL"
    assert list(core.refusals_to_lead.values()) == ["a transfer to node 2 is under way"]
    assert core.refusals_to_lead.keys() == {3}, "node 2 takes over"
    core = elect(start())
    core.step(DiskFull(1_000.0, True))  # nobody can take over yet
    core.step(DiskFull(1_000.0, False))
    assert core.refusal() is None


def test_a_put_is_refused_during_a_transfer():
    core = make_leader()
    core.step(Transfer(1_000.0, 2, "move"))
    assert core.refusal() == "LEADER_TRANSFERRING"


def test_a_put_is_refused_by_a_leader_that_leaves_the_group():
    core = make_leader()
    core.step(ChangeMembers(1_000.0, (2, 3), "leave"))
    assert core.refusal() == "LEADER_TRANSFERRING"


def test_a_put_is_refused_when_too_many_entries_wait():
    core = make_leader(settings=Settings(pending_max=3))
    core.step(Propose(1_000.0, 2, "one"))
    assert core.refusal() is None
    core.step(Propose(1_000.0, 2, "two"))
    assert core.refusal() == "LEADER_PENDING_FULL" and core.waiting_entries == 4
    core.step(Propose(1_000.0, 50))  # nobody waits for these
    assert core.waiting_entries == 4
    core.step(Persisted(1_000.0, 54))
    update = answer(core, 2, 4)
    assert [(one.token, one.outcome, one.index) for one in update.settled] == [
        ("one", "COMMITTED", 2),
        ("two", "COMMITTED", 4),
    ]
    assert core.refusal() is None and core.waiting_entries == 0


def told(update):
    """Return who is told now what is committed, without entries."""
    return [peer for peer, message in update.messages if isinstance(message, CommitRequest)]


def test_a_follower_where_readers_wait_learns_at_once_what_is_committed():
    core = make_leader()
    core.step(Tick(1_050.0))  # both know what is committed
    core.step(Propose(1_060.0, 1, "one"))
    core.step(Persisted(1_060.0, 1))
    said = PushResponse(1, PushType.APPEND, Code.SUCCESS, 1, 0, 1, readers=True)
    assert told(core.step(Receive(1_060.0, 2, said))) == [2]
    assert told(answer(core, 3, 1, now_ms=1_061.0)) == []
    assert told(core.step(Tick(1_069.0))) == [] and told(core.step(Tick(1_072.0))) == [3]
    # Readers that do not wait any more get it later, with the others.
    core.step(Receive(1_073.0, 2, PushResponse(1, PushType.COMMIT, Code.SUCCESS, 1, 0, 1)))
    core.step(Propose(1_080.0, 1, "two"))
    core.step(Persisted(1_080.0, 2))
    assert told(answer(core, 2, 2, now_ms=1_080.0)) == []


def refused(update):
    (settled,) = update.settled
    assert settled.outcome == "REFUSED" and update.messages == [] and update.append == []
    return settled.reason


def transfer(core, to):
    return refused(core.step(Transfer(0.0, to, "token")))


def test_every_refusal_of_a_transfer():
    core = elect(start())
    assert transfer(core, 1) == "node 1 leads already"
    assert transfer(core, 9) == "node 9 is no member of the group: 1, 2, 3"
    assert "not yet compared" in transfer(core, 2)
    core = make_leader(settings=Settings(transfer_gap=2))
    core.step(Propose(1_000.0, 3, "put"))
    assert transfer(core, 2) == "node 2 lacks 3 entries; the most is 2"
    full = PushResponse(1, PushType.APPEND, Code.DISK_FULL, 0, 0, 0)
    core.step(Receive(1_000.0, 2, full))
    assert transfer(core, 2) == "the disk of node 2 is full"
    core.step(LinkChanged(1_000.0, 3, False))
    assert transfer(core, 3) == "there is no link to node 3"
    core = make_leader()
    lost = HeartBeatResponse(1, 1, Code.SUCCESS, remembers=False)
    core.step(Receive(1_000.0, 3, lost))
    assert transfer(core, 3) == "node 3 has lost its disk and is still catching up"
    core.step(Transfer(1_000.0, 2, "first"))
    assert transfer(core, 3) == "a transfer to node 2 is under way"
    assert transfer(start(), 2) == "NOT_LEADER"
    core = make_leader()
    core.step(Tick(1_490.0))
    core.step(Receive(1_495.0, 3, HeartBeatResponse(1, 1, Code.SUCCESS)))
    core.step(Tick(1_505.0))
    assert transfer(core, 2) == "node 2 does not answer"


def change(core, members, learners=(), leaving=()):
    return refused(core.step(ChangeMembers(1_000.0, members, "token", learners, leaving)))


def test_every_refusal_of_a_change_of_members():
    assert change(start(), (1, 2)) == "NOT_LEADER"
    assert "committed nothing in its term" in change(elect(start()), (1, 2))
    core = make_leader()
    one_at_a_time = "members change one node at a time; now they are 1, 2, 3"
    assert change(core, (1, 2, 3)) == one_at_a_time
    assert change(core, (1,)) == one_at_a_time
    assert change(core, (1, 2, 4)) == one_at_a_time
    assert change(core, (1, 2, 2)) == one_at_a_time
    assert change(core, (1, 2, 3), (4, 5)) == one_at_a_time
    assert change(core, (1, 2, 3), (3,)) == one_at_a_time
    assert change(core, (1, 2), (4,)) == one_at_a_time
    assert "not negative" in change(core, (1, 2, 3), (-4,))
    assert "node 4 becomes a member when it keeps up" in change(core, (1, 2, 3, 4))
    assert "does not become a learner" in change(core, (1, 2), (3,))
    assert "one node is replaced at a time" in change(core, (1, 2, 3), (4,), (2, 3))
    assert "node 7 is no member" in change(core, (1, 2, 3), (4,), (7,))
    core.step(ChangeMembers(1_000.0, (1, 2), "first"))
    assert "not committed yet" in change(core, (1,))
    core = make_leader()
    core.step(Transfer(1_000.0, 2, "move"))
    assert change(core, (1, 2)) == "LEADER_TRANSFERRING"
    core = make_leader()
    core.step(LinkChanged(1_000.0, 2, False))
    core.step(LinkChanged(1_000.0, 3, False))
    core.step(DiskFull(1_000.0, True))
    assert change(core, (1, 2)) == "DISK_FULL"
    alone = start((1,))
    alone.step(Persisted(0.0, 0))
    assert "at least one node" in change(alone, ())


def test_no_change_of_members_relies_on_a_node_that_lost_its_disk():
    """Its answers count for nothing: with the new list the leader would step down."""
    core = elect(start())
    core.step(Persisted(1_000.0, 0))
    answer(core, 2, 0)
    assert core.committed_index == 0
    lost = HeartBeatResponse(1, 1, Code.SUCCESS, remembers=False)
    core.step(Receive(1_000.0, 3, lost))
    reason = change(core, (1, 3))
    assert reason == NEEDS_3


@pytest.mark.parametrize("full", [True, False])
def test_no_change_of_members_relies_on_a_node_that_takes_no_entries(full):
    """The new list could be neither committed nor taken back before its disk takes entries."""
    core = elect(start())
    core.step(Persisted(1_000.0, 0))
    answer(core, 2, 0)
    answer(core, 3, 0)
    if full:
        core.step(Receive(1_000.0, 3, PushResponse(1, PushType.APPEND, Code.DISK_FULL, 0, 0, 0)))
    core.step(Propose(1_000.0, 1))
    core.step(Persisted(1_000.0, 1))
    answer(core, 2, 1)
    for beat in range(1_300, 5_000, 300):  # both answer, and 3 stores nothing
        for peer in (2, 3):
            core.step(Receive(float(beat), peer, HeartBeatResponse(1, 1, Code.SUCCESS)))
    assert core.committed_index == 1 and core.role is Role.LEADER
    assert change(core, (1, 3)) == NEEDS_3
    core.step(ChangeMembers(5_000.0, (1, 2), "token"))
    assert core.members == (1, 2), "it can be removed itself"


def test_a_full_follower_is_called_full_however_long_it_takes_nothing():
    core = make_leader()
    core.step(Propose(1_000.0, 1))
    core.step(Persisted(1_000.0, 1))
    answer(core, 2, 1)
    for beat in range(1_300, 5_000, 300):
        core.step(Receive(float(beat), 2, HeartBeatResponse(1, 1, Code.SUCCESS)))
        core.step(
            Receive(float(beat), 3, PushResponse(1, PushType.APPEND, Code.DISK_FULL, 0, 0, 0))
        )
    assert core.silent_followers == {3}
    assert core.refusals_to_lead == {3: "the disk of node 3 is full"}


def test_a_leader_that_leaves_hands_over_to_a_node_that_can_lead():
    """Not to one that lost its disk, although it has every entry too."""
    core = start((1, 2, 3, 4, 5))
    core.step(Tick(750.0))
    for pre in (True, False):
        for peer in (3, 4):
            accepts = VoteResponse(core.term, 1, pre, VoteResult.ACCEPT)
            core.step(Receive(1_000.0, peer, accepts))
    core.step(Persisted(1_000.0, 0))
    for peer in (3, 4, 5):
        answer(core, peer, 0)
    core.step(Receive(1_000.0, 2, HeartBeatResponse(1, 1, Code.SUCCESS, remembers=False)))
    core.step(ChangeMembers(1_000.0, (2, 3, 4, 5), "leave"))
    core.step(Persisted(1_000.0, 2))
    for push, index in ((PushType.COMPARE, -1), (PushType.APPEND, 2)):
        message = PushResponse(1, push, Code.SUCCESS, index, 0, 2, remembers=False)
        core.step(Receive(1_000.0, 2, message))
    for peer in (3, 4, 5):
        update = core.step(
            Receive(1_000.0, peer, PushResponse(1, PushType.APPEND, Code.SUCCESS, 2, 0, 2))
        )
    assert core.role is Role.FOLLOWER and core.committed_index == 2
    assert [to for to, message in update.messages if isinstance(message, TakeLeadership)] == [3]


def test_every_refusal_of_a_read():
    assert refused(start().step(ReadIndex(0.0, "read"))) == "NOT_LEADER"
    core = elect(start(settings=Settings(pending_max=2)))
    core.step(ReadIndex(1_000.0, "one"))
    core.step(ReadIndex(1_000.0, "two"))
    assert refused(core.step(ReadIndex(1_000.0, "three"))) == "LEADER_PENDING_FULL"


def test_a_read_without_a_majority_times_out():
    core = make_leader(settings=Settings(append_timeout_ms=300))
    core.step(ReadIndex(1_000.0, "read"))
    (settled,) = core.step(Tick(1_300.0)).settled
    assert (settled.token, settled.outcome) == ("read", "WAIT_QUORUM_ACK_TIMEOUT")


# -- what the driver must keep to ------------------------------------------------------------------


def test_the_order_of_events_is_checked():
    core = DLedgerCore(1, Settings(), Middle())
    with pytest.raises(ValueError, match="Tick came before Start"):
        core.step(Tick(0.0))
    core = start()
    with pytest.raises(ValueError, match="Start comes once"):
        core.step(Start(0.0, HardState(0, None), EMPTY, -1, (1, 2, 3)))
    with pytest.raises(ValueError, match="proposed to a FOLLOWER"):
        core.step(Propose(0.0, 1, "put"))
    with pytest.raises(ValueError, match="0 entries"):
        make_leader().step(Propose(1_000.0, 0, "put"))


def test_a_flush_that_began_before_a_cut_does_not_count():
    core = DLedgerCore(1, Settings(), Middle())
    core.step(Start(0.0, HardState(2, None), LogState(0, 4, ((1, 0),)), -1, (1, 2, 3)))
    core.step(Receive(0.0, 2, AppendRequest(2, 4, 1, 0, 0, ((2, 3),), -1)))
    assert (core.ledger_end_index, core.persisted_index, core.cuts) == (7, 4, 0)
    cuts = core.cuts
    # A leader of a later term cuts, and appends as many entries.
    assert core.step(Receive(0.0, 3, TruncateRequest(3, 5, 1, 3))).truncate_from == 5
    core.step(Receive(0.0, 3, AppendRequest(3, 4, 1, 0, 0, ((3, 3),), -1)))
    update = core.step(Persisted(0.0, 7, cuts))
    assert core.persisted_index == 4 and update.messages == [] and update.flush
    update = core.step(Persisted(0.0, 7, core.cuts))
    assert core.persisted_index == 7 and not update.flush
    ((peer, message),) = update.messages
    assert (peer, message.push, message.index) == (3, PushType.APPEND, 7)


def test_batches_and_what_is_in_flight_are_limited_by_the_bytes_that_the_driver_knows():
    asked = []

    def log_bytes(first, last):
        asked.append((first, last))
        return (last - first + 1) * 100

    settings = Settings(batch_bytes=1_000, in_flight_bytes=2_500)
    core = make_leader(settings=settings, log_bytes=log_bytes)
    update = core.step(Propose(1_000.0, 95, "put"))
    pushes = [one for peer, one in update.messages if peer == 2]
    assert [one.runs for one in pushes] == [((1, 10),)] * 3
    assert [one.prev_index for one in pushes] == [0, 10, 20]
    assert all(last <= 95 for _, last in asked)
    # An answer in the middle of a batch frees what it covers.
    update = core.step(
        Receive(1_000.0, 2, PushResponse(1, PushType.APPEND, Code.SUCCESS, 15, 0, 15))
    )
    assert [(one.prev_index, one.runs) for _, one in update.messages] == [(30, ((1, 10),))]
    core = make_leader(settings=settings, log_bytes=lambda first, last: 5_000)
    update = core.step(Propose(1_000.0, 3, "large"))
    assert [one.runs for peer, one in update.messages if peer == 2] == [((1, 1),)]


def test_no_more_pushes_are_in_flight_than_the_limit():
    settings = Settings(in_flight_pushes=2, batch_bytes=1)
    update = make_leader(settings=settings).step(Propose(1_000.0, 9, "put"))
    assert [one.runs for peer, one in update.messages if peer == 3] == [((1, 1),)] * 2


def test_an_append_can_be_split_anywhere():
    runs = ((1, 2), (3, 1), (4, 5))
    members = ((7, (1, 2)), (12, (1, 2, 3)))
    whole = AppendRequest(5, 4, 1, 0, 0, runs, 3, members)
    terms = [1, 1, 3, 4, 4, 4, 4, 4]
    for count in range(1, 8):
        first, rest = split_append(whole, count)
        spread = [[term for term, many in one.runs for _ in range(many)] for one in (first, rest)]
        assert spread == [terms[:count], terms[count:]]
        assert (first.prev_index, first.prev_term) == (4, 1)
        assert (rest.prev_index, rest.prev_term) == (4 + count, terms[count - 1])
        assert first.members + rest.members == members
        assert all(index <= 4 + count for index, _ in first.members)
    for count in (0, 8):
        with pytest.raises(ValueError, match="no two parts"):
            split_append(whole, count)


def test_a_paused_node_reads_what_lies_there_before_it_asks_for_votes_or_steps_down():
    core = start()
    core.step(Receive(0.0, 2, HeartBeatRequest(1, 1, -1)))
    assert core.step(Tick(5_000.0)).messages == []
    assert core.role is Role.FOLLOWER
    assert core.step(Tick(5_100.0)).messages != []  # nothing lay there
    leader = make_leader()
    leader.step(Tick(5_000.0))
    assert leader.role is Role.LEADER
    leader.step(Tick(5_100.0))
    assert leader.role is Role.FOLLOWER


@pytest.mark.parametrize("hangs", ["the whole node", "its syncs"])
def test_a_follower_that_hangs_is_known_though_its_link_is_open(hangs):
    """A put would wait for it in vain: until it answers and gets on, it is not in sync, nor able.

    One that takes everything slowly gets on, and one that lacks nothing need not.
    """
    runner = Runner()
    for command in ("nodes 1,2,3", "campaign 1", "run 60000"):
        runner.run(command)
    leader, append_ms = runner.world.cores[1], Settings().append_timeout_ms
    assert leader.silent_followers == set()
    if hangs == "its syncs":
        for _ in range(4):
            runner.run("hold 3")
            runner.run("propose 1 1 as slow")
            runner.run(f"run {append_ms - 500}")
            assert leader.silent_followers == set()
            runner.run("persist 3")
        runner.run("hold 3")
        runner.run("propose 1 1 as last")
    else:
        runner.run("partition 1,2 | 3")
    runner.run(f"run {append_ms - 500}")
    assert (leader.silent_followers, leader.able_followers) == (set(), {2, 3})
    runner.run("run 1000")
    assert (leader.silent_followers, leader.able_followers) == ({3}, {2})
    runner.run("persist 3" if hangs == "its syncs" else "heal")
    runner.run("run 1500")
    assert (leader.silent_followers, leader.able_followers) == (set(), {2, 3})


def test_a_follower_that_has_lost_its_disk_and_copies_the_log_is_no_silent_one():
    """It answers and gets on; only its quarantine is not over. It was said to hang."""
    runner, append_ms = Runner(), Settings().append_timeout_ms
    for command in (
        "nodes 1,2,3", "campaign 1", "run 60000", "propose 1 50 as first", "run 1000",
        "wipe 3", "start 3 remembers=no", "hold 3",
    ):  # fmt: skip
        runner.run(command)
    leader = runner.world.cores[1]
    for index in range(10, 50, 10):
        runner.run(f"run {append_ms - 500}")
        assert leader.silent_followers == set()
        runner.run(f"persist 3 {index}")
    runner.run(f"run {append_ms + 500}")
    assert leader.silent_followers == {3}, "its disk hangs now"
    runner.run("persist 3")
    runner.run("run 1000")
    assert leader.silent_followers == set() and runner.world.cores[3].remembers
