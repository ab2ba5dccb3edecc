"""DLedgerMmapFileStore: puts, copies, reads and restarts, against the format read by hand."""

import errno
import random
import threading

import pytest

from hastore.config.model import RetentionConfig
from hastore.dledger.core.events import HardState, OwnEntry, TakenEntries
from hastore.dledger.driver.carry_out import DiskRoom
from hastore.errors import (
    NoLogFileError,
    Status,
    StoreError,
    StoreFullError,
    SyncFailedError,
    UsageError,
)
from hastore.fs.filesystem import REAL
from hastore.protocol.dledger import AppendRequest, MemberSet
from hastore.record.log_format import build_own
from hastore.store.log.entry_index import EntryIndex
from hastore.store.state.entry_state import EntryState
from tests.dledger.store.kit import (
    copy_entries,
    data_of,
    folder_bytes,
    index_of,
    lists_of,
    make,
    no_op,
    opened,
    put,
    walk,
)
from tests.ha.nodes import wait_for
from tests.store.kit import FILE_SIZE, HOST, bodies, crash_copy, message, scribble
from tests.store.kit import opened as opened_classic
from tests.store.kit import put as put_classic


def test_puts_make_the_entries_and_the_index_that_the_format_says(tmp_path):
    with opened(tmp_path) as store:
        no_op(store, 1)
        offsets = []
        for number in range(0, 600, 5):
            offsets += put(store, 1, *(message(number + each) for each in range(5)))
        store.append_own(OwnEntry(store.end_index + 1, 1, MemberSet((1, 2, 3), (4,), (3,))))
        offsets += put(store, 2, message(600, size=5000))
        store.flush()
        heads, units = walk(data_of(store), FILE_SIZE)
        assert [head[2] for head in heads] == list(range(603))
        assert [head[3] for head in heads] == [1] * 602 + [2]
        assert offsets == [head[4] + 48 for head in [*heads[1:601], heads[602]]]
        assert index_of(store)[: len(units)] == units and not any(index_of(store)[len(units) :])
        assert store.log_state().terms == ((1, 0), (2, 602))
        assert lists_of(store, 0, 602) == [(601, MemberSet((1, 2, 3), (4,), (3,)))]
        assert len(bodies(store.messages)) == 601
        for index, head in enumerate(heads):
            assert (store.position(index), store.term_of(index)) == (head[4], head[3])
            assert store.end_position(index) == head[4] + head[1]
            assert store.index_at(head[4] + head[1]) == index
            assert store.index_at(head[4] + head[1] - 1) == index - 1
        assert store.epochs() == ((1, 0), (2, heads[602][4]))


def test_each_record_is_the_one_of_a_plain_log_but_for_its_offset(tmp_path):
    records = [message(number, queue_id=number % 4) for number in range(50)]
    with opened(tmp_path / "entries") as store, opened_classic(tmp_path / "plain") as plain:
        ours, theirs = put(store, 1, *records), put_classic(plain, *records)
        for offset, other in zip(ours, theirs, strict=True):
            mine = store.messages.reader.record_at(offset)
            its = plain.reader.record_at(other.offset)
            assert mine.physical_offset == offset
            for name in ("body", "topic", "queue_id", "queue_offset", "properties", "body_crc"):
                assert getattr(mine, name) == getattr(its, name)


