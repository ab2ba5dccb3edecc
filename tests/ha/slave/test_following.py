"""HAClient against HAService: streams, limits, rewinds, resyncs, unclean marks."""

import errno
import os
import pathlib
import shutil
import threading
import time

import msgspec
import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import AckPoint, Flush, Role
from hastore.errors import StoreError, StoreFullError
from hastore.ha import promoter
from hastore.ha.hello.peer import call
from hastore.ha.master import ha_service
from hastore.ha.master.group_transfer import Need
from hastore.ha.rules.epochs import EpochEntry, History
from hastore.ha.slave import slave_stream
from hastore.ha.slave.classic_client import ClassicHAClient
from hastore.ha.slave.ha_client import HAClient
from hastore.protocol.hello import Purpose, StreamFrom
from hastore.record.codec import build_record
from hastore.store import retention
from hastore.store.message_store import MessageStore
from tests.ha.nodes import FILE_SIZE, HOST, wait_for


def fill(node, end, body=b"x" * 900):
    while node.store.max_offset < end:
        node.put(*[body] * 5)


def in_step(master, *slaves):
    wait_for(
        lambda: (
            all(
                s.store.max_offset == master.store.max_offset
                and s.store.confirmed_offset == master.store.confirmed_offset
                for s in slaves
            )
            and master.store.confirmed_offset == master.store.max_offset
        ),
        "being in step",
    )
    for slave in slaves:
        assert slave.bytes() == master.bytes(slave.store.min_offset)
        assert slave.state.history == master.state.history


@pytest.fixture
def pair(make_group):
    """An open master and its connected slave; keywords are settings of the group."""

    def make(**settings):
        group = make_group(2, **settings)
        master, slave = group.start(1), group.start(2)
        master.promote()
        slave.follow()
        wait_for(lambda: slave.linked)
        return group, master, slave

    return make


def test_a_put_is_confirmed_by_the_slave_and_everybody_learns_it(pair):
    _, master, slave = pair()
    assert master.put_confirmed(b"one") == ("PUT_OK", "SYNC_MEM(1)")
    end = master.store.max_offset
    assert slave.store.max_offset == end == master.store.confirmed_offset
    assert master.store.readable_offset == end
    wait_for(lambda: slave.store.confirmed_offset == slave.store.readable_offset == end)
    assert master.ha.push2_slave_max_offset == end
    assert master.state.data.known_stores == {2: slave.state.data.store_id}
    in_step(master, slave)


def test_a_backlog_of_several_files_is_copied_completely(pair, make_group):
    group = make_group(2)
    master, slave = group.start(1), group.start(2)
    master.promote()
    fill(master, 5 * FILE_SIZE)
    slave.follow()
    in_step(master, slave)
    for node in (master, slave):
        wait_for(lambda node=node: node.store.dispatched_offset == node.store.max_offset)
    assert slave.store.queues.topics() == master.store.queues.topics()


def test_nothing_is_confirmed_without_the_slave(pair):
    _, master, slave = pair()
    master.put_confirmed(b"one")
    slave.unfollow()
    end = master.store.confirmed_offset
    assert master.put_confirmed(b"two", within_ms=500) == ("FLUSH_SLAVE_TIMEOUT", "MASTER_MEM")
    assert master.store.confirmed_offset == master.store.readable_offset == end
    wait_for(lambda: master.ha.can_confirm(flushed=False) is not None)


def test_a_slave_without_a_link_shows_confirmed_records_only(pair):
    _, master, slave = pair(role=Role.ASYNC_MASTER)
    master.put_confirmed(b"one")
    wait_for(lambda: slave.store.readable_offset == master.store.max_offset)
    end = slave.store.confirmed_offset
    slave.unfollow()
    assert slave.store.readable_offset == slave.store.confirmed_offset >= end


def test_a_stop_while_a_stream_begins_is_not_overlooked(pair):
    """The thread waited up to 5 s for the next survey, and a promotion waited for the thread."""
    _, _, slave = pair()
    slave.unfollow()
    client, waits = HAClient(slave.member), []

    class StoppedAsTheStreamBegins(threading.Event):
        def clear(self):
            client.stopping.set()
            client.wake()
            super().clear()

        def wait(self, timeout=None):
            if client.stopping.is_set():
                waits.append(self.is_set())
            return super().wait(timeout)

    client._retry_now = StoppedAsTheStreamBegins()
    client.start()
    wait_for(lambda: not client.alive)
    assert client.stopping.is_set() and False not in waits


