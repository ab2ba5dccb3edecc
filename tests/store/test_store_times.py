"""Store times when a clock jumps: the pin, the problem, lookups by time, retention by age."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hastore.config.model import RetentionConfig
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.fs.filesystem import REAL
from hastore.record.codec import decode_record
from hastore.record.layout import store_at
from hastore.store.derived.contract import time_window
from hastore.store.log_store import LogStore
from hastore.store.message_store import MessageStore
from hastore.store.offline.reader import StoreReader
from hastore.store.state.marker_files import CheckpointFile
from tests.dledger.store import kit as entries
from tests.dledger.store.kit import INDEX_BYTES
from tests.store.kit import (
    FILE_SIZE,
    HOST,
    config,
    crash_copy,
    log_file,
    message,
    put,
    scribble,
)

START, HOUR = 1_700_000_000_000, 3_600_000
SEED_THAT_FAILED = 1033632692  # a clock was set back in files that retention had removed


class Clock:
    """A wall clock that a test moves."""

    def __init__(self, now: int = START) -> None:
        self.now = now
        self.passed_ms = 0.0

    def elapse(self, ms: int) -> None:
        """Let time pass, as both clocks show it."""
        self.now += ms
        self.passed_ms += ms

    def monotonic_ms(self) -> float:
        return self.passed_ms

    def wall_ms(self) -> int:
        return self.now


class Classic:
    def __init__(self, root: Path, clock: Clock, **changes: Any) -> None:
        self.store = self.messages = MessageStore(
            config(root, **changes), store_host=HOST, clock=clock
        )
        self.store.open()

    def put(self, number: int = 0, **more: Any) -> int:
        return put(self.messages, message(number, **more))[0].offset or 0


class Ledger:
    def __init__(self, root: Path, clock: Clock, **changes: Any) -> None:
        self.store = DLedgerMmapFileStore(
            config(root, **changes), node=1, index_file_bytes=INDEX_BYTES, store_host=HOST,
            clock=clock,
        )  # fmt: skip
        self.store.open()
        self.messages: LogStore = self.store.messages

    def put(self, number: int = 0, **more: Any) -> int:
        return entries.put(self.store, 1, message(number, **more))[0]


both = pytest.mark.parametrize("kind", [Classic, Ledger])


@contextmanager
def opened(kind: Any, root: Path, clock: Clock, **changes: Any) -> Iterator[Any]:
    node = kind(root, clock, **changes)
    try:
        yield node
    finally:
        node.store.close()


@both
def test_the_first_record_of_the_log_is_found(tmp_path: Path, kind: Any) -> None:
    """In mode dledger it lies behind the header of its entry."""
    clock = Clock()
    with opened(kind, tmp_path, clock) as node:
        assert node.messages.reader.first_record() is None
        node.put(0)
        node.put(1)
        found = node.messages.reader.first_record()
        assert found is not None and found.keys == ["key0"]


def stamps(store: LogStore, queue_id: int = 0) -> list[tuple[int, int]]:
    """(queue offset, store time) of all messages of a queue."""
    assert store.wait_dispatched(store.whole_offset, 60), store.problems
    known = store.queues.queue_range("TopicA", queue_id) or (0, 0)
    found = []
    for number in range(*known):
        pulled = store.reader.pull(
            "TopicA", queue_id, number, max_messages=1, max_bytes=1, limit_offset=store.max_offset
        )
        assert pulled.count == 1, (pulled.status, number, known, store.min_offset)
        found.append((number, decode_record(pulled.records).store_timestamp_ms))
    return found


@both
def test_a_forward_jump_of_the_clock_does_not_last(kind: Any, tmp_path: Path) -> None:
    clock = Clock()
    with opened(kind, tmp_path, clock) as node:
        node.put()
        clock.now += HOUR
        node.put(1)
        assert node.messages.clock_problem is None  # the clock and the log agree
        clock.now = START + 1
        node.put(2)
        clock.now = START + 2
        node.put(3)
        found = [at for _, at in stamps(node.messages)]
        assert found == [START, START + HOUR, START + 1, START + 2]
        assert node.messages.problems == []
        problem = node.messages.clock_problem
        assert problem is not None and "3600 s ahead" in problem and "timedatectl" in problem
    with opened(kind, tmp_path, clock) as node:  # the falls are known after a restart
        assert "3600 s ahead" in str(node.messages.clock_problem)
        clock.now = START + 3
        node.put(4)
        assert stamps(node.messages)[-1] == (4, START + 3)
        clock.now = START + HOUR
        assert node.messages.clock_problem is None


@both
def test_small_steps_back_repeat_the_time_also_after_a_restart(kind: Any, tmp_path: Path) -> None:
    clock = Clock()
    with opened(kind, tmp_path, clock) as node:
        for step in (0, -9_000, 500):
            clock.now = START + step
            node.put()
    clock.now = START - 5_000
    with opened(kind, tmp_path, clock) as node:
        node.put()
        assert [at - START for _, at in stamps(node.messages)] == [0, 0, 500, 500]
        assert node.messages.clock_problem is None


@both
def test_a_restart_goes_on_with_the_clock_if_the_log_is_far_ahead(
    kind: Any, tmp_path: Path
) -> None:
    clock = Clock(START + HOUR)
    with opened(kind, tmp_path, clock) as node:
        node.put()
    clock.now = START
    with opened(kind, tmp_path, clock) as node:
        assert "3600 s ahead" in str(node.messages.clock_problem)
        node.put(1)
        assert [at - START for _, at in stamps(node.messages)] == [HOUR, 0]


def test_a_slave_says_that_its_master_is_ahead(tmp_path: Path) -> None:
    with opened(Classic, tmp_path / "m", Clock(START + HOUR)) as master:
        master.put()
        with master.messages.view(0, FILE_SIZE) as view:
            data = bytes(view)
    with opened(Classic, tmp_path / "s", Clock()) as slave:
        assert slave.messages.clock_problem is None
        slave.messages.append_replica(0, data)
        assert slave.messages.wait_dispatched(len(data), 60)
        assert "3600 s ahead" in str(slave.messages.clock_problem)
        slave.put(1)  # promoted: it goes on with its own clock
        assert [at - START for _, at in stamps(slave.messages)] == [HOUR, 0]


def test_a_follower_says_that_its_leader_is_ahead(tmp_path: Path) -> None:
    with (
        opened(Ledger, tmp_path / "l", Clock(START + HOUR)) as leader,
        opened(Ledger, tmp_path / "f", Clock()) as follower,
    ):
        leader.put()
        entries.copy_entries(leader.store, follower.store)
        assert follower.messages.wait_dispatched(follower.messages.max_offset, 60)
        assert "3600 s ahead" in str(follower.messages.clock_problem)
        entries.no_op(follower.store, 2)
        follower.store.put(2, [message(1)])
        assert [at - START for _, at in stamps(follower.messages)] == [HOUR, 0]


def test_times_that_fell_where_retention_has_been_are_not_known():
    window = time_window(10, 20, [], min_offset=100, end_offset=500)
    assert window.in_one_run(100, 400) and not window.in_one_run(99, 400)


@both
@pytest.mark.parametrize("walk", range(4))
def test_lookups_find_the_first_message_at_or_after_a_time(
    kind: Any, walk: int, tmp_path: Path
) -> None:
    """Random jumps, restarts, cuts and retention, against a search through all messages."""
    seed = random.randrange(1 << 30) if walk else SEED_THAT_FAILED
    print(f"seed {seed}")
    chance = random.Random(seed)
    clock = Clock()
    settings = {"retention": RetentionConfig(max_size_bytes=3 * FILE_SIZE)}
    node = kind(tmp_path, clock, **settings)
    ends = []
    for number in range(300):
        clock.now += chance.randrange(2_000)
        if chance.random() < 0.05:
            clock.now += chance.choice((-1, 1)) * chance.choice((5_000, 60_000, HOUR))
        keys = [("KEYS", f"key{number % 3}")]
        size = chance.randrange(1_500)
        ends.append(node.put(number, size=size, queue_id=number % 2, properties=keys))
        event = chance.random()
        if event < 0.02:
            node.store.close()
            node = kind(tmp_path, clock, **settings)
        elif event < 0.04 and len(ends) > 10:
            at = chance.choice(ends[-10:])
            assert node.messages.wait_dispatched(node.messages.max_offset, 60)
            if at > node.messages.min_offset + node.messages.log.form.lead:
                node.messages.truncate(at - node.messages.log.form.lead)
            ends = [end for end in ends if end < node.messages.max_offset]
        elif event < 0.06:
            node.store.flush()
            assert node.messages.wait_dispatched(node.messages.max_offset, 60)
            node.messages.retention.delete_expired(None)
    messages = node.messages
    every = [at for queue in (0, 1) for _, at in stamps(messages, queue)]
    times = [0, max(every) + 1, *every, *(at + chance.randrange(-20_000, 20_000) for at in every)]
    messages.set_limits(confirmed=messages.max_offset, readable=messages.max_offset)
    reader = StoreReader(str(tmp_path))
    for queue in (0, 1):
        known = stamps(messages, queue)
        for wanted in times:
            first = next((number for number, at in known if at >= wanted), known[-1][0] + 1)
            found = messages.reader.queue_offset_by_time("TopicA", queue, wanted)
            assert found == first, (queue, wanted - START)
            assert reader.queue_offset_by_time("TopicA", queue, wanted) == first
    check_searches(messages, every, chance)
    node.store.close()


def as_a_broker(node: Any, clock: Clock) -> None:
    """Let a node store with the time of its clock, whatever it is, as RocketMQ's brokers do."""
    node.messages._appender._next_ms = lambda _last_ms: clock.now


