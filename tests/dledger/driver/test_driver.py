"""Drivers over real stores and loopback sockets: elections, puts, kills, lost disks, failures."""

import dataclasses
import errno
import functools
import logging
import os
import pathlib
import shutil
import threading

import msgspec
import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Flush, RetentionConfig, StoreKind
from hastore.dledger.core.core import DLedgerCore
from hastore.dledger.core.events import MemberList, Receive, Role, Settled, Start, Update
from hastore.dledger.driver.driver import DLedgerDriver
from hastore.dledger.driver.requests import RequestFile, request_path, write_request
from hastore.dledger.store.hard_state import HardStateFiles
from hastore.errors import (
    HastoreError,
    NotStoredError,
    StoreBrokenError,
    StoreFullError,
    UsageError,
)
from hastore.fs.filesystem import REAL, file_name
from hastore.ha.hello.peer import call
from hastore.ha.master.group_transfer import Need
from hastore.protocol.dledger import (
    AppendRequest,
    HeartBeatRequest,
    InstallRequest,
    MemberSet,
    VoteRequest,
)
from hastore.protocol.dledger_link import Received, append_frames, message_frame
from hastore.protocol.hello import Linked
from hastore.record.log_format import INDEX_UNIT_BYTES
from hastore.store.log import entry_index
from hastore.store.log_store import LogStore
from tests.dledger.driver.groups import SETTINGS, STORE, DriverGroup, running_group
from tests.dledger.links.test_peer_links import said
from tests.ha.nodes import Peer, wait_for


@pytest.fixture
def group(tmp_path):
    with running_group(tmp_path) as made:
        yield made
        assert [node.failures for node in made.nodes.values()] == [[] for _ in made.nodes]


def equal_logs(group):
    """Wait until the running nodes agree; return their log, which must be the same bytes."""
    logs = {node.log() for node in group.settled()}
    assert len(logs) == 1
    return logs.pop()


def followed(leader):
    """Wait until the leader knows that every follower has its whole log: it may hand over then."""
    end = leader.store.end_index
    wait_for(lambda: all(one.index == end for one in leader.driver.followers()), "equal logs")


def test_a_group_elects_a_leader_and_replicates_thousands_of_puts(group):
    leader = group.leader()
    assert leader.driver.open_term == leader.driver.term == leader.store.end_term
    for batch in range(60):
        leader.put(*(b"%d" % (batch * 50 + n) * 20 for n in range(50)))
    assert leader.put_confirmed(b"last") == ("PUT_OK", "QUORUM_DISK")
    log = equal_logs(group)
    assert len(log) > 2 * leader.store.messages.file_size, "blanks are among the bytes"
    assert all(node.store.end_index == 3001 for node in group.running)
    assert sum(leader.driver.counts.round_trips.times.counts) >= 1
    assert {peer for peer, _ in leader.driver.counts.links.items()} == {
        str(node.number) for node in group.running if node is not leader
    }
    assert leader.driver.counts.promotions >= 1 and leader.driver.counts.elections >= 1
    for node in group.running:
        messages = node.store.messages
        assert messages.readable_offset == messages.confirmed_offset == messages.max_offset
        wait_for(lambda m=messages: m.wait_dispatched(m.max_offset, 1.0))
        assert messages.queues.queue_range("T", 0) == (0, 3001)
        status = node.driver.status()
        assert status["mode"] == "dledger" and status["leader"] == leader.number
        assert (status["committed_index"], status["members"]) == (3001, [1, 2, 3])
        if node is not leader:
            with pytest.raises(NotStoredError, match=f"node {leader.number} is the leader"):
                node.put(b"x")


def test_the_leader_is_killed_and_comes_back(group):
    acked = []
    for round_number in range(2):
        leader = group.leader()
        for n in range(20):
            body = b"%d-%d" % (round_number, n)
            assert leader.put_confirmed(body)[0] == "PUT_OK"
            acked.append(body)
        leader.put(*(b"in flight" for _ in range(100)))
        leader.kill()
        assert group.put(b"after %d" % round_number) is not leader
        acked.append(b"after %d" % round_number)
        group.start(leader.number)
    group.put(b"end")
    log = equal_logs(group)
    assert all(body in log for body in acked)
    assert len(group.running) == 3


def test_a_killed_follower_catches_up(group):
    leader = group.leader()
    follower = next(node for node in group.running if node is not leader)
    follower.kill()
    for _ in range(30):
        leader.put(*(os.urandom(2_000) for _ in range(30)))
    assert leader.put_confirmed(b"x")[0] == "PUT_OK", "two of three are a majority"
    group.start(follower.number)
    assert len(equal_logs(group)) > 1_800_000


@pytest.mark.parametrize("is_rot", [True, False], ids=["rot", "bad sector"])
def test_a_leader_whose_index_lost_what_a_follower_lacks_lets_another_lead(
    tmp_path, monkeypatch, is_rot
):
    monkeypatch.setattr(entry_index, "_KEPT_BYTES", 8 * INDEX_UNIT_BYTES)
    with running_group(tmp_path) as group:
        group.put(b"first")
        group.settled()
        leader = group.leader()
        late = next(node for node in group.running if node is not leader)
        late.kill()
        for _ in range(50):
            leader.put_confirmed(b"x")
        index = leader.store.messages.entries
        if is_rot:
            name = file_name(0)
            size = pathlib.Path(index.directory, name).stat().st_size
            pathlib.Path(index.directory, name).write_bytes(bytes(size))
        else:

            def pread(_count, _offset):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            monkeypatch.setattr(index._open(0, create=False), "pread", pread)
        with pytest.raises(StoreBrokenError, match="damaged or unreadable; stop the node"):
            leader.store.end_position(1)
        (late,) = group.start(late.number)
        wait_for(lambda: late.store.end_index >= 50, "the follower has what it lacked")
        assert "the unit of entry" in leader.driver.left
        assert any("writes the index anew" in one for one in leader.driver.problems())
        leader.kill()
        shutil.rmtree(index.directory)
        group.start(leader.number)
        group.put(b"last")
        assert b"last" in equal_logs(group)


def test_a_follower_begins_anew_where_retention_has_left_something(tmp_path):
    retention = RetentionConfig(max_size_bytes=2 * STORE["commitlog_file_size"])
    with running_group(tmp_path, 3, store={"retention": retention}) as group:
        leader = group.put(b"first")
        late = next(node for node in group.running if node is not leader)
        late.kill()
        for _ in range(40):  # the leader may change at any time
            group.put(*(os.urandom(2_000) for _ in range(20)))
        group.settled()
        for node in group.running:
            log_retention = node.store.messages.retention
            end = log_retention.expired_end(None)
            node.driver.retained(node.store.index_at(end) + 1)
            log_retention.delete_expired(None)
            assert node.store.begin_index > 1 and b"first" not in node.log()
        (late,) = group.start(late.number)
        group.put(b"last")
        assert b"last" in equal_logs(group)
        assert len({node.store.begin_index for node in group.running}) == 1 < late.store.begin_index
        rescued = pathlib.Path(late.config.store.root, "rescued")
        kept = [path.read_bytes() for path in rescued.rglob("*") if path.is_file()]
        assert not any(b"first" in one for one in kept), "it was committed"
        late.kill()
        group.start(late.number)
        equal_logs(group)