def test_a_new_master_sets_the_readable_offset_of_its_mode(make_group):
    group = make_group(2, role=Role.ASYNC_MASTER)
    master = group.start(1)
    master.promote()
    end = master.put(b"one", b"two")
    assert (master.store.readable_offset, master.store.confirmed_offset) == (end, 0)
    master.promote()  # a new epoch; nothing is appended in it yet
    assert master.store.readable_offset == end
    master.ha.set_sync(True)
    assert master.store.readable_offset == 0
    master.ha.set_sync(False)
    assert master.store.readable_offset == end


def test_at_ack_point_flushed_only_synced_bytes_are_reported(pair):
    group, master, slave = pair(ha={"ack_point": AckPoint.FLUSHED})
    master.store.hooks.on_append = master.ha.on_append
    outcome = master.put_confirmed(b"one", need=Need.SLAVE_DISKS)
    assert outcome == ("PUT_OK", "SYNC_DISK(1)")
    end = master.store.max_offset
    assert slave.store.flushed_offset >= end and master.store.flushed_offset >= end
    assert master.ha.can_confirm(flushed=True) is None
    del group


def test_bytes_that_another_thread_synced_are_reported_too(pair, monkeypatch):
    """The periodic flush may be quicker than the thread that syncs in order to report."""
    monkeypatch.setattr("hastore.ha.slave.slave_stream.RECEIVE_MS", 3_600_000)
    _, master, slave = pair(ha={"ack_point": AckPoint.FLUSHED})
    wait_beyond = slave.store.wait_beyond

    def overtaken(offset, timeout_s):
        end = wait_beyond(offset, timeout_s)
        slave.store.flush()
        return end

    monkeypatch.setattr(slave.store, "wait_beyond", overtaken)
    for number in range(20):
        end = master.put(b"%d" % number)
        wait_for(lambda end=end: master.ha.slaves()[0].ack_offset == end)


def test_a_master_at_ack_point_flushed_counts_only_its_own_synced_copy(pair):
    _, master, slave = pair(
        ha={"ack_point": AckPoint.FLUSHED},
        store={"flush_interval_ms": 60_000, "flush": Flush.ASYNC},
    )
    end = master.put(b"one")
    wait_for(lambda: slave.store.flushed_offset == end)
    wait_for(lambda: [one.ack_offset for one in master.ha.slaves()] == [end])
    time.sleep(0.1)
    assert master.store.flushed_offset < end and master.store.confirmed_offset < end
    master.store.flush()
    wait_for(lambda: master.store.confirmed_offset == end)


def test_a_put_for_the_slaves_disks_needs_such_slaves(pair):
    _, master, _ = pair()
    master.put_confirmed(b"one")
    assert master.ha.can_confirm(flushed=False) is None
    assert "ha.ack_point: flushed" in master.ha.can_confirm(flushed=True)


def test_heartbeats_keep_an_idle_link(pair):
    _, master, slave = pair()
    master.put_confirmed(b"one")

    def link_stays():
        wait_for(lambda: slave.linked and master.ha._streams)
        connection_id = master.ha._streams[0].connection_id
        time.sleep(2.0)  # longer than the housekeeping interval
        streams = [each.connection_id for each in master.ha._streams]
        return slave.linked and streams == [connection_id]

    # Without heartbeats it would never stay. A stalled machine ends the link too, hence the tries.
    assert any(link_stays() for _ in range(10))


def test_a_slave_leaves_a_silent_master(pair):
    _, master, slave = pair(ha={"housekeeping_interval_ms": 500, "heartbeat_interval_ms": 60_000})
    wait_for(lambda: slave.client.problem is not None and "silent" in slave.client.problem)
    wait_for(lambda: slave.linked)  # and it connects again
    assert master.put_confirmed(b"one")[0] == "PUT_OK"


def test_epochs_without_a_record_are_taken_over(pair):
    _, master, slave = pair()
    master.put_confirmed(b"one")
    for _ in range(3):
        master.promote()
    slave.client.drop_link()
    wait_for(lambda: slave.linked and slave.state.history == master.state.history)
    assert master.put_confirmed(b"two")[0] == "PUT_OK"
    in_step(master, slave)
    assert len(slave.state.history) == 4