def check_lookups(messages: LogStore, chance: random.Random, early_ms: int = 0) -> None:
    """No lookup leaves a message out, and none begins at one that is too early by `early_ms`."""
    assert messages.wait_dispatched(messages.max_offset, 60)
    messages.set_limits(confirmed=messages.max_offset, readable=messages.max_offset)
    offline = StoreReader(messages.config.root)
    for queue in (0, 1):
        known = stamps(messages, queue)
        end = known[-1][0] + 1 if known else 0
        for _ in range(60 if known else 0):
            wanted = chance.choice(known)[1] + chance.choice((0, 1, -700, 700))
            first = next((number for number, at in known if at >= wanted), end)
            for reader in (messages.reader, offline):
                found = reader.queue_offset_by_time("TopicA", queue, wanted)
                assert found == first or (found < first and early_ms), (wanted - START, first)
                if found < first:
                    assert dict(known)[found] >= wanted - early_ms


@both
def test_lookups_leave_no_message_out_where_a_brokers_clock_stepped_back_by_little(
    kind: Any, tmp_path: Path
) -> None:
    """RocketMQ's store times fall by any amount; a search in the middle would step over them."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance, clock = random.Random(seed), Clock()
    with opened(kind, tmp_path, clock) as node:
        as_a_broker(node, clock)
        for number in range(100):
            clock.now += 200 if number != 50 else -8_500
            node.put(number, queue_id=number % 2)
        check_lookups(node.messages, chance)
        for number in range(60):
            clock.now += chance.choice((100, 0, 300, -1, -150)) if number % 15 else -HOUR
            node.put(number, queue_id=chance.randrange(2))
        check_lookups(node.messages, chance)
        falls = node.messages._times.falls
        assert falls.small and len(falls.small) < len(falls.all)
        node.messages.truncate(falls.all[-3].offset - node.messages.log.form.lead)
        assert len(node.messages._times.falls.all) == len(falls.all) - 3
        check_lookups(node.messages, chance)
    with opened(kind, tmp_path, clock) as node:
        assert node.messages._times.falls.all == falls.all[:-3]
        as_a_broker(node, clock)
        clock.now -= 9_000
        node.put(queue_id=1)
        check_lookups(node.messages, chance)


@both
def test_a_clock_that_jitters_makes_lookups_begin_a_little_early(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More falls than are kept: the oldest small ones are left out, and no large one."""
    monkeypatch.setattr("hastore.store.store_times._KEPT", 12)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance, clock = random.Random(seed), Clock()
    settings = {"retention": RetentionConfig(max_size_bytes=2 * FILE_SIZE)}
    node = kind(tmp_path, clock, **settings)
    for number in range(200):
        fall = -HOUR if number % 50 == 20 else -chance.randrange(1, 3_000)
        clock.now += 400 if number % 5 else fall
        as_a_broker(node, clock)
        node.put(number, queue_id=chance.randrange(2), size=chance.randrange(500))
        if number in (80, 81, 160):
            node.store.close()
            node = kind(tmp_path, clock, **settings)
    assert node.messages.wait_dispatched(node.messages.max_offset, 60)
    falls = node.messages._times.falls
    assert len(falls.all) == 12 and len(falls.small) <= 12 - 4
    assert falls.thinned_end > node.messages.min_offset
    check_lookups(node.messages, chance, early_ms=20_000)
    node.store.flush()
    while node.messages.min_offset < falls.thinned_end:
        node.put(size=1500, queue_id=1)
        node.store.flush()
        assert node.messages.wait_dispatched(node.messages.max_offset, 60)
        node.messages.retention.delete_expired(None)
    assert node.messages._times.falls.thinned_end == 0
    check_lookups(node.messages, chance)
    node.store.close()