def test_a_fourth_node_is_added_while_puts_go_on(tmp_path):
    group = DriverGroup(tmp_path, 4)
    three = {n: port for n, port in group.ports.items() if n < 4}
    group.start(1, 2, 3, ports=three)
    group.put(*(b"%d" % n for n in range(50)))
    for node in group.running:
        node.driver.set_addresses({n: f"127.0.0.1:{port}" for n, port in group.ports.items()})
    (fourth,) = group.start(4)
    group.put(b"still three")
    assert group.leader().driver.core.members == (1, 2, 3)
    wait_for(lambda: fourth.driver.core is not None)
    assert fourth.driver.core.role is Role.FOLLOWER and not fourth.state.data.lost_disk
    assert fourth.driver.refusal() == "node 4 is no member; the members are 1, 2, 3"
    leader = group.committed_leader()
    wanted = MemberSet((1, 2, 3), (4,))
    added = leader.ask(lambda done: leader.driver.change_members(wanted, done))
    assert added.outcome == "COMMITTED"
    wait_for(lambda: group.leader().driver.core.members == (1, 2, 3, 4), "node 4 keeps up")
    group.put(b"four")
    equal_logs(group)
    assert all(node.driver.core.members == (1, 2, 3, 4) for node in group.running)
    for node in group.running:
        node.kill()
    group.start(1, 2, 4, ports=group.ports)
    group.put(b"three of four")
    assert {node.driver.core.members for node in group.running} == {(1, 2, 3, 4)}
    group.stop()


def test_without_a_majority_nothing_is_acknowledged(group):
    leader = group.leader()
    for node in list(group.running):
        if node is not leader:
            node.kill()
    try:
        outcome, level = leader.put_confirmed(b"lost?", within_ms=500)
    except NotStoredError:  # it has noticed already
        outcome, level = "refused", ""
    assert outcome in ("refused", "FLUSH_SLAVE_TIMEOUT") and level in ("", "MASTER_MEM")
    wait_for(lambda: leader.driver.refusal(), "the leader steps down")
    assert leader.store.committed_index < leader.store.end_index or outcome == "refused"


def test_a_clean_stop_hands_over(group):
    leader = group.leader()
    term = leader.driver.term
    leader.put_confirmed(b"x")
    followed(leader)
    leader.stop()
    following = group.leader()
    assert following is not leader and following.driver.term == term + 1
    assert following.put_confirmed(b"y")[0] == "PUT_OK"


def test_a_clean_stop_hands_over_though_the_first_follower_does_not_answer(group, monkeypatch):
    leader = group.leader()
    leader.put_confirmed(b"x")
    followed(leader)
    first, second = sorted(
        (node for node in group.running if node is not leader), key=lambda one: one.number
    )
    outcomes, hand_over = [], leader.driver.hand_over

    def asked(to, done):
        def note(settled):
            outcomes.append((to, settled.outcome))
            done(settled)

        hand_over(to, note)

    monkeypatch.setattr(leader.driver, "hand_over", asked)
    with first.driver._lock:  # it hangs: its link is open, and it has everything
        wait_for(lambda: first.number in leader.driver.core.refusals_to_lead, "its silence")
        if not leader.leads:
            return  # the machine was busy
        leader.stop()
    assert outcomes[-1] == (second.number, "COMMITTED")
    assert group.put(b"y") is second


def test_transfers_are_settled(group):
    group.put(b"x")

    def attempt():
        """Ask the leader and a follower; None if the leader changed meanwhile: the machine is busy.

        Whoever stops leading settles transfers as refused, or with its term's end.
        """
        leader = group.leader()
        term = leader.driver.term
        other = next(node for node in group.running if node is not leader)
        followed(leader)
        refused = other.ask(lambda done: other.driver.hand_over(leader.number, done))
        moved = leader.ask(lambda done: leader.driver.hand_over(other.number, done))
        if (refused.outcome, moved.outcome) != ("REFUSED", "COMMITTED"):
            assert any(node.driver.term > term for node in group.running), (refused, moved)
            return None
        assert other.driver.term > term
        return other

    moved_to = wait_for(attempt)
    wait_for(lambda: moved_to.store.committed_index >= 1)


def test_a_group_of_one_answers_at_once(tmp_path):
    with running_group(tmp_path, 1) as group:
        leader = group.leader()
        assert leader.put_confirmed(b"x") == ("PUT_OK", "QUORUM_DISK")
        leader.kill()
        (again,) = group.start(1)
        assert group.put(b"y") is again and b"x" in again.log()


def test_without_a_sync_the_level_says_so(tmp_path):
    with running_group(tmp_path, 3, store={"flush": Flush.ASYNC}) as group:
        assert group.leader().put_confirmed(b"x") == ("PUT_OK", "QUORUM_MEM")
        equal_logs(group)


@pytest.mark.parametrize("kind", [StoreKind.FILE, StoreKind.MEMORY])
def test_a_message_is_said_to_be_on_disks_only_if_all_members_sync_what_they_confirm(
    tmp_path, kind
):
    """So it is while `store.flush` is changed node by node: a majority may be on no disk.

    A node that confirms what is written counts also while it is down. A put that asks for disks
    waits meanwhile, and the nodes say what differs.
    """
    group = DriverGroup(tmp_path)
    weak = {"flush": Flush.ASYNC, "kind": kind}
    try:
        group.start(1, 2)
        group.start(3, store=weak)
        wait_for(lambda: all(node.driver.core for node in group.running), "all have joined")
        group.put(b"x")
        if group.leader().number == 3:
            done = group.leader().ask(functools.partial(group.leader().driver.hand_over, 1))
            assert done.outcome == "COMMITTED"
        leader = group.leader()
        assert leader.put_confirmed(b"y") == ("PUT_OK", "QUORUM_MEM")
        for node in group.running:
            wait_for(lambda node=node: node.driver.without_syncs() == {3}, "the links are there")
            (said,) = (one for one in node.driver.problems() if "on no disk yet" in one)
            assert "no disk yet: node 3; the others sync" in said
        ended = []
        leader.transfer.add(
            leader.put(b"z"), SYSTEM_CLOCK.monotonic_ms() + 60_000, Need.SLAVE_DISKS,
            lambda outcome, level: ended.append((outcome.value, level)),
            epoch=leader.driver.open_term,
        )  # fmt: skip
        assert leader.put_confirmed(b"after it") == ("PUT_OK", "QUORUM_MEM")
        assert ended == []
        group.nodes[3].kill()
        assert leader.put_confirmed(b"without it") == ("PUT_OK", "QUORUM_MEM")
        if kind is StoreKind.FILE:
            group.start(3)
            wait_for(lambda: leader.driver.without_syncs() == set(), "all sync")
            assert leader.put_confirmed(b"v") == ("PUT_OK", "QUORUM_DISK")
            wait_for(lambda: ended == [("PUT_OK", "QUORUM_DISK")], "the put that asked for disks")
            assert not [one for one in leader.driver.problems() if "on no disk yet" in one]
    finally:
        group.stop()


