"""The cut: archived first, repeatable after a crash at any effect, confirmed records kept."""

import itertools
import random
import threading

import pytest

from hastore.config.model import RetentionConfig
from hastore.errors import GroupDisagrees, ReplicationError
from hastore.fs.filesystem import REAL
from hastore.ha.node.node_state import CutIntent, NodeState
from hastore.ha.replica.rewind import cut_back, finish_cut
from hastore.ha.rules.epochs import EpochEntry
from hastore.store.message_store import MessageStore
from tests.ha.simulation import Crash, MemoryFiles, MemoryLog, size_of
from tests.store.faulty import FaultyFileSystem
from tests.store.kit import FILE_SIZE, HOST, config, log_file, message, opened, put, scribble

E1, E2 = 1 << 16 | 1, 2 << 16 | 2
VALUES = (2, 1, 5, 3, 8)  # records of 3, 2, 3, 1 and 3 bytes: [0, 3, 5, 8, 9, 12)
HISTORY = (EpochEntry(E1, 0, 1, (1, 2)), EpochEntry(E2, 5, 1, (1, 2)))


class Disk:
    """A node's log and state; the process can die at any effect."""

    def __init__(self, confirmed=0):
        self.steps = None
        self.archived = []
        self.files = MemoryFiles(self.effect)
        self.store = MemoryLog(self.effect, random.Random(7))
        for value in VALUES:
            self.store.append_replica(self.store.max_offset, bytes([value]) * size_of(value))
        self.store.flush()
        self.store.set_limits(confirmed=confirmed, readable=confirmed)
        self.archive, self.store.archive = self.store.archive, self.note_archive
        self.state = self.load()
        self.state.begin_boot("written", alone=False, log_end=self.store.max_offset)
        self.state.save(history=HISTORY)

    def note_archive(self, offset, name):
        self.archived.append((offset, name))
        return self.archive(offset, name)

    def effect(self):
        if self.steps is not None:
            if self.steps == 0:
                raise Crash(1)
            self.steps -= 1

    def load(self):
        state = NodeState(self.files, "/n")
        state.load(1, "c", "g")
        return state

    def restart(self):
        self.steps = None
        self.store.recover()
        self.state = self.load()
        finish_cut(self.store, self.state)
        self.state.begin_boot("written", alone=False, log_end=self.store.max_offset)

    def cut(self, offset, entries, *, accept_loss=False):
        return cut_back(
            self.store, self.state, offset, entries, accept_loss=accept_loss, why="a test"
        )


def test_a_cut_archives_then_cuts_bytes_and_history():
    disk = Disk()
    assert disk.cut(5, 1) == 7
    assert disk.archived == [(5, f"{E2}-5")]
    assert bytes(disk.store.data) == b"\2\2\2\1\1"
    assert disk.load().data.history == HISTORY[:1] and disk.load().data.intent is None


def test_a_crash_at_any_effect_is_finished_at_the_next_start():
    for steps in itertools.count():
        disk = Disk()
        disk.steps = steps
        try:
            disk.cut(5, 1)
        except Crash:
            began = disk.load().data.intent is not None
            disk.restart()
            cut = disk.store.max_offset == 5
            # Either nothing is cut, or everything: no half cut log remains.
            assert cut or not began
            assert disk.store.max_offset in (5, 12)
            assert disk.state.history == (HISTORY[:1] if cut else HISTORY)
            assert disk.state.data.intent is None
            assert disk.store.confirmed_offset <= disk.store.max_offset
            assert disk.archived or not cut
            continue
        break
    assert steps >= 7  # the process died once at each of these effects


def test_a_crash_while_the_cut_is_repeated_is_repeated_too():
    for steps in range(5):
        disk = Disk()
        disk.state.save(intent=CutIntent(5, 1))
        disk.steps = steps
        with pytest.raises(Crash):
            finish_cut(disk.store, disk.load())
        disk.restart()
        assert disk.store.max_offset == 5 and disk.state.history == HISTORY[:1]


def test_confirmed_records_are_kept_and_the_way_on_is_named():
    disk = Disk(confirmed=8)
    with pytest.raises(GroupDisagrees, match="--accept-loss"):
        disk.cut(5, 1)
    assert disk.store.max_offset == 12 and disk.state.history == HISTORY
    assert disk.state.data.intent is None
    assert disk.cut(5, 1, accept_loss=True) == 7
    assert disk.store.confirmed_offset == 5


@pytest.mark.parametrize(("confirmed", "kept"), [(5, False), (6, False), (7, False), (8, True)])
def test_a_record_is_protected_when_its_end_is_confirmed(confirmed, kept):
    disk = Disk(confirmed=confirmed)
    if kept:
        with pytest.raises(GroupDisagrees):
            disk.cut(5, 1)
    else:
        disk.cut(5, 1)
        assert disk.store.confirmed_offset == 5


def test_a_cut_inside_a_record_protects_the_records_after_it():
    with pytest.raises(GroupDisagrees):
        Disk(confirmed=12).cut(6, 2)


def test_a_partial_record_goes_without_asking():
    disk = Disk(confirmed=12)
    disk.store.append_replica(12, b"\x0b")  # of 3 bytes
    disk.store.set_limits(confirmed=13)
    disk.cut(disk.store.whole_offset, 2)
    assert disk.store.max_offset == 12 == disk.store.confirmed_offset


@pytest.mark.parametrize(("offset", "entries"), [(-1, 0), (13, 2), (5, 3), (5, -1)])
def test_a_place_that_the_log_does_not_have_is_refused(offset, entries):
    disk = Disk()
    with pytest.raises(ReplicationError):
        disk.cut(offset, entries)
    assert disk.store.max_offset == 12 and disk.load().data.intent is None