def check_searches(messages: LogStore, every: list[int], chance: random.Random) -> None:
    """Search by key in spans of time: each message in the span is found, newest first."""
    records: dict[str, list[tuple[int, int]]] = {}  # (offset, store time) by key
    for queue in (0, 1):
        for number, stored in stamps(messages, queue):
            found = messages.reader.pull(
                "TopicA", queue, number, max_messages=1, max_bytes=1, limit_offset=1 << 60
            )
            record = decode_record(found.records)
            records.setdefault(record.keys[0], []).append((record.physical_offset, stored))
    for key, known in records.items():
        known.sort(reverse=True)
        for _ in range(20):
            begin, end = sorted(chance.choice(every) + chance.randrange(-9, 9) for _ in range(2))
            begin, end = chance.choice([(begin, end), (0, end), (begin, 1 << 62), (0, 1 << 62)])
            found = messages.reader.query_key(
                "TopicA", key, max_messages=1_000, begin_ms=begin, end_ms=end
            )
            wanted = [offset for offset, stored in known if begin <= stored <= end]
            assert found == wanted, (key, begin - START, end - START)


@pytest.mark.parametrize("zeros", [False, True])
@both
def test_a_search_by_time_steps_over_no_message_because_a_time_is_damaged(
    kind: Any, tmp_path: Path, zeros: bool
) -> None:
    """The rest of a sector is zeros, behind a header's first fields; or one bit of a time flips."""
    clock = Clock()
    with opened(kind, tmp_path, clock) as node:
        for number in range(20):
            clock.now += 1000 if number != 12 else -HOUR
            node.put(number)
        messages = node.messages
        known = stamps(messages)
        messages.set_limits(confirmed=messages.max_offset, readable=messages.max_offset)
        node.store.flush()
        for bad, stored in known:
            at, size = messages.queues.get("TopicA", 0).files.place(bad)
            path, within = messages.log.queue.find(at).path, at % messages.log.file_size
            whole = Path(path).read_bytes()[within : within + size]
            if zeros:
                scribble(path, within + 40, bytes(size - 40))
            else:
                scribble(path, within + store_at(0), (stored - (1 << 38)).to_bytes(8))
            offline = StoreReader(str(tmp_path))
            for _, wanted in known:
                first = next(number for number, at in known if at >= wanted)
                right = range(max(first - 2, 0), first + 1)
                if not zeros and first == bad:  # it says itself that it is older
                    others = (number for number, at in known if at >= wanted and number != bad)
                    other = next(others, len(known))
                    right = range(other, other + 1)
                for reader in (messages.reader, offline):
                    assert reader.queue_offset_by_time("TopicA", 0, wanted) in right, (bad, first)
            scribble(path, within, whole)