def test_no_thread_sees_a_core_that_has_not_started(tmp_path, monkeypatch):
    real, group, seen = DLedgerCore.step, DriverGroup(tmp_path, 1), []

    def step(core, event):
        if isinstance(event, Start):
            (node,) = group.nodes.values()
            seen.append(node.driver.core is core)
        return real(core, event)

    with monkeypatch.context() as patch:
        patch.setattr(DLedgerDriver, "start", lambda _driver: None)
        (node,) = group.start(1)
    monkeypatch.setattr(DLedgerCore, "step", step)
    node.driver.start()
    group.put(b"x")
    group.stop()
    assert seen == [False]


# ---- first starts and lost disks


def test_a_first_start_waits_for_the_others_and_says_so(tmp_path):
    group = DriverGroup(tmp_path)
    one, two = group.start(1, 2)
    wait_for(lambda: "waits for node 3 to say" in (one.driver.waits or ""))
    assert one.driver.problems()[0] == one.driver.waits
    with pytest.raises(NotStoredError, match="this store is new"):
        one.put(b"x")
    assert one.driver.core is None and one.state.data.joined is False
    group.start(3)
    group.put(b"x")  # the other two may be a majority without it
    wait_for(lambda: two.driver.waits is None and two.state.data.joined)
    group.stop()


def test_a_wiped_disk_under_an_old_number_counts_only_after_a_leader_has_filled_it(group, caplog):
    leader = group.leader()
    leader.put_confirmed(b"kept")
    wait_for(lambda: len(leader.driver.links.linked) == 2)  # else it does not know the store
    wiped, other = [node for node in group.running if node is not leader]
    followed(leader)  # so it knows whose store has which number
    wiped.kill()
    shutil.rmtree(wiped.config.store.root)
    other.kill()  # so the leader must not count the wiped node for a majority
    with caplog.at_level(logging.WARNING):
        (again,) = group.start(wiped.number)
        wait_for(lambda: again.driver.core is not None)
    assert "has lost its disk" in caplog.text and again.state.data.lost_disk
    assert again.driver.core.remembers is False
    assert any("lost its disk" in one for one in again.driver.problems())
    assert again.driver.core.voted_for is None
    group.start(other.number)
    group.put(b"with all")
    wait_for(lambda: again.driver.core.remembers, "the leader fills the disk")
    assert b"kept" in equal_logs(group)
    again.stop()
    (later,) = group.start(wiped.number)
    group.put(b"later")
    assert later.driver.core.remembers and not later.state.data.lost_disk
    equal_logs(group)


# ---- failures of a disk


def test_a_failed_sync_makes_a_leader_leave_the_quorum(group, monkeypatch):
    leader = group.leader()
    leader.put_confirmed(b"before")
    wait_for(lambda: leader.store.persisted_index == leader.store.end_index)  # not the others alone

    def fail(*_args):
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(leader.store.messages.log.queue, "sync", fail)
    leader.put(b"uncertain")
    following = group.leader(but=leader)
    assert following.put_confirmed(b"after")[0] == "PUT_OK"
    wait_for(lambda: leader.driver.left)
    assert "sync" in leader.driver.left and leader.driver.status()["role"] == "FOLLOWER"
    with pytest.raises(NotStoredError, match="has left the quorum"):
        leader.put(b"x")
    assert any("left the quorum" in one for one in leader.driver.problems())
    persisted = leader.store.persisted_index
    assert persisted < leader.store.end_index, "nothing was counted that was not synced"
    assert [name for name, _ in leader.failures] == ["store"]
    leader.failures.clear()
    with pytest.raises(StoreBrokenError):
        leader.stop()


def test_a_follower_with_a_failed_sync_neither_votes_nor_acknowledges(group, monkeypatch):
    leader = group.leader()
    follower, other = [node for node in group.running if node is not leader]

    def fail(*_args):
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(follower.store.messages.log.queue, "sync", fail)
    assert leader.put_confirmed(b"x")[0] == "PUT_OK"
    wait_for(lambda: follower.driver.left)
    wait_for(lambda: follower.number not in leader.driver.links.linked)
    if follower.number < leader.number:  # the leader calls, and is told why
        text = "has left the quorum"
        wait_for(lambda: text in leader.driver.links.problems.get(follower.number, ""))
    other.kill()
    wait_for(lambda: leader.driver.refusal(), "one of three is no majority")
    assert leader.driver.core.role is not Role.LEADER
    follower.failures.clear()
    with pytest.raises(StoreBrokenError):
        follower.stop()


def hang(node, monkeypatch):
    """Let no sync and no save of the node's disk return until the test calls what this returns.

    The second value says whether something waits.
    """
    returns, hangs = threading.Event(), threading.Event()

    def held(real):
        def wait(*args, **options):
            hangs.set()
            assert returns.wait(120)
            return real(*args, **options)

        return wait

    queue = node.store.messages.log.queue
    monkeypatch.setattr(queue, "sync", held(queue.sync))
    monkeypatch.setattr(node.store, "save_hard_state", held(node.store.save_hard_state))
    return returns.set, hangs


def test_a_leader_whose_disk_hangs_hands_over_and_can_still_be_asked(group, monkeypatch):
    monkeypatch.setattr("hastore.store.log.flush.HANGS_MS", 200.0)
    leader = group.leader()
    followed(leader)
    end, hangs = hang(leader, monkeypatch)
    assert leader.put_confirmed(b"x")[0] == "PUT_OK", "the other two are a majority"
    assert hangs.wait(60)
    following = group.leader(but=leader)
    assert following.put_confirmed(b"y")[0] == "PUT_OK"
    wait_for(lambda: leader.driver.status()["leader"] is None, "it has stepped down")
    assert leader.driver.core.term < following.driver.core.term, "it could not save a term"
    assert leader.driver.core.hangs and "sync" in leader.store.messages.flush_service.sync_problem
    end()
    equal_logs(group)
    assert leader.driver.core.term == following.driver.core.term


def test_a_node_that_is_asked_for_its_vote_before_its_disk_is_known_to_hang_can_still_be_asked(
    group, monkeypatch
):
    leader = group.leader()
    followed(leader)
    hung, other = [node for node in group.running if node is not leader]
    end, hangs = hang(hung, monkeypatch)
    leader.put(b"x")
    assert hangs.wait(60)
    flush, asked = hung.store.messages.flush_service, threading.Semaphore(0)
    wait_for(lambda: flush.running_ms > SETTINGS.election_timeout_ms)
    would_wait = hung.driver._would_wait

    def looked_at(message):
        if isinstance(message, VoteRequest):
            asked.release()
        return would_wait(message)

    def vote():  # None in the leader's term if the leader had a majority without it
        status = hung.driver.status()
        return status["term"], status["voted_for"]

    before = vote()
    monkeypatch.setattr(hung.driver, "_would_wait", looked_at)
    leader.kill()
    try:
        for _ in range(3):  # the other one asks again and again
            assert asked.acquire(timeout=60)
        assert vote() == before, "it saved no vote"
        assert other.driver.core.role is Role.CANDIDATE
    finally:
        end()
    assert group.leader(but=leader).put_confirmed(b"y")[0] == "PUT_OK"
    equal_logs(group)