def test_a_copy_on_another_node_has_the_same_bytes(tmp_path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with opened(tmp_path / "leader") as leader, opened(tmp_path / "copy", node=2) as follower:
        for term in range(1, 5):
            no_op(leader, term)
            for _ in range(chance.randrange(1, 40)):
                sizes = [chance.choice((0, 10, 900, 9000)) for _ in range(chance.randrange(1, 9))]
                number = chance.randrange(10**6)
                put(leader, term, b"".join(message(number, size=size) for size in sizes))
            copy_entries(leader, follower, max_bytes=chance.choice((100, 3000, 1 << 20)))
        for store in (leader, follower):
            assert store.flush() == store.persisted_index == store.end_index
        assert data_of(leader) == data_of(follower)
        assert index_of(leader) == index_of(follower)
        assert follower.log_state() == leader.log_state()
        assert bodies(follower.messages) == bodies(leader.messages)


@pytest.mark.parametrize("clean", [True, False])
def test_a_restart_finds_everything_again(tmp_path, clean):
    store = make(tmp_path / "store")
    store.open()
    try:
        assert (store.hard_state, store.remembers) == (HardState(0, None, False), False)
        store.save_hard_state(HardState(7, 3), remembers=True)
        for term in (7, 9):
            no_op(store, term)
            put(store, term, *(message(number) for number in range(300)))
        store.commit(400)
        state, root = store.log_state(), tmp_path / "store"
        if not clean:
            root = crash_copy(store.messages, tmp_path / "copy")
    finally:
        store.close()
    with opened(root) as again:
        assert again.log_state() == state and again.persisted_index == again.end_index
        assert again.committed_index == 400
        # The log proves term 9, so `currterm` is an older one: votes may be forgotten.
        assert again.hard_state == HardState(9, None, False) and not again.remembers
        assert len(bodies(again.messages)) == 600
        no_op(again, 10)
        put(again, 10, message(1))
        heads, units = walk(data_of(again), FILE_SIZE)
        assert len(heads) == 604
        again.flush()
        assert index_of(again)[: len(units)] == units


def test_a_truncated_tail_is_archived_and_does_not_come_back(tmp_path):
    with opened(tmp_path / "store") as store:
        put(store, 1, *(message(number) for number in range(700)))
        before, end = data_of(store), store.end_position(store.end_index)
        store.commit(99)
        with pytest.raises(UsageError, match="committed"):
            store.truncate(99)
        cut = store.end_position(299)
        assert store.truncate(300) == end - cut
        assert store.log_state().end_index == 299 and store.end_position(299) == cut
        after = data_of(store)
        assert after[:cut] == before[:cut] and not any(after[cut:])
        assert len(bodies(store.messages)) == 300
        root = crash_copy(store.messages, tmp_path / "copy")
        no_op(store, 2)
        put(store, 2, message(5))
    with opened(root) as again:
        assert again.end_index == 299 and again.end_position(299) == cut
        assert again.messages.max_offset == cut


def test_damage_does_not_let_a_cut_take_what_is_committed(tmp_path):
    with opened(tmp_path / "store") as store:
        put(store, 1, *(message(number) for number in range(20)))
        store.commit(10)
        pos, end = store.position(11), store.end_position(19)
        for bad in (store.position(3) + 4, pos + 48 + 4):
            scribble(f"{store.messages.directory}/data/{0:020}", bad, b"????")
        assert store.truncate(11) == end - pos
        assert (store.end_index, store.committed_index, store.messages.max_offset) == (10, 10, pos)
        [cut] = store.messages.cuts.all
        assert (cut.start_offset, cut.messages, cut.all_counted) == (pos, 0, False)


@pytest.mark.parametrize("asked", range(1, 6))
@pytest.mark.parametrize("what", ["cut", "retention"])
def test_what_is_durable_is_told_while_the_log_is_cut_or_removed(
    tmp_path, monkeypatch, what, asked
):
    """The thread that syncs holds no lock of the log then; an error would end it, and the node."""
    told, unit, calls = [], EntryIndex.unit, []
    with opened(tmp_path, retention=RetentionConfig(max_size_bytes=FILE_SIZE)) as store:
        put(store, 1, *(message(number, size=1000) for number in range(200)))
        store.flush()
        put(store, 1, *(message(number, size=1000) for number in range(200, 400)))
        store.commit(150)
        store.on_persisted = told.append
        assert store.messages.wait_dispatched(store.messages.max_offset, 60)
        offset = store.end_position(250)

        def change():
            if what == "cut":
                store.truncate(200)
            else:
                assert store.messages.retention.delete_expired(store.position(150)) == 2

        def unit_of(index, number):
            calls.append(number)
            if len(calls) == asked:
                thread = threading.Thread(target=change)
                thread.start()
                thread.join(60)
            return unit(index, number)

        monkeypatch.setattr(EntryIndex, "unit", unit_of)
        store.messages.hooks.on_flushed(offset)
        assert told == [199 if what == "cut" else 250]


@pytest.mark.parametrize("change", ["cut", "install", "retention"])
def test_the_history_of_terms_is_told_while_the_log_changes(tmp_path, monkeypatch, change):
    """A pull asks for it before and after it reads; an error would be taken for the client's."""
    with opened(tmp_path) as store:
        for term in (1, 2, 3):
            no_op(store, term)
            put(store, term, *(message(each, size=3_000) for each in range(40)))
        store.flush()
        store.commit(store.log_state().terms[2][1] - 1)
        before, index = store.epochs(), store.messages.entries
        changes = {
            "cut": lambda: store.truncate(index.terms[2][1]),
            "install": lambda: store.install(1_000, 8 * FILE_SIZE, 3),
            "retention": lambda: index.begin_at(FILE_SIZE),
        }
        index.terms = (*index.terms,)  # they were not looked up yet
        real, calls, due = index.unit, [], [changes[change]]

        def unit(number):
            calls.append(number)
            if due:
                due.pop()()
            return real(number)

        monkeypatch.setattr(index, "unit", unit)
        found = store.epochs()
        assert [term for term, _ in found] == [term for term, _ in index.terms]
        assert found == {"cut": before[:2], "install": (), "retention": found}[change]
        assert change != "retention" or found[0] == (index.terms[0][0], FILE_SIZE)
        del calls[:]
        assert store.epochs() == found and not calls, "a pull reads nothing for it"


def test_an_installed_log_begins_where_the_leader_says(tmp_path):
    with opened(tmp_path / "leader") as leader, opened(tmp_path / "copy") as follower:
        put(leader, 3, *(message(number) for number in range(700)))
        put(follower, 1, *(message(number) for number in range(9)))
        follower.commit(5)
        pos, end = follower.position(6), follower.messages.max_offset
        tail = data_of(follower)[pos:end]
        first = next(index for index in range(700) if leader.position(index) == FILE_SIZE)
        folder = follower.install(first, FILE_SIZE, 3)
        assert (follower.begin_index, follower.end_index) == (first, first - 1)
        assert follower.end_term == 3
        copy_entries(leader, follower)
        assert data_of(follower) == data_of(leader)[FILE_SIZE:]
        assert len(bodies(follower.messages)) == 700 - first
        state = follower.log_state()
    assert folder == f"{tmp_path}/copy/rescued/1-{pos}"
    assert [path.name for path in (tmp_path / "copy" / "rescued").iterdir()] == [f"1-{pos}"]
    assert (tmp_path / "copy" / "rescued" / f"1-{pos}" / f"{0:020}").read_bytes()[pos:] == tail
    with opened(tmp_path / "copy") as again:
        assert again.log_state() == state and again.end_index == 699


def test_messages_that_a_truncation_or_an_install_archives_are_told_until_they_are_dismissed(
    tmp_path,
):
    with opened(tmp_path / "store") as store:
        put(store, 1, *(message(number) for number in range(9)))
        store.commit(5)
        begin, end = store.position(7), store.messages.max_offset
        store.truncate(7)
        no_op(store, 2)  # an entry of the group's own is no message
        put(store, 2, message(9))
        kept = store.position(6)
        folder = store.install(1000, 4 * FILE_SIZE, 2)
        truncated, installed = store.messages.cuts.all
        assert (truncated.messages, truncated.folder) == (2, f"1-{begin}")
        assert (truncated.start_offset, truncated.end_offset) == (begin, end)
        assert (installed.messages, installed.start_offset) == (2, kept)
        rescued = f"{tmp_path}/store/rescued"
        assert f"{rescued}/{installed.folder}" == folder
        assert store.messages.cuts.problems() == []
        assert store.messages.cuts.notes()[0] == (
            "2 messages were cut from this log and may be nowhere else (as far as this node knows "
            f"no majority had them, so no put was acknowledged): bytes {begin} to {end}, in "
            f"{rescued}/1-{begin}; look at them (`hastore log dump --store {rescued}/1-{begin} "
            "--body`), send again what is missing (`hastore rescued resend -c FILE --cut 1`), "
            "then run `hastore rescued dismiss -c FILE --cut 1` on this node"
        )
        root = crash_copy(store.messages, tmp_path / "copy")
    with opened(root) as again:
        assert again.messages.cuts.all == (truncated, installed)


def test_an_install_keeps_nothing_of_what_is_committed_and_needs_no_room_for_it(
    tmp_path, monkeypatch
):
    with opened(tmp_path) as store:
        for round_number in range(1, 6):
            put(store, round_number, *(message(number) for number in range(100)))
            store.flush()
            store.commit(store.end_index)
            monkeypatch.setattr(type(REAL), "free_bytes", lambda self, path: 0)
            begin = (store.messages.max_offset // FILE_SIZE + 2) * FILE_SIZE
            assert store.install(1000 * round_number, begin, round_number) is None
            monkeypatch.undo()
            assert store.end_index == 1000 * round_number - 1
        assert not (tmp_path / "rescued").exists() and store.messages.rescued.bytes == 0
        put(store, 9, message(1))
    assert list((tmp_path / "hastore/dropped").iterdir()) == []


def test_an_install_without_room_for_what_may_be_the_only_copy_names_what_it_needs(
    tmp_path, monkeypatch
):
    with opened(tmp_path) as store:
        put(store, 1, *(message(number) for number in range(9)))
        store.commit(5)
        size = store.messages.max_offset - store.position(6)
        room = DiskRoom(store)
        monkeypatch.setattr(type(REAL), "free_bytes", lambda self, path: size - 1)
        with pytest.raises(StoreFullError, match=rf"/1-\d+: no room for {size} bytes") as full:
            store.install(1000, 4 * FILE_SIZE, 1)
        assert (store.begin_index, store.end_index) == (0, 8), "nothing was changed"
        assert room.note(full.value) and not room.recovered()
        assert f"free {size} bytes on its file system" in room.problem
        monkeypatch.setattr(type(REAL), "free_bytes", lambda self, path: size + (1 << 16))
        assert room.recovered() and room.problem is None
        assert store.install(1000, 4 * FILE_SIZE, 1) is not None


def test_the_reason_of_a_missing_log_file_is_not_always_a_full_disk(tmp_path):
    with opened(tmp_path) as store:
        room = DiskRoom(store)
        assert room.note(NoLogFileError("the disk does not answer")) and room.full
        assert room.problem == "the next log file cannot be made: the disk does not answer"
        assert room.recovered() and room.problem is None
        assert room.note(StoreFullError("no room"))
        assert room.problem == "the disk is full: no room"


def test_a_replay_that_damage_has_stopped_does_not_keep_the_disk_full(tmp_path):
    """Such a node still copies the log, and counts for its leader's commits."""
    with opened(tmp_path) as store:
        put(store, 1, message(1))
        replay = store.messages.replay
        assert replay.wait_dispatched(store.messages.max_offset, 60)
        room = DiskRoom(store)
        assert room.note(StoreFullError("no room"))
        with replay.paused():
            put(store, 1, message(2))
            path = f"{store.messages.directory}/data/{0:020}"
            scribble(path, store.position(1) + 48 + 4, b"????")
        wait_for(lambda: replay.blocked_reason is not None)
        assert store.messages.problems and room.recovered() and not room.full


def test_queues_that_cannot_be_synced_do_not_keep_the_disk_full(tmp_path, monkeypatch):
    """They need a restart, which nobody may have time for: the node goes on with the log."""

    def fail():
        raise SyncFailedError("the disk is bad")

    store = make(tmp_path)
    store.open()
    messages = store.messages
    put(store, 1, message(1))
    assert messages.replay.wait_dispatched(messages.max_offset, 60)
    room = DiskRoom(store)
    assert room.note(StoreFullError("no room"))
    with monkeypatch.context() as patch:
        patch.setattr(messages.queues, "flush", fail)
        wait_for(lambda: messages._housekeeping.failure_reason is not None)
    problems, recovered = messages.problems, room.recovered()
    with pytest.raises(StoreError, match="did not stop cleanly: queues and index are not synced"):
        store.close()
    assert "restart the node" in problems[0] and recovered and not room.full


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), StoreFullError("no room")])
def test_a_replay_that_lacks_room_keeps_the_disk_full(tmp_path, monkeypatch, failure):
    def fail(_batch):
        raise failure

    with opened(tmp_path) as store:
        room = DiskRoom(store)
        assert room.note(StoreFullError("no room"))
        with monkeypatch.context() as patch:
            patch.setattr(store.messages.queues, "dispatch", fail)
            put(store, 1, message(1))
            wait_for(lambda: store.messages.replay.blocked_reason is not None)
            assert not room.recovered()
        assert store.messages.replay.wait_dispatched(store.messages.max_offset, 60)
        wait_for(room.recovered)