def test_a_damaged_file_of_falls_is_no_reason_not_to_start(tmp_path: Path) -> None:
    clock = Clock(START + HOUR)
    with opened(Classic, tmp_path, clock) as node:
        node.put()
        clock.now = START
        node.put(1)
        assert node.messages.wait_dispatched(node.messages.max_offset, 60)
        before = node.messages.reader.queue_offset_by_time("TopicA", 0, START + 1)
    path = tmp_path / "hastore" / "times"
    path.write_bytes(path.read_bytes()[:-1])
    with opened(Classic, tmp_path, clock) as node:
        node.put(2)
        assert len(stamps(node.messages)) == 3
    (tmp_path / "hastore" / "replay").unlink()  # the remedy
    with opened(Classic, tmp_path, clock) as node:
        assert len(stamps(node.messages)) == 3
        assert node.messages.reader.queue_offset_by_time("TopicA", 0, START + 1) == before == 0


# -- retention by age ------------------------------------------------------------------------------


def fill_file(node: Any) -> None:
    """Put one record that nearly fills a file."""
    node.put(size=FILE_SIZE - 3000)


def date_files(node: Any, *written_ms: int) -> None:
    """Let the files of the log have been written last at these times of the host."""
    node.store.flush()
    paths = sorted(Path(node.messages.log.directory).iterdir())
    for path, at in zip(paths, written_ms, strict=True):
        os.utime(path, ns=(at * 1_000_000, at * 1_000_000))