def test_a_request_on_a_disk_that_hangs_does_not_keep_the_leader_from_handing_over(
    group, monkeypatch
):
    """To take a request is to sync a folder, in the thread that sees the hang."""
    monkeypatch.setattr("hastore.store.log.flush.HANGS_MS", 1_000.0)
    monkeypatch.setattr("hastore.dledger.driver.driver.SLOW_SYNC_MS", 1.0)
    leader = group.leader()
    followed(leader)
    core, root = leader.driver.core, leader.config.store.root
    end, hangs = hang(leader, monkeypatch)
    returns, pop = threading.Event(), leader.driver._requests._file.pop

    def held_pop():
        if os.path.exists(request_path(root)):
            assert returns.wait(120)
        return pop()

    monkeypatch.setattr(leader.driver._requests._file, "pop", held_pop)
    leader.put(b"x")
    assert hangs.wait(60)
    wait_for(lambda: leader.store.messages.flush_service.running_ms > 1.0)
    to = next(one for one in core.members if one != leader.number)
    write_request(REAL, root, "transfer", to, term=core.term, members=core.members,
                  wall_ms=SYSTEM_CLOCK.wall_ms())  # fmt: skip
    assert group.leader(but=leader).put_confirmed(b"y")[0] == "PUT_OK"
    wait_for(lambda: leader.driver.status()["leader"] is None, "it has stepped down")
    returns.set()
    end()
    wait_for(lambda: (leader.driver.status()["request"] or {}).get("outcome") == "REFUSED")
    equal_logs(group)


def test_a_leader_without_a_majority_beside_its_hanging_disk_goes_on(group, monkeypatch):
    """It could not give another one the vote that this one would need."""
    monkeypatch.setattr("hastore.store.log.flush.HANGS_MS", 200.0)
    leader = group.leader()
    followed(leader)
    next(node for node in group.running if node is not leader).kill()
    end, _ = hang(leader, monkeypatch)
    term = leader.driver.open_term
    leader.put(b"x")
    wait_for(lambda: leader.driver.core.hangs, "the hang is noticed")
    rounds = leader.driver.core._leader.reads
    later = rounds.round + 15
    wait_for(lambda: rounds.round > later, "time for a transfer")
    assert leader.driver.core.role is Role.LEADER and leader.driver.open_term == term
    end()
    assert leader.put_confirmed(b"y")[0] == "PUT_OK"


def test_answers_to_a_leader_are_read_while_its_own_entry_is_synced(group, monkeypatch):
    """A link's thread that synced it would not read what its peer has confirmed meanwhile."""
    leader = group.committed_leader()
    followed(leader)
    end, hangs = hang(leader, monkeypatch)
    core, own = leader.driver.core, []
    answer = core._leader.on_answer

    def on_answer(peer, message, now_ms, update):
        if not own:  # as for a learner that becomes a member, or a peer that lost its disk
            own.append(peer)
            core._leader._append_own(None, update)
        answer(peer, message, now_ms, update)

    monkeypatch.setattr(core._leader, "on_answer", on_answer)
    assert hangs.wait(60)
    assert leader.put_confirmed(b"x")[0] == "PUT_OK"
    end()
    equal_logs(group)


@pytest.mark.parametrize("failure", [UsageError("it is committed"), ValueError("a defect")])
def test_a_store_that_contradicts_the_core_makes_the_node_leave(group, monkeypatch, failure):
    leader = group.leader()
    follower = next(node for node in group.running if node is not leader)

    def fail(*_args):
        raise failure

    monkeypatch.setattr(follower.store, "append_taken", fail)
    assert leader.put_confirmed(b"x")[0] == "PUT_OK"
    wait_for(lambda: follower.driver.left)
    assert str(failure) in follower.driver.left
    wait_for(lambda: follower.number not in leader.driver.links.linked)
    assert leader.put_confirmed(b"y")[0] == "PUT_OK"
    is_defect = isinstance(failure, ValueError)
    wait_for(lambda: len(follower.failures) == is_defect)
    assert [one for _, one in follower.failures] == [failure] * is_defect
    follower.failures.clear()


def test_a_leader_with_a_full_disk_yields(group, monkeypatch):
    leader = group.leader()
    messages = leader.store.messages

    def full(*_args):
        raise StoreFullError("no room")

    monkeypatch.setattr(leader.store, "put", full)
    monkeypatch.setattr(
        type(messages), "problems", property(lambda self: ["no room"] * (self is messages))
    )
    with pytest.raises(StoreFullError):
        leader.put(b"x")
    with pytest.raises(NotStoredError):
        leader.put(b"x")
    following = group.leader(but=leader)
    assert following.put_confirmed(b"y")[0] == "PUT_OK"
    monkeypatch.undo()
    wait_for(lambda: not leader.driver._room.full, "there is room again")
    group.settled()


def test_a_leader_knows_whose_disk_is_full_and_when_no_majority_has_room(group, monkeypatch):
    leader = group.put(b"x")
    followers = [node for node in group.running if node is not leader]
    followed(leader)

    def full(*_args):
        raise StoreFullError("no room")

    def known():
        return {one.node for one in leader.driver.followers() if one.full}

    def told():
        return [one for one in leader.driver.problems() if "no majority of the members" in one]

    monkeypatch.setattr(LogStore, "free_bytes", lambda self: 0)
    monkeypatch.setattr(followers[0].store, "append_taken", full)
    leader.put_confirmed(b"y")
    wait_for(lambda: known() == {followers[0].number}, "one is full")
    assert followers[0].driver.full() == "no entry is stored: no room"  # it is not ready
    assert followers[1].driver.full() is None
    assert told() == []
    monkeypatch.setattr(followers[1].store, "append_taken", full)
    leader.put(b"z")
    wait_for(lambda: len(known()) == 2, "both are full")
    assert f"disk of node {followers[0].number}, {followers[1].number}" in told()[0]
    monkeypatch.undo()
    wait_for(lambda: known() == set() and told() == [], "there is room again")
    assert followers[0].driver.full() is None
    equal_logs(group)


@pytest.mark.parametrize("count", [1, 3])
def test_a_leader_with_a_full_disk_says_so_if_nobody_can_take_over(tmp_path, monkeypatch, count):
    def full(*_args):
        raise StoreFullError("/s/commitlog: no room")

    with running_group(tmp_path, count) as group:
        leader = group.put(b"x")
        followed(leader)
        followers = [node for node in group.running if node is not leader]
        monkeypatch.setattr(LogStore, "free_bytes", lambda self: 0)
        for node in followers:
            monkeypatch.setattr(node.store, "append_taken", full)
        leader.put(b"y")
        wait_for(lambda: all(one.full for one in leader.driver.followers()), "they are full")
        monkeypatch.setattr(leader.store, "put", full)
        with pytest.raises(StoreFullError):
            leader.put(b"z")
        said = ["DISK_FULL: /s/commitlog: no room", "no other member can take over"]
        said += [f"the disk of node {node.number} is full" for node in followers]
        with pytest.raises(NotStoredError) as refused:
            leader.put(b"z")
        assert str(refused.value) == "; ".join(said)
        monkeypatch.undo()
        group.put(b"goes on")


def test_an_install_inside_a_file_ends_its_link_and_not_the_node(group):
    leader = group.put(b"x")
    follower = next(node for node in group.running if node is not leader)
    wait_for(lambda: (core := follower.driver.core) and core.leader == leader.number)
    wait_for(lambda: leader.number in follower.driver.links.linked)
    term, begin = leader.driver.term, follower.store.begin_index
    request = InstallRequest(term, 100, 1_000, term, (1, 2, 3))
    follower.driver.on_messages(leader.number, [Received(request, None)])
    assert follower.driver.left is None and follower.store.begin_index == begin
    group.put(b"y")
    assert b"y" in equal_logs(group)