def test_an_old_tail_is_archived_and_cut(make_group):
    group = make_group(3)
    one, two, three = (group.start(n) for n in (1, 2, 3))
    one.promote()
    two.follow()
    three.follow()
    wait_for(lambda: two.linked and three.linked)
    one.put_confirmed(b"shared")
    in_step(one, two, three)
    shared = one.store.max_offset
    for node in (two, three):
        node.unfollow()
    fill(one, shared + FILE_SIZE)  # nobody else has it
    one.member.step_down()
    one.ha.close_epoch("the test wants it")
    tail = one.bytes(shared)
    # Node 1 cannot be asked: its port is closed during the promotion.
    one.ha.acceptor.stop()
    two.promote()
    three.follow()
    two.put_confirmed(b"of epoch 2", b"more")
    one.follow()
    in_step(two, one, three)
    assert one.client.archived_bytes == len(tail)
    rescued = list((pathlib.Path(one.config.store.root) / "rescued").iterdir())
    assert [r.name for r in rescued] == [f"{one.state.history[0].epoch}-{shared}"]
    kept = b""
    for file in sorted(rescued[0].iterdir()):
        start = max(shared, int(file.name))
        kept += file.read_bytes()[start - int(file.name) :]
    assert kept[: len(tail)] == tail and not kept[len(tail) :].strip(b"\0")
    assert one.state.data.intent is None and not one.state.data.unclean


def test_a_cut_whose_last_write_failed_is_finished_before_anything_is_received(
    make_group, monkeypatch
):
    group = make_group(3)
    one, two, three = (group.start(n) for n in (1, 2, 3))
    one.promote()
    two.follow()
    three.follow()
    wait_for(lambda: two.linked and three.linked)
    one.put_confirmed(b"shared")
    in_step(one, two, three)
    for node in (two, three):
        node.unfollow()
    one.put(b"nobody else has it")
    one.member.step_down()
    one.ha.close_epoch("the test wants it")
    one.ha.acceptor.stop()
    two.promote()
    three.follow()
    two.put_confirmed(b"of epoch 2")
    save, failed = one.state.save, []

    def full(**changes):
        if "intent" in changes and changes["intent"] is None and not failed:
            failed.append(changes)
            raise OSError(errno.ENOSPC, "No space left on device")
        save(**changes)

    monkeypatch.setattr(one.state, "save", full)
    one.follow()
    in_step(two, one, three)
    assert failed and one.state.data.intent is None
    two.put_confirmed(b"acknowledged")
    in_step(two, one, three)
    end = one.store.max_offset
    one.stop()
    again = group.start(1)
    assert again.store.max_offset == end and b"acknowledged" in again.bytes()
    assert again.state.history == two.state.history


def test_confirmed_records_are_never_cut_without_accept_loss(make_group):
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    two.promote()
    two.put(b"of two")
    two.member.step_down()
    two.ha.close_epoch("x")
    two.ha.acceptor.stop()
    two.store.set_limits(confirmed=two.store.max_offset)  # a false confirmed offset
    one.promote()
    one.put(b"of one", b"of one")
    two.follow()
    wait_for(lambda: "--accept-loss" in (two.client.problem or ""))
    time.sleep(0.3)
    assert two.state.history[0].epoch & 0xFFFF == 2 and not two.linked
    assert b"of two" in two.bytes()


def test_confirmed_records_that_are_given_up_with_the_whole_log_are_told(make_group):
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    two.promote()
    two.put(b"of two", b"of two")
    two.member.step_down()
    two.ha.close_epoch("x")
    two.ha.acceptor.stop()
    two.store.set_limits(confirmed=two.store.max_offset)
    one.promote()
    one.put(b"of one")
    two.follow()
    wait_for(lambda: "--accept-loss" in (two.client.problem or ""))
    two.client.accept_loss = True  # hastore demote --accept-loss
    in_step(one, two)
    (cut,) = two.store.cuts.all
    assert (cut.messages, cut.start_offset) == (2, 0)