def test_an_install_that_an_earlier_version_began_keeps_the_whole_log(tmp_path):
    with opened(tmp_path) as store:
        put(store, 1, *(message(number) for number in range(9)))
        store.commit(8)
        data = data_of(store)
    state = EntryState(REAL, str(tmp_path))
    state.load()
    state.save(install=(500, 4 * FILE_SIZE, 1))
    with opened(tmp_path) as store:
        assert (store.begin_index, store.end_index) == (500, 499)
    (kept,) = (tmp_path / "rescued").iterdir()
    assert folder_bytes(str(kept / "dledger-n1" / "data")) == data


def test_wrong_calls_change_nothing(tmp_path):
    with opened(tmp_path) as store:
        put(store, 4, message(1))
        for call in (
            lambda: store.put(3, [message(2)]),
            lambda: store.append_own(OwnEntry(5, 4)),
            lambda: store.position(1),
            lambda: store.read(1, 100),
            lambda: store.commit(1),
            lambda: store.save_hard_state(HardState(3, None)),
            lambda: store.install(5, 17, 4),
        ):
            with pytest.raises(UsageError):
                call()
        own = build_own(MemberSet((9,)), physical_offset=0, now_ms=0, host=HOST)
        forged = store.put(4, [own])
        assert forged.count == 0 and "reserved" in forged.results[0][0].reason
        large = store.put(4, [message(2, size=FILE_SIZE)])
        assert large.count == 0 and large.results[0][0].status is Status.MESSAGE_ILLEGAL
        assert store.end_index == 0 and store.log_state().terms == ((4, 0),)


def test_the_hook_is_told_what_is_on_the_disk(tmp_path):
    with opened(tmp_path) as store:
        seen = []
        store.on_persisted = seen.append
        put(store, 1, message(1), message(2))
        assert store.persisted_index == -1 and store.flush() == 1 and seen == [1]


def test_entries_that_are_there_already_are_skipped(tmp_path):
    with opened(tmp_path / "leader") as leader, opened(tmp_path / "copy") as follower:
        put(leader, 1, *(message(number) for number in range(20)))
        copy_entries(leader, follower)
        put(leader, 1, *(message(number) for number in range(5)))
        found = leader.read(10, 1 << 20)
        request = AppendRequest(1, 9, 1, found.pos, found.size, found.runs, -1)
        with leader.messages.view(found.pos, found.size) as view:
            follower.append_taken(request, bytes(view), TakenEntries(10, 24))
        assert data_of(follower) == data_of(leader) and follower.end_index == 24