class FullFileSystem:
    """A file system on which no file can be replaced: its disk is full."""

    def __init__(self, real):
        self.real = real

    def __getattr__(self, name):
        return getattr(self.real, name)

    def replace_bytes(self, path, _data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class UnwritableFileSystem(FullFileSystem):
    """A file system on which no file can be replaced: its disk fails."""

    def replace_bytes(self, path, _data):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def test_a_node_that_cannot_save_the_members_says_so_until_it_can(group, monkeypatch):
    leader = group.committed_leader()
    group.put(b"x")
    followed(leader)  # a node makes no new link while it cannot save whose it is
    follower = next(node for node in group.running if node is not leader)
    monkeypatch.setattr(follower.state, "_fs", UnwritableFileSystem(REAL))
    wanted = MemberSet((1, 2, 3), (4,))
    settled = leader.ask(functools.partial(leader.driver.change_members, wanted))
    assert settled.outcome == "COMMITTED"

    def told():
        return [one for one in follower.driver.problems() if "cannot carry out" in one]

    assert "node.json" in wait_for(told, "the problem")[0]
    assert follower.driver.left is None
    monkeypatch.undo()
    wait_for(lambda: not told(), "it goes on")
    group.put(b"y")
    assert b"y" in equal_logs(group)


def test_a_node_that_has_no_room_for_its_vote_comes_back_when_it_has(group, monkeypatch):
    leader = group.leader()
    leader.put_confirmed(b"x")
    followed(leader)
    term = leader.driver.term
    monkeypatch.setattr(leader.store._files, "_fs", FullFileSystem(REAL))
    monkeypatch.setattr(leader.state, "_fs", FullFileSystem(REAL))
    monkeypatch.setattr(type(leader.store.messages), "free_bytes", lambda self: 0)
    other = next(node for node in group.running if node is not leader)
    leader.driver.hand_over(other.number, lambda _settled: None)
    following = group.leader(but=leader)
    assert following.put_confirmed(b"y")[0] == "PUT_OK"
    wait_for(lambda: any("No space left" in one for one in leader.driver.problems()))
    assert leader.driver.left is None
    assert leader.store.hard_state.term == term, "it has voted for nobody"
    monkeypatch.undo()
    assert b"y" in equal_logs(group)
    assert leader.store.hard_state.term == following.driver.term
    wait_for(lambda: leader.driver.problems() == [])


def test_a_group_of_one_that_starts_on_a_full_disk_comes_back_when_it_has_room(
    tmp_path, monkeypatch
):
    with running_group(tmp_path, 1) as group:
        group.put(b"x")
        group.nodes[1].stop()
        with monkeypatch.context() as patch:
            full = FullFileSystem(REAL).replace_bytes
            patch.setattr(HardStateFiles, "save", lambda self, *_: full("currterm", b""))
            patch.setattr(LogStore, "free_bytes", lambda self: 0)
            (node,) = group.start(1)
            says = "No space left"
            wait_for(lambda: any(says in one for one in node.driver.problems()), "the problem")
            wait_for(lambda: node.driver.waits is None, "it has begun")
            assert node.driver.left is None and node.driver.core.role is Role.FOLLOWER
        assert group.put(b"y") is node
        assert node.driver.problems() == []


def block_replay(node):
    """Let the disk have no room for what replay writes; return the call that ends it."""
    queues = node.store.messages.queues

    def full(_batch):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    queues.dispatch = full
    return functools.partial(delattr, queues, "dispatch")


def blocked(node):
    """Whether the node's replay has stopped, and its core knows it."""
    return node.store.messages.replay.blocked_reason is not None and node.driver.core.blocked


def test_nodes_that_contradict_each_other_about_their_leader_all_say_so(tmp_path):
    group = DriverGroup(tmp_path)
    try:
        for number, preferred in {1: 2, 2: 1, 3: None}.items():
            settings = dataclasses.replace(SETTINGS, preferred_leader=preferred)
            group.start(number, settings=settings)
        said = "node 1 prefers node 2, node 2 prefers node 1; set the same `dledger.preferred"
        wait_for(lambda: all(said in str(node.driver.problems()) for node in group.running))
        group.put(b"x")
        equal_logs(group)
    finally:
        group.stop()


def test_a_node_whose_replay_has_stopped_is_not_elected(group):
    """It could take no put as leader."""
    leader = group.leader()
    one, other = (node for node in group.running if node is not leader)
    end = block_replay(one)
    leader.put_confirmed(b"x")
    wait_for(lambda: blocked(one))
    followed(leader)
    wait_for(lambda: one.number not in leader.driver.core.able_followers)
    refused = leader.ask(lambda done: leader.driver.hand_over(one.number, done))
    assert refused.outcome == "REFUSED" and "its replay has stopped" in refused.reason
    leader.kill()
    assert group.put(b"y") is other
    assert any("leads only if no other member can" in text for text in one.driver.problems())
    end()
    wait_for(lambda: one.number in other.driver.core.able_followers, "replay goes on")
    assert "replay" not in str(one.driver.problems())


def test_a_leader_whose_replay_has_stopped_yields(group):
    leader = group.leader()
    end = block_replay(leader)
    leader.put(b"x")
    following = group.leader(but=leader)
    assert following.put_confirmed(b"y")[0] == "PUT_OK"
    assert blocked(leader)
    end()
    wait_for(lambda: not leader.driver.core.blocked, "replay goes on")
    equal_logs(group)


def test_if_no_member_can_serve_one_leads_all_the_same_and_says_so(group):
    """Else a node that can serve, and lacks entries, could not catch up."""
    leader = group.leader()
    ends = [block_replay(node) for node in group.running]
    leader.put(b"x")
    says = "no other member can take over; "
    wait_for(lambda: all(blocked(node) for node in group.running))
    wait_for(lambda: any(says in str(node.driver.problems()) for node in group.running))
    leader = next(node for node in group.running if node.driver.is_leader)
    leader.kill()

    def refusal():
        return next((str(n.driver.refusal()) for n in group.running if n.driver.is_leader), "")

    wait_for(lambda: says in refusal() and "No space left" in refusal(), "a leader")
    for end in ends:
        end()
    group.put(b"y")
    equal_logs(group)


def test_a_follower_whose_store_refuses_entries_begins_anew(group, monkeypatch):
    leader = group.leader()
    follower = next(node for node in group.running if node is not leader)
    real = follower.store.append_taken
    refused = []

    def full(*args):
        if len(refused) < 3:
            refused.append(args)
            raise StoreFullError("no room")
        real(*args)

    monkeypatch.setattr(follower.store, "append_taken", full)
    assert leader.put_confirmed(b"x")[0] == "PUT_OK"
    for _ in range(3):
        leader.put_confirmed(b"y")
    wait_for(lambda: len(refused) == 3, "the follower asks again")
    equal_logs(group)


# ---- peers that do wrong


def test_bytes_that_are_no_entries_are_not_appended(group):
    """A peer with the group's rights leads a later term and sends nonsense."""
    leader = group.leader()
    leader.put_confirmed(b"x")
    victim, other = [node for node in group.settled() if node is not leader]
    before = victim.log()
    number = max(group.ports)
    if victim.number == number:
        victim, other = other, victim
    liar = group.nodes[number]
    liar.kill()
    wait_for(lambda: number not in victim.driver.links.linked)
    made = call(
        victim.address,
        said(node=number, store_id=liar.state.data.store_id,
             file_size=victim.store.messages.file_size),
        None, SYSTEM_CLOCK, 20_000,
    )  # fmt: skip
    assert made.answer == Linked()
    end, pos = victim.store.end_index, victim.store.messages.max_offset
    term = victim.driver.term + 5
    request = AppendRequest(term, end, victim.store.end_term, pos, 96, ((term, 1),), end)
    made.sock.sendall(message_frame(HeartBeatRequest(term, 1, end)))
    made.sock.sendall(append_frames(request) + bytes(96))
    made.sock.settimeout(60)
    while made.sock.recv(65536):
        continue
    made.close()
    wait_for(lambda: victim.driver.links.problems.get(number))
    assert victim.log()[: len(before)] == before and victim.driver.left is None
    assert bytes(96) not in victim.log()[len(before) :]
    assert group.put(b"goes on")
    group.start(number)
    equal_logs(group)


def test_a_stranger_does_not_disturb_a_group(group):
    leader = group.leader()
    for node in group.running:
        for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(8), os.urandom(5_000)):
            stranger = Peer(node.address)
            try:
                stranger.send(data)
            except OSError:
                pass  # it was closed while it sent
            stranger.close()
    term = leader.driver.term
    assert leader.put_confirmed(b"x")[0] == "PUT_OK" and leader.driver.term == term