def test_accept_loss_that_was_not_needed_does_not_count_later(pair):
    """Another master may come in a year, and the group disagree with it."""
    _, master, slave = pair()
    master.put_confirmed(b"one")
    slave.client.accept_loss = True  # hastore demote --accept-loss, to be on the safe side
    slave.client.drop_link()
    wait_for(lambda: not slave.client.accept_loss, "the use of the option")
    wait_for(lambda: slave.linked)
    in_step(master, slave)


def test_a_slave_beyond_reach_sets_its_store_aside(make_group):
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    one.promote()
    two.follow()
    wait_for(lambda: two.linked)
    one.put_confirmed(b"early")
    in_step(one, two)
    early, number = two.bytes(), two.state.data.store_id
    two.unfollow()
    fill(one, 3 * FILE_SIZE + 1000)
    one.store.flush()  # else they would not count as expired
    before = retention.expired_files
    retention.expired_files = lambda *_: 2  # the two oldest files have expired
    try:
        assert one.store.retention.delete_expired(None) == 2
    finally:
        retention.expired_files = before
    assert one.store.min_offset == 2 * FILE_SIZE
    two.follow()
    in_step(one, two)
    assert two.store.min_offset == 2 * FILE_SIZE and two.state.data.store_id == number
    wait_for(lambda: not two.state.data.unclean)  # it was unclean until it had the whole log
    rescued = list((pathlib.Path(two.config.store.root) / "rescued").iterdir())
    assert len(rescued) == 1
    log = (rescued[0] / "commitlog" / f"{0:020d}").read_bytes()
    assert log[: len(early)] == early
    two.unfollow()
    two.stop()
    again = group.start(2)
    assert again.store.min_offset == 2 * FILE_SIZE
    again.follow()
    in_step(one, again)
    assert one.put_confirmed(b"late")[0] == "PUT_OK"


def brokers_log(group, number, *, removed):
    """Make the log of a broker that has stopped, from which it has `removed` files; its end."""
    config = group.config(number)
    record = build_record(
        "T", b"x" * 900, queue_id=0, properties=(), born_timestamp_ms=1, born_host=HOST
    )
    store = MessageStore(config.store, store_host=HOST)
    store.open()
    while store.max_offset < 3 * FILE_SIZE:
        store.put_encoded([record * 5])
    end = store.max_offset
    store.close()
    root = pathlib.Path(config.store.root)
    shutil.rmtree(root / "hastore")
    for file in sorted((root / "commitlog").iterdir())[:removed]:
        file.unlink()
    return end


@pytest.mark.parametrize("removed", [0, 1])
def test_a_slave_copies_a_log_that_a_broker_has_begun(make_group, removed):
    group = make_group(2)
    end = brokers_log(group, 1, removed=removed)
    one, two = group.start(1), group.start(2)
    assert (one.store.min_offset, one.store.max_offset) == (removed * FILE_SIZE, end)
    one.promote()
    assert [entry.epoch for entry in one.state.history] == [0, one.member.open_epoch]
    half = two.store

    def until_the_middle(take):  # of the broker's bytes
        def leave(offset, what):
            if offset > end - 2 * FILE_SIZE:
                raise StoreError("the test ends the link")
            return take(offset, what)

        return leave

    half.append_replica = until_the_middle(half.append_replica)
    half.replica_range = until_the_middle(half.replica_range)  # the kernel's way, or both
    two.follow()
    wait_for(lambda: "the test ends the link" in (two.client.problem or ""))
    got, aside = half.max_offset, two.state.data.aside
    assert removed * FILE_SIZE < got < end
    del half.append_replica, half.replica_range
    in_step(one, two)
    assert two.state.data.aside == aside == removed  # what it had got was not copied again
    assert one.put_confirmed(b"late")[0] == "PUT_OK"


def test_a_slave_does_not_begin_anew_for_ever(make_group, monkeypatch):
    """As with a master of an earlier version, whose history lacks the bytes of a broker."""
    group = make_group(2)
    brokers_log(group, 1, removed=1)
    one, two = group.start(1), group.start(2)
    with monkeypatch.context() as earlier:
        earlier.setattr(promoter, "opened_history", lambda history, _, entry: (*history, entry))
        one.promote()
    two.follow()
    wait_for(lambda: "run `hastore promote` on node 1" in (two.client.problem or ""))
    time.sleep(0.3)
    assert two.state.data.aside == 1
    one.promote()
    in_step(one, two)