def aged(node: Any) -> int:
    """Let retention look, and return how many files it removed."""
    node.store.flush()
    assert node.messages.wait_dispatched(node.messages.max_offset, 60)
    return int(node.messages.retention.delete_expired(None))


AGE = {"retention": RetentionConfig(max_age_ms=10 * HOUR)}


@both
def test_files_of_a_clock_that_was_ahead_are_removed_by_their_true_age(
    kind: Any, tmp_path: Path
) -> None:
    """As an earlier version left them: all records have the time of the jump."""
    clock = Clock(START + 10_000 * HOUR)
    with opened(kind, tmp_path, clock, **AGE) as node:
        for _ in range(4):
            fill_file(node)
        date_files(node, *(START + number * HOUR for number in range(4)))
        clock.now = START + 11 * HOUR
        assert aged(node) == 1
        clock.elapse(HOUR)
        assert aged(node) == 1


@both
def test_records_of_the_future_do_not_keep_the_files_before_them(kind: Any, tmp_path: Path) -> None:
    """The file time is of the jump, or of a copy of the store: the next sound record decides."""
    clock = Clock(START)
    with opened(kind, tmp_path, clock, **AGE) as node:
        for jump in (0, 10_000 * HOUR, 10_000 * HOUR, 0, 0):
            clock.now += HOUR + jump
            fill_file(node)
            clock.now -= jump
        date_files(node, *[START + 20_000 * HOUR] * 5)
        clock.now = START + 14 * HOUR + 1  # ten hours after the fourth file began
        assert aged(node) == 3


@both
def test_a_clock_that_was_behind_removes_nothing_early(kind: Any, tmp_path: Path) -> None:
    clock = Clock(START)
    with opened(kind, tmp_path, clock, **AGE) as node:
        times = (START, 1_000, 2_000, START + 3_000)
        for clock.now in times:
            fill_file(node)
        date_files(node, *times)
        clock.now = START + 9 * HOUR
        assert aged(node) == 0
        clock.elapse(2 * HOUR)
        assert aged(node) == 3