def test_a_slow_follower_does_not_slow_the_group_and_holds_no_memory(group):
    leader = group.leader()
    slow = next(node for node in group.running if node is not leader)
    entered, go_on = threading.Event(), threading.Event()
    real = slow.driver.on_messages

    def stuck(peer, messages):
        if peer == leader.number:
            entered.set()
            assert go_on.wait(60)
        real(peer, messages)

    slow.driver.on_messages = stuck
    wait_for(lambda: leader.number in slow.driver.links.linked)
    slow.driver.links._channels[leader.number]  # the link stays; what it delivers waits
    slow.driver.links._handler = slow.driver
    for channel in [slow.driver.links._channels[leader.number]]:
        channel.close("a new link, which delivers to the stuck handler")
    wait_for(lambda: entered.is_set())
    for _ in range(100):
        leader.put(*(os.urandom(4_000) for _ in range(25)))
    assert leader.put_confirmed(b"x")[0] == "PUT_OK"
    channel = leader.driver.links._channels.get(slow.number)
    assert channel is None or channel._queued_bytes <= 32 << 20
    go_on.set()
    equal_logs(group)


def test_a_crash_before_the_log_begins_anew_forgets_no_member_list(tmp_path, monkeypatch):
    """The new list is saved first, the lists of the old log stay until that log is gone."""
    with running_group(tmp_path, 1) as group:
        node = group.leader()
        driver, state, store = node.driver, node.state, node.store
        old, new = MemberList(0, 1, (1, 2)), MemberList(99, 4, (1, 2, 3))
        state.save(member_lists=((0, 1, (1, 2)),))
        seen = []

        def install(*_args):
            seen.append(state.data.member_lists)
            return "rescued"

        monkeypatch.setattr(store, "install", install)
        event = Receive(0.0, 2, InstallRequest(4, 100, 0, 4, (1, 2, 3)))
        with driver._lock:
            driver._carry_out(Update(install=(100, 0, 4), member_lists=(new,)), event, None)
        assert seen == [tuple((one.index, one.term, one.members) for one in (old, new))]
        assert state.data.member_lists == ((99, 4, (1, 2, 3)),)


def test_a_log_that_cannot_begin_anew_does_not_double_the_member_lists(group, monkeypatch):
    """Each attempt saves the lists of the old log and the new one: none of them twice."""
    for wanted in (MemberSet((1, 2, 3), (4,)), MemberSet((1, 2, 3))):
        change = functools.partial(group.committed_leader().driver.change_members, wanted)
        assert group.leader().ask(change).outcome == "COMMITTED"
    leader = group.put(b"x")
    group.settled()
    follower = next(node for node in group.running if node is not leader)
    state, driver, saved = follower.state, follower.driver, []

    def lists():
        return state.data.member_lists, state.data.learner_lists

    def full(*_args):
        saved.append(lists())
        raise StoreFullError("no room for the rest of the old log")

    before = lists()
    assert [len(one) for one in before] == [2, 1]
    monkeypatch.setattr(follower.store, "install", full)
    request = InstallRequest(leader.driver.term, 100, 0, leader.driver.term, (1, 2, 3), (5,))

    def attempt():
        driver.on_messages(leader.number, [Received(request, None)])
        return lists()

    assert [attempt() for _ in range(3)] == [before] * 3
    new = (99, request.term, (1, 2, 3)), (99, request.term, (5,), ())
    assert saved == [tuple((*old, one) for old, one in zip(before, new, strict=True))] * 3
    with driver._lock:
        state.save(member_lists=before[0] * 4, learner_lists=before[1] * 4)
        driver._begin_core()  # a file that has grown heals
        assert lists() == before
    monkeypatch.undo()
    group.put(b"y")
    assert b"y" in equal_logs(group)


# ---- an administrator


def ask_by_file(node, command, target, **changes):
    """Write the request as the command does, and return its outcome."""
    core = node.driver.core
    fields = {"term": core.term, "members": core.members, "wall_ms": SYSTEM_CLOCK.wall_ms()}
    number = write_request(REAL, node.config.store.root, command, target, **{**fields, **changes})

    def outcome():
        request = node.driver.status()["request"]
        return request if request and request["id"] == number and request["outcome"] else None

    found = wait_for(outcome, "the outcome of the request")
    assert not os.path.exists(request_path(node.config.store.root))
    return found["outcome"], found["reason"]


def test_an_administrator_transfers_and_changes_the_members(group):
    leader = group.leader()
    other = next(node for node in group.running if node is not leader)
    outcome, reason = ask_by_file(other, "transfer", leader.number)
    assert outcome == "REFUSED" and f"node {leader.number} is the leader" in reason
    followed(leader)
    assert ask_by_file(leader, "transfer", other.number) == ("DONE", "")
    assert group.committed_leader() is other
    third = next(node for node in group.running if node not in (leader, other))
    assert ask_by_file(other, "remove", third.number) == ("DONE", "")
    wait_for(lambda: third.number not in leader.driver.core.members)
    assert ask_by_file(other, "add", third.number) == ("DONE", "")
    wait_for(lambda: other.driver.core.members == (1, 2, 3), "it keeps up")
    status = other.driver.status()  # who asked first may look after the second has ended, too
    known = [(one["command"], one["outcome"]) for one in status["requests"]]
    assert known == [("transfer", "REFUSED"), ("remove", "DONE"), ("add", "DONE")]
    assert status["requests"][-1] == status["request"]
    group.put(b"x")
    equal_logs(group)