def test_a_cut_of_the_history_alone():
    disk = Disk()
    assert disk.cut(12, 1) == 0
    assert not disk.archived and disk.store.max_offset == 12
    assert disk.load().data.history == HISTORY[:1]


def test_without_an_intent_nothing_is_finished():
    disk = Disk()
    finish_cut(disk.store, disk.state)
    assert disk.store.max_offset == 12 and disk.state.history == HISTORY


def test_damage_does_not_lead_a_cut_back_into_what_is_confirmed(tmp_path):
    with opened(tmp_path) as store:
        offsets = [put(store, message(n, size=1000))[0].offset for n in range(20)]
        assert store.wait_dispatched(store.max_offset, 60)
        store.set_limits(confirmed=offsets[15])
        state = NodeState(REAL, str(tmp_path))
        state.load(1, "c", "g")
        state.save(history=(EpochEntry(E1, 0, 1, (1, 2)),))
        end, whole = store.max_offset, log_file(tmp_path)
        for bad in (offsets[3], offsets[15]):  # sizes lead from the one to the other
            scribble(whole, bad + 4, b"????")
        with pytest.raises(GroupDisagrees, match=f"damaged at {offsets[3]}.*log repair"):
            cut_back(store, state, offsets[15], 1, accept_loss=False, why="a test")
        assert store.max_offset == end and state.data.intent is None
        scribble(whole, offsets[3] + 4, message(3, size=1000)[4:8])  # repaired
        cut_back(store, state, offsets[15], 1, accept_loss=False, why="a test")
        assert store.max_offset == offsets[15]


def damaged_store(store, root):
    """A log of 20 records of two epochs, of which 15 are confirmed; 3 has rotted, and so has 15."""
    offsets = [put(store, message(n, size=1000))[0].offset for n in range(20)]
    assert store.wait_dispatched(store.max_offset, 60)
    store.set_limits(confirmed=offsets[15])
    state = NodeState(REAL, str(root))
    state.load(1, "c", "g")
    state.save(history=(EpochEntry(E1, 0, 1, (1, 2)), EpochEntry(E2, offsets[10], 1, (1, 2))))
    for bad in (offsets[3], offsets[15]):
        scribble(log_file(root), bad + 4, b"????")
    return offsets, state


def test_a_record_that_comes_damaged_goes_and_what_is_acknowledged_before_it_stays(tmp_path):
    with opened(tmp_path) as store:
        offsets, state = damaged_store(store, tmp_path)
        store.set_limits(confirmed=0)  # the master has not told this slave yet
        told = []
        store.hooks.on_blocked_cut = told.append
        why = "a received record is damaged"
        cut_back(store, state, offsets[15], 2, accept_loss=False, why=why, archive=False)
        assert store.max_offset == offsets[15]
        assert told == [offsets[3]] and len(state.history) == 2


def test_no_entry_stays_beyond_where_damage_has_led_a_cut(tmp_path):
    with opened(tmp_path) as store:
        offsets, state = damaged_store(store, tmp_path)
        cut_back(store, state, offsets[15], 2, accept_loss=True, why="a test")
        assert store.max_offset == offsets[3] and state.last_epoch == E1


def test_a_place_inside_a_record_takes_that_record_although_it_comes_again(tmp_path):
    with opened(tmp_path) as store:
        offsets, state = damaged_store(store, tmp_path)
        cut_back(store, state, offsets[2] + 1, 1, accept_loss=True, why="a test", archive=False)
        assert store.max_offset == offsets[2]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_cut_whose_place_retention_has_removed_is_given_up(tmp_path, restarted):
    """The cut waits for retention, which has begun before it, and then has no place any more. A
    slave's retention has passed the common point then, and its master answers with a resync.
    """
    fs = FaultyFileSystem()
    settings = config(tmp_path, retention=RetentionConfig(max_size_bytes=2 * FILE_SIZE))
    store = MessageStore(settings, store_host=HOST, fs=fs)
    store.open()
    offsets = [put(store, message(n, size=FILE_SIZE - 3000))[0].offset for n in range(5)]
    store.flush()
    assert store.wait_dispatched(store.max_offset, 60)
    state = NodeState(REAL, str(tmp_path))
    state.load(1, "c", "g")
    history = (EpochEntry(E1, 0, 1, (1, 2)), EpochEntry(E2, offsets[1], 1, (1, 2)))
    state.save(history=history)
    inside, cutting = threading.Event(), threading.Event()
    remover = threading.Thread(target=lambda: store.retention.delete_expired(None))

    def block(call, path):
        if threading.current_thread() is remover and not inside.is_set():
            inside.set()
            assert cutting.wait(60)

    truncate = store.truncate

    def note(*given, **more):
        cutting.set()
        truncate(*given, **more)

    fs.hook, store.truncate = block, note
    remover.start()
    assert inside.wait(60)
    with pytest.raises(ReplicationError, match=f"retention has removed the bytes at {offsets[1]}"):
        cut_back(store, state, offsets[1], 1, accept_loss=False, why="the master's log differs")
    remover.join()
    end = store.max_offset
    assert store.min_offset > offsets[1] and state.data.intent is None
    if restarted:  # a version before has left the intent
        state.save(intent=CutIntent(offsets[1], 1))
        store.close()
        store = MessageStore(settings, store_host=HOST)
        store.open(intent_offset=offsets[1])
        finish_cut(store, state)
    assert state.data.intent is None and state.history == history and store.max_offset == end
    store.close()