@both
def test_a_clock_that_jumps_ahead_for_a_while_removes_no_fresh_file(
    kind: Any, tmp_path: Path
) -> None:
    clock = Clock(START)
    with opened(kind, tmp_path, clock, **AGE) as node:
        retention = node.messages.retention
        for _ in range(4):
            fill_file(node)
        date_files(node, *[START] * 4)
        assert aged(node) == 0 and retention.problem() is None
        clock.now += 10_000 * HOUR
        assert aged(node) == 0
        clock.elapse(HOUR - 1)
        assert aged(node) == 0
        assert "has jumped ahead by 36000000 s" in str(retention.problem())
        clock.now -= 10_000 * HOUR
        assert aged(node) == 0 and retention.problem() is None
        clock.now += 10_000 * HOUR  # the hour begins anew
        assert aged(node) == 0
        clock.elapse(HOUR - 1)
        assert aged(node) == 0
        clock.elapse(8 * HOUR)  # it stands: it is right, or nobody has looked
        assert aged(node) == 3 and retention.problem() is None


@both
def test_files_go_by_age_while_the_clock_is_ahead(kind: Any, tmp_path: Path) -> None:
    """The time of before goes on, and steps of a clock that is kept right are no jump."""
    clock = Clock(START)
    with opened(kind, tmp_path, clock, **AGE) as node:
        for _ in range(4):
            fill_file(node)
        date_files(node, *[START] * 4)
        assert aged(node) == 0
        for _ in range(3):
            clock.elapse(3 * HOUR)
            clock.now += 60_000
            assert aged(node) == 0 and node.messages.retention.problem() is None
        clock.now += 10_000 * HOUR
        assert aged(node) == 0
        clock.elapse(HOUR - 1)
        assert aged(node) == 3


@both
def test_the_checkpoint_is_never_in_the_future(kind: Any, tmp_path: Path) -> None:
    """RocketMQ would take records as synced that are stored before that time."""
    clock = Clock()
    path = tmp_path / "checkpoint"

    def kept() -> tuple[int, int]:
        node.store.flush()
        assert node.messages.wait_dispatched(node.messages.max_offset, 60)
        node.messages._keep()
        found = CheckpointFile(REAL, str(tmp_path)).load()
        return found.log_timestamp_ms - START, found.queue_timestamp_ms - START

    with opened(kind, tmp_path, clock) as node:
        node.put()
        assert kept() == (0, 0)
        clock.now = START + HOUR
        node.put(1)
        assert kept() == (HOUR, HOUR)
        clock.now = START + 1
        assert kept() == (1, 1)
        before = path.stat().st_mtime_ns
        clock.now = START + 2  # nothing new: it is not written each second
        assert kept() == (1, 1) and path.stat().st_mtime_ns == before
        clock.now = START + 5
        node.put(2)
        assert kept() == (5, 5)


@pytest.mark.parametrize("lost", [False, True])
def test_the_checkpoint_covers_no_record_that_is_gone(tmp_path: Path, lost: bool) -> None:
    """A master may send the same records again, with these times, and they are not synced then."""
    clock, root = Clock(), tmp_path / "a"

    def times(store: Any) -> tuple[int, int]:
        found = CheckpointFile(REAL, store.config.root).load()
        return found.log_timestamp_ms - START, found.queue_timestamp_ms - START

    with opened(Classic, root, clock) as node:
        node.store._housekeeping.stop()
        node.put()
        clock.now = START + HOUR
        cut = node.put(1)
        node.store.flush()
        assert node.store.wait_dispatched(node.store.max_offset, 60)
        node.store._keep()
        assert times(node.store) == (HOUR, HOUR)
        copy = crash_copy(node.store, tmp_path / "b")
        if not lost:
            node.store.truncate(cut)
            assert times(node.store) == (0, 0)
            node.store._keep()
            assert times(node.store) == (0, 0)
            node.store.truncate(0)
            node.store._keep()
            assert times(node.store) == (-START, -START)
    if lost:
        scribble(log_file(copy), cut, bytes(100))
        (Path(copy) / "hastore" / "limits").unlink()
        with opened(Classic, Path(copy), clock) as node:
            assert node.store.max_offset == cut and times(node.store) == (0, 0)
            assert node.store.wait_dispatched(cut, 60)
            node.store._keep()
            assert times(node.store) == (0, 0)