def test_a_member_that_is_left_out_of_the_file_keeps_its_link(group):
    """Also over a restart with that file; `problems` name the difference."""
    group.put(b"x")
    one = group.nodes[3]
    wait_for(lambda: one.driver.links.linked == {1, 2})
    wait_for(lambda: set(one.driver.group_nodes()) == {1, 2, 3}, "the group begins there, too")
    others = {n: f"127.0.0.1:{port}" for n, port in group.ports.items() if n != 1}
    one.driver.set_addresses(others)
    assert one.driver.links.linked == {1, 2}
    said = "node 1 belongs to the group, but is not in this node's `nodes`: it keeps its link"
    assert said in str(one.driver.problems())
    one.stop()
    (one,) = group.start(3, ports={n: group.ports[n] for n in (2, 3)})
    wait_for(lambda: one.driver.links.linked == {1, 2}, "both links, from the list of members")
    assert said in str(one.driver.problems())
    group.nodes[1].stop()  # of the other end: node 3 calls it
    ports = {n: group.ports[n] for n in (1, 2)}
    (first,) = group.start(1, ports=ports)
    wait_for(lambda: first.driver.links.linked == {2, 3})
    assert "node 3 belongs to the group" in str(first.driver.problems())
    leader = group.put(b"y")
    gone, other = (3, first) if leader.number == 1 else (1, one)
    wait_for(lambda: leader.driver.links.linked == {1, 2, 3} - {leader.number})
    assert ask_by_file(leader, "remove", gone)[0] == "DONE"
    wait_for(lambda: gone not in other.driver.links.linked, "it is left out, and no member")
    assert "keeps its link" not in str(other.driver.problems())


def test_a_removed_node_learns_it_and_says_that_it_is_not_current(group):
    """It asked for votes for ever, and served what it had. Also over a restart without links."""
    leader = group.put(b"x")
    gone = next(node for node in group.settled() if node is not leader)
    assert gone.driver.outdated() is None
    followed(leader)
    assert ask_by_file(leader, "remove", gone.number) == ("DONE", "")
    wait_for(gone.driver.outdated, "it learns that it was removed")
    left = sorted({1, 2, 3} - {gone.number})
    said = f"node {gone.number} was removed from the group, whose members are {left[0]}, {left[1]}"
    assert said in gone.driver.outdated() and said in str(gone.driver.problems())
    assert said in gone.driver.refusal()
    for node in group.running:
        if node is not gone:
            node.driver.set_addresses({n: f"127.0.0.1:{group.ports[n]}" for n in left})
    gone.stop()
    (gone,) = group.start(gone.number)
    wait_for(lambda: gone.driver.core, "it takes part again")
    assert said in gone.driver.outdated() and gone.driver.core.role is Role.FOLLOWER
    for node in group.running:
        node.driver.set_addresses({n: f"127.0.0.1:{port}" for n, port in group.ports.items()})
    leader = group.committed_leader()
    wait_for(lambda: gone.number in leader.driver.links.linked)
    assert ask_by_file(leader, "add", gone.number) == ("DONE", "")
    wait_for(lambda: gone.driver.outdated() is None, "the leader serves it again")
    equal_logs(group)


@pytest.mark.parametrize("number", [1, 3], ids=["the others would call it", "it calls them"])
def test_a_node_that_was_removed_while_it_was_down_learns_it(group, number):
    """Nobody has its number in `nodes` any more, so no link is made."""
    group.put(b"x")
    group.settled()
    group.nodes[number].kill()
    left = {1, 2, 3} - {number}
    wait_for(lambda: all(n.driver.links.linked == left - {n.number} for n in group.running))
    leader = group.committed_leader()
    (follower,) = left - {leader.number}
    wait_for(lambda: _index_of(leader, follower) == leader.store.end_index)
    assert ask_by_file(leader, "remove", number) == ("DONE", "")
    for node in group.running:
        node.driver.set_addresses({n: f"127.0.0.1:{group.ports[n]}" for n in left})
    (gone,) = group.start(number)
    wait_for(lambda: gone.driver.core)

    def learns():
        gone.driver.links.ask_callers()  # as GroupService does without a leader
        return gone.driver.outdated()

    said = "whose members are " + ", ".join(str(one) for one in sorted(left))
    assert said in wait_for(learns, "it learns that it was removed")
    assert gone.driver.links.linked == set()


def _index_of(leader, follower):
    return {one.node: one.index for one in leader.driver.followers()}.get(follower)


def test_a_link_stays_at_an_address_that_has_changed_in_the_file(group):
    group.put(b"x")
    three = group.nodes[3]
    wait_for(lambda: three.driver.links.linked == {1, 2})
    addresses = {n: f"127.0.0.1:{port}" for n, port in group.ports.items()}
    three.driver.set_addresses({**addresses, 1: "127.0.0.1:1"})
    assert three.driver.links.linked == {1, 2}
    assert f"node 1 is linked at {addresses[1]}, but `nodes` has 127.0.0.1:1" in str(
        three.driver.problems()
    )
    three.driver.links.close(1, "the test ends it")
    wait_for(lambda: "127.0.0.1:1: " in three.driver.links.problems.get(1, ""))
    three.driver.set_addresses(addresses)
    wait_for(lambda: three.driver.links.linked == {1, 2})
    equal_logs(group)


def learner_of(node):
    """Return what a leader says of its only learner; None if it has none."""
    learners = [one for one in node.driver.followers() if one.is_learner]
    return learners[0] if learners else None


def test_a_node_is_added_and_fails_and_a_dead_one_is_replaced(tmp_path):
    """A learner counts for nothing: with a member down, and the learner too, the group goes on."""
    group = DriverGroup(tmp_path, 4)
    group.start(1, 2, 3, ports={n: port for n, port in group.ports.items() if n < 4})
    leader = group.committed_leader()
    addresses = {n: f"127.0.0.1:{port}" for n, port in group.ports.items()}
    for node in group.running:
        node.driver.set_addresses(addresses)
    outcome, reason = ask_by_file(leader, "add", 4)
    assert outcome == "REFUSED" and "node 4 is not linked" in reason
    dead, other = (node for node in group.running if node is not leader)
    dead.kill()
    (fourth,) = group.start(4)
    wait_for(lambda: leader.driver.links.linked == {4, other.number})
    for target in (other.number, leader.number):
        outcome, reason = ask_by_file(leader, "remove", target)
        assert outcome == "REFUSED" and f"start or remove node {dead.number}" in reason, reason
    assert ask_by_file(leader, "add", 4) == ("DONE", "")
    keeps_up = (
        f"it keeps up; too few members work for one more: start, mend or remove node {dead.number}"
    )
    wait_for(lambda: learner_of(leader).waits_for == keeps_up, "the learner keeps up")
    for node in (leader, fourth):
        assert node.driver.core.group == MemberSet((1, 2, 3), (4,))
    assert [one["node"] for one in leader.driver.status()["learners"]] == [4]
    assert fourth.driver.core.role is Role.FOLLOWER
    outcome, reason = ask_by_file(leader, "transfer", 4)
    assert outcome == "REFUSED" and "no member" in reason
    outcome, reason = ask_by_file(leader, "add", 4)
    assert outcome == "REFUSED" and "a learner already" in reason
    outcome, reason = ask_by_file(leader, "replace", dead.number, by=4)
    assert outcome == "REFUSED" and "hastore dledger remove -c FILE --node 4" in reason
    fourth.kill()
    wait_for(lambda: "no link" in learner_of(leader).waits_for)
    group.put(b"goes on without both")
    assert ask_by_file(leader, "remove", 4) == ("DONE", "")
    assert leader.driver.core.group == MemberSet((1, 2, 3))
    group.start(4)
    wait_for(lambda: leader.driver.links.linked == {4, other.number})
    assert ask_by_file(leader, "replace", dead.number, by=4) == ("DONE", "")
    wanted = tuple(sorted((leader.number, other.number, 4)))
    wait_for(lambda: leader.driver.core.group == MemberSet(wanted), "the replacement")
    group.put(b"goes on")
    equal_logs(group)
    for node in group.running:
        node.kill()
    group.start(leader.number, 4, ports=group.ports)
    group.put(b"two of three")
    assert {node.driver.core.group for node in group.running} == {MemberSet(wanted)}
    group.stop()