@pytest.mark.parametrize("free", [0, FILE_SIZE])  # too few for the files of another log
def test_a_resync_without_room_changes_nothing(make_group, monkeypatch, free):
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    two.promote()
    two.put(b"of two")
    two.member.step_down()
    two.ha.acceptor.stop()
    one.promote()
    one.put(b"of one")
    mine = two.bytes()
    monkeypatch.setattr(two.store, "free_bytes", lambda: free)
    two.follow()
    wait_for(lambda: "make room" in (two.client.no_room or ""))
    assert two.client.problem == two.client.no_room and two.config.store.root in two.client.problem
    assert two.bytes() == mine and not two.state.data.unclean and not two.state.data.aside
    monkeypatch.undo()
    two.client.drop_link()
    in_step_when_confirmed(one, two)
    assert two.client.no_room is None


def in_step_when_confirmed(one, two):
    wait_for(lambda: two.linked)
    assert one.put_confirmed(b"again")[0] == "PUT_OK"
    in_step(one, two)


def test_an_unclean_node_is_clean_once_it_has_reached_the_masters_end(make_group):
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    one.promote()
    fill(one, FILE_SIZE)
    two.state.save(unclean=True)
    two.follow()
    in_step(one, two)
    wait_for(lambda: not two.state.data.unclean)


def test_an_unclean_node_that_has_it_all_is_clean_at_once(pair):
    _, master, slave = pair()
    master.put_confirmed(b"one")
    slave.unfollow()
    slave.state.save(unclean=True)
    slave.follow()
    wait_for(lambda: not slave.state.data.unclean)


def test_a_promise_drops_the_link_and_nothing_more_is_taken(pair):
    _, master, slave = pair()
    master.put_confirmed(b"one")
    end = slave.store.max_offset
    slave.client.wake()  # it looks again at once, and the master is refused
    hello = master.member.hello(Purpose.PROMISE)
    forged = msgspec.structs.replace(hello, promised_epoch=90 << 16 | 1, acks=1, nodes=(1, 2))
    call(slave.address, forged, None, SYSTEM_CLOCK, 2000).close()
    assert slave.state.data.promised_epoch == 90 << 16 | 1
    # The master meets that epoch as soon as the slave says HELLO.
    wait_for(lambda: not master.member.open_epoch)
    wait_for(lambda: master.superseded)  # reported right after
    assert master.superseded == [90 << 16 | 1]
    assert slave.store.max_offset == end and not slave.linked


@pytest.mark.parametrize("host", ["a" * 64 + ".x", "a..b"])
def test_a_name_that_no_host_can_have_is_a_failure_like_others(pair, host):
    _, _, slave = pair()
    hello = slave.member.hello(Purpose.SURVEY)
    with pytest.raises(OSError, match="no name of a host"):
        call(f"{host}:1", hello, None, SYSTEM_CLOCK, 2000)
    follower = ClassicHAClient(slave.member, f"{host}:1")
    follower.start()
    wait_for(lambda: "no name of a host" in (follower.problem or ""))
    assert follower.stop(60) and follower.failure is None


def test_a_slave_of_the_same_number_with_another_store_is_refused(pair):
    group, master, slave = pair()
    master.put_confirmed(b"one")
    slave.stop()
    root = pathlib.Path(group.root / "node2")
    root.rename(group.root / "lost")
    again = group.start(2)
    again.follow()
    wait_for(lambda: "another store" in (again.client.problem or ""))
    assert again.store.max_offset == 0


def test_a_full_disk_pauses_the_slave_and_keeps_the_link(pair, monkeypatch):
    """And the slave does not count as in sync: a put that waits for it would wait in vain."""
    _, master, slave = pair()
    master.put_confirmed(b"one")
    connection_id = master.ha._streams[0].connection_id
    append, full = slave.store.append_replica, [True]

    def refuse(offset, data):
        if full[0]:
            raise StoreFullError("no room")
        return append(offset, data)

    monkeypatch.setattr(slave.store, "append_replica", refuse)
    end = master.put(b"two")
    wait_for(lambda: master.ha.slaves()[0].state == "stalled", "the master's notice")
    assert not master.ha.slaves()[0].in_sync
    assert "0 of 1 slaves in sync" in master.ha.can_confirm(flushed=False)
    time.sleep(2.0)
    assert slave.linked and master.ha._streams[0].connection_id == connection_id
    assert slave.store.max_offset < end
    full[0] = False
    in_step(master, slave)
    wait_for(lambda: master.ha.slaves()[0].in_sync)
    assert master.ha.can_confirm(flushed=False) is None