def test_a_restart_knows_the_learners(tmp_path):
    """They are in node.json beside the members, which the version before reads as ever."""
    group = DriverGroup(tmp_path, 2)
    alone = {1: group.ports[1]}
    (node,) = group.start(1, ports=alone)
    group.committed_leader()
    wanted = MemberSet((1,), (2,))
    assert node.ask(lambda done: node.driver.change_members(wanted, done)).outcome == "COMMITTED"
    node.stop()
    data = node.state.data
    assert [one[2] for one in data.member_lists] == [(1,)]
    assert [one[2:] for one in data.learner_lists] == [((2,), ())]
    (node,) = group.start(1)
    group.leader()
    assert node.driver.core.group == wanted
    assert learner_of(node).waits_for == "there is no link to it: start it"
    group.stop()


def test_no_learner_is_added_beside_a_node_of_the_version_before(tmp_path):
    """It would refuse the entry with the list, and fall behind."""
    group = DriverGroup(tmp_path, 3)
    group.start(1, 2, ports={n: port for n, port in group.ports.items() if n < 3})
    leader = group.leader()
    old = next(node for node in group.running if node is not leader)
    hello = old.driver.member.hello()
    assert hello.learners
    leader.driver.member.learn(msgspec.structs.replace(hello, learners=False))
    for node in group.running:
        node.driver.set_addresses({n: f"127.0.0.1:{port}" for n, port in group.ports.items()})
    group.start(3)
    wait_for(lambda: 3 in leader.driver.links.linked)
    outcome, reason = ask_by_file(leader, "add", 3)
    assert outcome == "REFUSED"
    assert reason == (
        f"node {old.number} runs a version of hastore that knows no learners; upgrade every node "
        "first"
    )
    group.stop()


@pytest.mark.parametrize(
    ("command", "target", "changes", "words"),
    [
        ("transfer", 9, {}, "no member"), ("add", 9, {}, "add it to `nodes`"),
        ("remove", 9, {}, "no member"), ("add", 1, {}, "a member already"),
        ("dance", 1, {}, "unknown command"), ("transfer", 1, {"term": 99}, "in term 99"),
        ("remove", 1, {"members": (1, 2)}, "look at `hastore status`"),
        ("remove", 1, {"wall_ms": SYSTEM_CLOCK.wall_ms() - 61_000}, "give the command again"),
        ("remove", 1, {"wall_ms": SYSTEM_CLOCK.wall_ms() + 90_000_000}, "give the command again"),
        ("remove", 1, {"wall_ms": 10**400}, "give the command again"),
        ("transfer", 1, {}, "the leader already"), ("remove", 1, {}, "the only member"),
        ("replace", 1, {"by": 9}, "add it to `nodes`"), ("replace", 9, {"by": 1}, "no member"),
        ("replace", 1, {"by": 1}, "a member already"), ("replace", 1, {}, "no address"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # the same in all workers
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused(tmp_path, command, target, changes, words):
    with running_group(tmp_path, 1) as group:
        outcome, reason = ask_by_file(group.leader(), command, target, **changes)
        assert outcome == "REFUSED" and words in reason


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff\xfe", b"[1]", b'{"id": 1}', os.urandom(99)],
    ids=["nothing", "empty", "not UTF-8", "a list", "an id alone", "random"],
)
def test_a_file_that_is_no_request_is_removed(tmp_path, data):
    with running_group(tmp_path, 1) as group:
        leader = group.leader()
        path = request_path(leader.config.store.root)
        REAL.replace_bytes(path, data)
        wait_for(lambda: not os.path.exists(path))
        assert leader.driver.status()["request"] is None
        assert leader.put_confirmed(b"x")[0] == "PUT_OK"


class Overtaken:
    """A file system on which another request replaces the file just before it is removed."""

    def __init__(self, other):
        self.other = other

    def __getattr__(self, name):
        return getattr(REAL, name)

    def remove(self, path):
        other, self.other = self.other, None
        if other is not None:
            other()
        REAL.remove(path)


def test_a_request_that_comes_while_another_is_taken_is_not_lost(tmp_path):
    os.makedirs(tmp_path / "hastore")
    seen = {"term": 1, "members": (1, 2, 3), "wall_ms": SYSTEM_CLOCK.wall_ms()}

    def write(node):
        write_request(REAL, str(tmp_path), "remove", node, **seen)

    write(2)
    file = RequestFile(Overtaken(lambda: write(3)), str(tmp_path), SYSTEM_CLOCK)
    assert [file.pop().node, file.pop().node, file.pop()] == [2, 3, None]
    assert os.listdir(tmp_path / "hastore") == []


def test_requests_run_one_after_the_other(group, monkeypatch):
    """So each command finds the outcome of its own request."""
    leader = group.leader()
    wait_for(lambda: len(leader.driver.links.linked) == 2)  # else a removal would stop the group
    root, core = leader.config.store.root, leader.driver.core
    asked, looks, look = [], [], leader.driver._requests.run_next
    monkeypatch.setattr(leader.driver, "change_members", lambda *request: asked.append(request))
    monkeypatch.setattr(leader.driver._requests, "run_next", lambda: (looks.append(1), look()))
    for count, node in enumerate(sorted(set(core.members) - {leader.number}), 1):
        wall_ms = SYSTEM_CLOCK.wall_ms()
        write_request(REAL, root, "remove", node, term=core.term, members=core.members,
                      wall_ms=wall_ms)  # fmt: skip
        seen = len(looks)
        wait_for(lambda n=seen: len(looks) > n + 2)
        assert len(asked) == 1 and os.path.exists(request_path(root)) == (count == 2)
    asked[0][1](Settled(None, "COMMITTED"))
    wait_for(lambda: len(asked) == 2, "the second request is run")
    assert not os.path.exists(request_path(root))


def test_a_request_needs_the_store_on_this_machine(tmp_path):
    with pytest.raises(HastoreError, match="another folder here"):
        write_request(REAL, str(tmp_path), "remove", 1, term=1, members=(1,), wall_ms=0)


# ---- links


def test_secret_and_wrong_file_size_keep_a_node_out(tmp_path):
    with running_group(tmp_path, 3, secret=b"sixteen bytes or more") as group:
        group.put(b"x")
        group.nodes[3].stop()
        (other,) = group.start(3, secret=b"another secret, as long")
        wait_for(lambda: other.driver.links.problems.get(1))
        assert other.driver.links.linked == set()
        group.put(b"goes on")
        other.stop()
        group.start(3)
        equal_logs(group)