def test_a_slave_whose_store_is_closed_follows_nobody(pair, monkeypatch):
    """It was in sync as long as nothing was put, and could take nothing."""
    _, master, slave = pair()
    master.put_confirmed(b"one")
    assert master.ha.can_confirm(flushed=False) is None
    broken = ["a sync of bytes [0, 100) failed"]
    closed = property(lambda store: broken[0] if store is slave.store else None)
    monkeypatch.setattr(type(slave.store), "broken_reason", closed)
    wait_for(lambda: master.ha.slaves() == [], "the end of the link")
    wait_for(lambda: slave.client.problem == f"the store is closed: {broken[0]}")
    assert "0 of 1 slaves in sync" in master.ha.can_confirm(flushed=False)
    assert slave.client.known_master == (master.member.open_epoch, 1) and not slave.linked
    broken[0] = None
    in_step(master, slave)


def test_a_splice_that_fails_half_way_leaves_nothing_and_starts_again(pair, monkeypatch):
    monkeypatch.setattr(slave_stream, "SPLICE_BYTES_MIN", 1_000)
    _, master, slave = pair()
    master.put_confirmed(b"one")
    drain, seen = slave_stream._Pipe.drain, []

    def half(pipe, target, position, size):
        if seen:
            return drain(pipe, target, position, size)
        drain(pipe, target, position, size - 100)
        seen.append(os.pread(target, size, position))
        raise OSError(errno.ENOSPC, "no room")

    def failed(offset, size, failure):
        cause = clear(offset, size, failure)
        with open(slave.store.file_range(0, offset).keep.path, "rb") as file:
            seen.append(file.read()[offset:])
        return cause

    monkeypatch.setattr(slave_stream._Pipe, "drain", half)
    clear, slave.store.replica_failed = slave.store.replica_failed, failed
    # Only a frame after a long one is spliced; a heartbeat may come between the two.
    wait_for(lambda: (master.put(os.urandom(20_000)), seen)[1], "a splice")
    in_step(master, slave)
    assert any(seen[0]) and not any(seen[1])
    assert slave.store.broken_reason is None


def test_a_slave_stays_exact_while_links_break(pair):
    _, master, slave = pair()
    for n in range(30):
        fill(master, master.store.max_offset + 6000, os.urandom(700))
        if n % 3 == 0:
            slave.client.drop_link()
        elif n % 3 == 1:
            for connection in master.ha._streams:
                connection.close("the test")
    assert master.put_confirmed(b"last")[0] == "PUT_OK"
    in_step(master, slave)


def test_a_stream_that_starts_elsewhere_is_left(pair, monkeypatch):
    _, master, slave = pair()
    master.put_confirmed(b"one")
    monkeypatch.setattr(ha_service, "answer_follow", lambda view, hello: StreamFrom(0))
    slave.client.drop_link()
    wait_for(lambda: "stream starts at 0" in (slave.client.problem or ""))
    monkeypatch.undo()
    wait_for(lambda: slave.linked)
    in_step(master, slave)


def test_an_answer_without_its_entry_writes_nothing_beyond_the_start(make_group):
    """An epoch's entry is durable before any of its bytes is written."""
    group = make_group(2)
    one, two = group.start(1), group.start(2)
    one.promote()
    one.put(b"one")
    one.promote()
    one.put(b"two")
    start = one.state.history[-1].start
    seen = []
    take, append = two.state.take_entries, two.store.append_replica

    def note_entries(entries: list[EpochEntry], own: History) -> None:
        take(entries, own)
        seen.extend(("entry", entry.start) for entry in entries)

    def note_bytes(offset, data):
        seen.append(("bytes", offset))
        return append(offset, data)

    two.state.take_entries, two.store.append_replica = note_entries, note_bytes
    two.follow()
    in_step(one, two)
    assert seen[0] == ("entry", 0)
    assert seen.index(("entry", start)) < seen.index(("bytes", start))
