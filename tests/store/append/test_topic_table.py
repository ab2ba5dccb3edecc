"""Topics as a table in the log: puts, replay, restarts, cuts, retention and rebuilds agree."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hastore.config.model import RetentionConfig
from hastore.errors import MessageIllegalError, Status
from hastore.fs.filesystem import REAL
from hastore.fs.memory import MemoryFileSystem
from hastore.record.codec import decode_record
from hastore.record.topic_records import (
    PERM_READ,
    TOPICS_TOPIC,
    SavedTopics,
    TopicChange,
    TopicConfig,
    TopicEntry,
    apply_change,
    build_change,
    change_in,
    check_config,
    decode_topics,
    encode_topics,
    forget_removed,
    lacking,
)
from hastore.store.append import topic_table
from hastore.store.append.results import own_records
from hastore.store.append.topic_table import TopicTable
from hastore.store.derived.consume_queue import Unit
from hastore.store.derived.unit_files import UnitFiles
from hastore.store.message_reader import PullStatus
from hastore.store.message_store import MessageStore
from hastore.store.offline.reader import StoreReader
from hastore.store.rebuild.rebuild import rebuild_in_place
from tests.store.kit import FILE_SIZE, bodies, crash_copy, message, opened, put
from tests.store.rebuild.kit import SIZES, how

ORDERS = TopicConfig("orders", 16, 16)
KEPT_FILES = 3
RETENTION = RetentionConfig(max_age_ms=None, max_size_bytes=KEPT_FILES * FILE_SIZE)


def change(store: MessageStore, *changes: TopicChange) -> list[int]:
    """Append changes as a master does; return the offsets of their records."""
    records = [build_change(one, 1) for one in changes]
    results = store.put_encoded(records, [own_records] * len(records))
    assert all(one.status is Status.PUT_OK for each in results for one in each), results
    return [one.offset or 0 for each in results for one in each]


def create(store: MessageStore, config: TopicConfig = ORDERS) -> int:
    return change(store, TopicChange(config))[0]


def delete(store: MessageStore, name: str = "orders") -> int:
    return change(store, TopicChange(deleted=name))[0]


def copy_log(store: MessageStore, other: MessageStore) -> None:
    """Let another store follow, as a slave does."""
    at = other.max_offset
    while at < store.max_offset:
        with store.view(at, 10_000) as view:
            at = other.append_replica(at, bytes(view))
    assert other.wait_dispatched(at, 60), other.problems


def refusal(store: MessageStore, record: bytes) -> str:
    (result,) = store.put_encoded([record])[0]
    assert result.status is Status.MESSAGE_ILLEGAL, result
    return str(result.reason)


def test_a_topic_is_there_at_once_and_on_a_slave_and_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path / "master") as store, opened(tmp_path / "slave") as slave:
        version = store.topic_table.version
        assert store.topic_table.find("orders") is None
        assert "has 4 queues" in refusal(store, message(1, topic="orders", queue_id=15))
        create(store)
        assert store.topic_table.find("orders") == ORDERS
        assert store.topic_table.version > version
        put(store, message(1, topic="orders", queue_id=15))
        put(store, message(2, topic="others", queue_id=1))
        assert "has 16 queues" in refusal(store, message(1, topic="orders", queue_id=16))
        copy_log(store, slave)
        store.wait_dispatched(store.max_offset, 60)
        derived = TopicConfig("others", 4, 4)
        for one in (store, slave):
            assert one.topic_table.all() == [ORDERS, derived]
            assert one.topic_table.recorded("others") is None
    for name in ("master", "slave"):
        with opened(tmp_path / name) as store:
            assert store.topic_table.all() == [ORDERS, derived]
            assert "has 16 queues" in refusal(store, message(1, topic="orders", queue_id=16))


def test_a_change_takes_queues_and_the_permission_to_write_away(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        put(store, message(1, topic="orders", queue_id=3))
        create(store, TopicConfig("orders", 4, 2))
        assert "has 2 queues" in refusal(store, message(2, topic="orders", queue_id=3))
        # A uniform payload, and a mixed one.
        for payload in (message(3, topic="orders", queue_id=1), message(4, topic="orders") * 2):
            create(store, TopicConfig("orders", 4, 2, PERM_READ))
            assert "its permission" in str(store.put_encoded([payload])[0][0].reason)
            create(store, TopicConfig("orders", 4, 4))
            assert all(one.status is Status.PUT_OK for one in store.put_encoded([payload])[0])
        create(store, TopicConfig("orders", 4, 4, 2))
        assert not store.topic_table.may_read("orders")
        assert store.topic_table.may_read("unknown")


def test_a_deleted_topic_begins_anew_where_its_queues_ended(tmp_path: Path) -> None:
    with opened(tmp_path) as store, opened(tmp_path / "slave") as slave:
        create(store, TopicConfig("orders", 8, 8))
        put(store, *(message(n, topic="orders", queue_id=n % 8) for n in range(80)))
        put(store, *(message(n, topic="free") for n in range(5)))
        copy_log(store, slave)
        delete(store)
        delete(store, "free")
        assert store.topic_table.all() == []
        assert bodies(store, "orders", 7) == []
        assert store.queues.topics().keys() == {TOPICS_TOPIC}
        assert store.queues.topic_count == 1
        assert put(store, message(1, topic="orders"))[0].queue_offset == 10
        assert put(store, message(9, topic="free", queue_id=1))[0].queue_offset == 0
        assert store.wait_dispatched(store.max_offset, 60)
        copy_log(store, slave)
        for one in (store, slave):
            assert one.topic_table.find("orders") == TopicConfig("orders", 4, 4)
            assert len(bodies(one, "orders")) == 1
            assert one.queues.queue_range("orders", 0) == (10, 11)
            assert one.queues.queue_range("orders", 7) == (10, 10)
            assert one.queues.topics()["orders"] == {0: (10, 11)}
            assert one.queues.topics()["free"] == {1: (0, 1)}
        create(store, TopicConfig("orders", 1, 1))
        store.set_limits(confirmed=store.max_offset, readable=store.max_offset)
        assert store.wait_dispatched(store.max_offset, 60)
    with opened(tmp_path) as store:
        assert store.topic_table.find("orders") == TopicConfig("orders", 1, 1)
        assert store.queues.queue_range("orders", 0) == (10, 11)
        with StoreReader(str(tmp_path)) as reader:
            topics = store.queues.topics()
            emptied = dict.fromkeys(range(1, 8), (10, 10))
            assert store.queues.emptied_of("orders") == emptied
            topics["orders"] |= emptied
            topics["free"] |= {0: (5, 5)}
            assert reader.topics() == topics
            for name, ended in (("orders", dict.fromkeys(range(8), 10)), ("free", {0: 5, 1: 0})):
                assert store.queues.ended(name, store.min_offset) == ended
                assert {queue: reader.ended(name, queue) for queue in ended} == ended
            assert [one.queue_offset for one in reader.queue_records("orders", 0)] == [10]
            assert reader.queue_range("orders", 7) == (10, 10)


def test_a_cut_brings_back_what_the_log_said_before(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        create(store)
        put(store, *(message(n, topic="orders") for n in range(3)))
        gone = delete(store)
        put(store, message(3, topic="orders"))
        assert store.wait_dispatched(store.max_offset, 60)
        assert len(bodies(store, "orders")) == 1
        store.truncate(gone)
        assert store.topic_table.find("orders") == ORDERS
        assert len(bodies(store, "orders")) == 3
        store.truncate(0)
        assert store.topic_table.all() == []
        put(store, message(3, topic="orders", queue_id=2))
        assert "has 4 queues" in refusal(store, message(1, topic="orders", queue_id=15))


def test_a_deletion_hides_what_replay_reads_only_afterwards(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        with store.replay.paused():
            put(store, *(message(n, topic="orders") for n in range(3)))
            delete(store)
            put(store, message(3, topic="orders"))
        assert len(bodies(store, "orders")) == 1
        assert store.queues.queue_range("orders", 0) == (3, 4)


@pytest.mark.parametrize("count", [3, 300])  # one by one, or as columns
def test_nobody_sees_deleted_messages_beside_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    seen: list[list[bytes]] = []
    watched: list[MessageStore] = []
    append = UnitFiles.append

    def read(store: MessageStore) -> list[bytes]:
        at = 0
        while True:
            found = store.reader.pull(
                "orders", 0, at, max_messages=1_000, max_bytes=1 << 20,
                limit_offset=store.max_offset,
            )  # fmt: skip
            if found.status is not PullStatus.OFFSET_TOO_SMALL:
                break
            at = found.next_queue_offset
        return bodies_in(found.records)

    def spied(files: UnitFiles, units: bytes) -> None:
        append(files, units)
        seen.extend(read(store) for store in watched)

    monkeypatch.setattr(UnitFiles, "append", spied)
    old = [message(n, topic="orders", size=2_000) for n in range(count)]
    new = [message(n + 10_000, topic="orders") for n in range(2)]
    wanted = bodies_in(b"".join(new))
    with (
        opened(tmp_path / "master", commitlog_file_size=1 << 22) as store,
        opened(tmp_path / "slave", commitlog_file_size=1 << 22) as slave,
    ):
        with store.replay.paused():
            put(store, *old)
            gone = delete(store)
            put(store, *new)
            watched.append(store)
        assert store.wait_dispatched(store.max_offset, 60)
        assert read(store) == wanted
        assert all(set(one) <= set(wanted) for one in seen), "the master knew of the deletion"
        watched[:] = [slave]
        seen.clear()
        for end in (old_end := gone - 1, store.max_offset):
            with slave.replay.paused():
                while slave.max_offset < end:
                    with store.view(slave.max_offset, end - slave.max_offset) as view:
                        slave.append_replica(slave.max_offset, bytes(view))
            assert end == old_end or slave.wait_dispatched(end, 60)
        assert read(slave) == wanted
        assert seen and all(set(one) <= set(wanted) or not set(one) & set(wanted) for one in seen)


def bodies_in(records: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(records):
        record = decode_record(records, at)
        found.append(record.body)
        at += record.size
    return found


def test_no_client_may_make_a_topic(tmp_path: Path) -> None:
    forged = build_change(TopicChange(ORDERS), 1)
    with opened(tmp_path) as store:
        for payload in (forged, message(2) + forged):
            assert TOPICS_TOPIC in str(store.put_encoded([payload])[0][-1].reason)
        assert store.topic_table.recorded("orders") is None


@pytest.mark.parametrize(
    "config",
    [
        TopicConfig("a.b", 1, 1), TopicConfig("", 1, 1), TopicConfig("HASTORE_POSITIONS", 1, 1),
        TopicConfig("x" * 128, 1, 1), TopicConfig("x", 5_000, 1), TopicConfig("x", 1, -1),
        TopicConfig("SCHEDULE_TOPIC_XXXX", 1, 1), TopicConfig("TBW102", 1, 1),
        TopicConfig("x", 1, 1, 8), TopicConfig("x", 1, 1, attributes={"a": "b" * 9_000}),
    ],
)  # fmt: skip
def test_what_no_topic_can_be_is_refused(config: TopicConfig) -> None:
    with pytest.raises(MessageIllegalError):
        check_config(config)


def test_a_record_keeps_every_field_and_shows_damage() -> None:
    config = TopicConfig("T%|-_", 0, 3, 7, True, 5, {"message.type": "DELAY\x01\x02 é"})
    check_config(config)
    for one in (TopicChange(config), TopicChange(deleted="T"), TopicChange(config, origin=9)):
        raw = decode_record(build_change(one, 1)).properties
        assert change_in(raw) == one
        for at in range(len(raw)):
            damaged = raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]
            assert change_in(damaged) is None
    assert change_in(b"") is None


def test_a_saved_table_is_read_back_unless_it_is_damaged() -> None:
    entries = {"a": TopicEntry(ORDERS, 1, 2, 3, 0), "b": TopicEntry(None, 5, 5, 9, 5)}
    saved = SavedTopics(entries, 77, ((5, {}), (9, {"a": None, "b": entries["a"]})))
    raw = encode_topics(saved)
    assert decode_topics(raw) == saved
    assert decode_topics(raw[:-1]) is None
    assert decode_topics(b"") is None


def unused(_topic: str) -> bool:
    return False


def test_a_copy_that_comes_late_undoes_no_deletion() -> None:
    """The master wrote the copy while it deleted the topic; the log has lost the deletion."""
    entries: dict[str, TopicEntry] = {}
    apply_change(entries, TopicChange(ORDERS), 10)
    apply_change(entries, TopicChange(deleted="orders"), 20)
    apply_change(entries, TopicChange(ORDERS, origin=10), 30)
    assert entries["orders"].config is None
    assert lacking(entries, 15, unused) == []
    (again,) = lacking(entries, 25, unused)  # the log has the copy, and nothing that contradicts it
    assert again == TopicChange(deleted="orders", origin=20)
    new: dict[str, TopicEntry] = {}
    apply_change(new, TopicChange(ORDERS, origin=10), 30)
    apply_change(new, again, 40)
    assert new["orders"].config is None
    assert lacking(entries, 31, unused) == []
    assert lacking(entries, 31, lambda _: True) == [again]
    forget_removed(entries, 31, lambda _: True)
    assert entries["orders"].config is None
    forget_removed(entries, 31, unused)
    assert entries == {}


def test_a_removed_record_is_known_after_a_restart_and_from_its_copy(tmp_path: Path) -> None:
    filler = [message(n, size=1_000) for n in range(60)]
    with opened(tmp_path / "a", retention=RETENTION) as store:
        create(store)
        gone = create(store, TopicConfig("gone", 1, 1))
        delete(store, "gone")
        while store.max_offset < 6 * FILE_SIZE:
            put(store, *filler)
        assert store.wait_dispatched(store.max_offset, 60)
        store.flush()
        assert store.retention.delete_expired(None) > 0
        assert store.min_offset > gone
        assert store.topic_table.all()[1] == ORDERS
    with opened(tmp_path / "a", retention=RETENTION) as store:
        assert store.topic_table.recorded("orders") == ORDERS
        assert "has 16" in refusal(store, message(1, topic="orders", queue_id=16))
        (lacks,) = store.topic_table.lacking(store.min_offset)
        change(store, lacks)
        assert store.topic_table.lacking(store.min_offset) == []
        first = store.min_offset
        with opened(tmp_path / "b") as other:
            other.begin_at(first)
            copy_log(store, other)
            assert other.topic_table.recorded("orders") == ORDERS
            assert other.topic_table.recorded("gone") is None


class Model:
    """What a store should say: the changes and the messages of its log, in their order."""

    def __init__(self) -> None:
        self.items: list[tuple[int, str, TopicConfig | None | int]] = []  # offset, topic, what

    def cut(self, offset: int) -> None:
        self.items = [item for item in self.items if item[0] < offset]

    def configs(self) -> dict[str, TopicConfig]:
        found: dict[str, TopicConfig | None] = {}
        for _, topic, what in self.items:
            if not isinstance(what, int):
                found[topic] = what
        return {topic: what for topic, what in found.items() if what is not None}

    def used(self) -> set[str]:
        """Return the topics that were put to, and not deleted since."""
        found: set[str] = set()
        for _, topic, what in self.items:
            if what is None:
                found.discard(topic)
            elif isinstance(what, int):
                found.add(topic)
        return found

    def ended(self) -> dict[str, dict[int, int]]:
        """Return how many messages each queue of a deleted topic had at the last deletion."""
        found: dict[str, dict[int, int]] = {}
        for name in {topic for _, topic, what in self.items if what is None}:
            own = [what for _, topic, what in self.items if topic == name]
            last = max(at for at, what in enumerate(own) if what is None)
            before = [what for what in own[:last] if isinstance(what, int)]
            found[name] = {queue: before.count(queue) for queue in range(8)}
        return found

    def shown(self, first: int) -> dict[str, dict[int, list[int]]]:
        """Return the offsets of the messages that show, by topic and queue."""
        found: dict[str, dict[int, list[int]]] = {}
        for offset, topic, what in self.items:
            if what is None:
                found.pop(topic, None)
            elif isinstance(what, int) and offset >= first:
                found.setdefault(topic, {}).setdefault(what, []).append(offset)
        return found


def check(store: MessageStore, model: Model) -> None:
    table = store.topic_table
    assert store.wait_dispatched(store.max_offset, 60), store.problems
    names = {item[1] for item in model.items}
    wanted = model.configs()
    assert {name: table.recorded(name) for name in names} == {
        name: wanted.get(name) for name in names
    }
    assert table.limits == {name.encode(): one.write_queues for name, one in wanted.items()}
    shown = model.shown(store.min_offset)
    found: dict[str, dict[int, list[int]]] = {}
    for topic, queues in store.queues.topics().items():
        for queue, (low, high) in queues.items():
            units = store.queues.read(topic, queue, low, 10_000) if high > low else []
            if topic != TOPICS_TOPIC and units:
                found.setdefault(topic, {})[queue] = [unit.offset for unit in units]
    assert found == shown
    for topic, ends in model.ended().items():
        ended = store.queues.ended(topic, store.min_offset)
        assert ended == {queue: ends[queue] for queue in ended}
    # Of a topic whose messages are all gone, a node knows the queues if it had them, or was told.
    assert {*wanted, *shown} <= {one.name for one in table.all()} <= {*wanted, *model.used()}


class Walk:
    """A master and a slave, and what a random walk does to them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.root = root
        self.model = Model()
        self.late: list[TopicChange] = []
        self.removed = 0
        self.confirmed = 0  # the log is not cut below: a master removes files only then
        self.stack = ExitStack()
        self.numbers = [0, 0]
        self.stores = [self._open(0), self._open(1)]

    def _path(self, which: int) -> Path:
        return self.root / f"{which}-{self.numbers[which]}"

    def _open(self, which: int) -> MessageStore:
        return self.stack.enter_context(opened(self._path(which), retention=RETENTION))

    def name(self) -> str:
        return f"topic{self.random.randrange(6)}"

    def put(self) -> None:
        store = self.stores[0]
        for _ in range(self.random.randrange(1, 20)):
            topic, queue = self.name(), self.random.randrange(8)
            record = message(1, topic=topic, queue_id=queue, size=self.random.choice([10, 9_000]))
            (result,) = store.put_encoded([record])[0]
            config = self.model.configs().get(topic)
            if config is not None:
                assert (result.offset is not None) == (queue < config.write_queues)
            if result.offset is not None:
                self.model.items.append((result.offset, topic, queue))

    def create(self) -> None:
        config = TopicConfig(self.name(), 8, self.random.randrange(9))
        offset = create(self.stores[0], config)
        self.model.items.append((offset, config.name, config))

    def delete(self) -> None:
        name = self.name()
        self.model.items.append((delete(self.stores[0], name), name, None))

    def copy_again(self) -> None:
        """Restate a topic's record, as a master does that is slow: it may be out of date."""
        store = self.stores[0]
        if self.late:
            change(store, self.random.choice(self.late))
        self.late += store.topic_table.lacking(store.max_offset)

    def state(self, first: int) -> None:
        store = self.stores[0]
        change(store, *store.topic_table.lacking(first))
        assert store.wait_dispatched(store.max_offset, 60)
        store.flush()
        assert store.topic_table.lacking(first) == []
        self.confirmed = store.max_offset

    def begin_anew(self) -> None:
        """Give the slave the master's log and nothing else."""
        master, slave = self.stores
        self.state(master.min_offset)
        slave.drop()
        slave.begin_at(master.min_offset)
        self.follow()

    def follow(self) -> None:
        master, slave = self.stores
        if slave.max_offset < master.min_offset:
            self.state(master.min_offset)
            slave.drop()
            slave.begin_at(master.min_offset)
        copy_log(master, slave)
        check(slave, self.model)

    def cut(self) -> None:
        self.follow()
        items = [item for item in self.model.items if item[0] >= self.confirmed]
        if items:
            offset = self.random.choice(items[-10:])[0]
            for store in self.stores:
                store.truncate(offset)
            self.model.cut(offset)
            self.late.clear()  # no master goes on with what it began before

    def restart(self) -> None:
        which = self.random.randrange(2)
        self.stores[which].close()
        # Without its queues a log that has lost records does not know the next queue offsets.
        if self.random.random() < 0.3 and not self.stores[which].min_offset:
            shutil.rmtree(self._path(which) / "consumequeue", ignore_errors=True)
        elif self.random.random() < 0.3 and self.stores[which].max_offset:
            rebuild_in_place(REAL, str(self._path(which)), SIZES, how())
        self.stores[which] = self._open(which)

    def crash(self) -> None:
        which = self.random.randrange(2)
        self.numbers[which] += 1
        crash_copy(self.stores[which], self._path(which))
        self.stores[which].close()
        self.stores[which] = self._open(which)

    def retain(self) -> None:
        """Remove old files of the master, which first states again what they say, if it can."""
        store = self.stores[0]
        assert store.wait_dispatched(store.max_offset, 60)
        store.flush()
        first = store.retention.expired_end(None)
        if first is not None:
            if self.random.random() < 0.7:
                self.state(first)
            self.late.clear()
            self.removed += store.retention.delete_expired(first)
            self.confirmed = max(self.confirmed, first)
            self.follow()

    def run(self, steps: int) -> None:
        likely = [self.put] * 8 + [self.create] * 3 + [self.delete] * 2
        others = [self.copy_again, self.follow, self.cut, self.restart, self.crash, self.begin_anew]
        others += [self.retain] * 2
        with self.stack:
            for _ in range(steps):
                self.random.choice(likely + others)()
                check(self.stores[0], self.model)
            self.follow()
            with StoreReader(self.stores[0].config.root) as reader:
                end = self.stores[0].max_offset
                self.stores[0].set_limits(confirmed=end, readable=end)
                assert filled(reader.topics()) == filled(self.stores[0].queues.topics())
                for topic, ends in self.model.ended().items():
                    for queue, end in ends.items():
                        assert reader.ended(topic, queue) in (end, None)


def filled(topics: dict[str, dict[int, tuple[int, int]]]) -> set[tuple[str, int, int, int]]:
    return {
        (topic, queue, low, high)
        for topic, queues in topics.items()
        for queue, (low, high) in queues.items()
        if low < high
    }


class LogOfChanges:
    """A log of changes of topics only, and a table of it; its queue is what `read` returns."""

    FILE = 4_096

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fs = MemoryFileSystem()
        self.fs.make_dirs("/store/hastore")
        self.records: list[tuple[int, bytes]] = []  # also those that were removed
        self.changes: list[tuple[int, TopicChange]] = []  # the same
        self.first = self.end = self.dispatched = 0
        self.kept: set[str] = set()  # the topics with queues
        self.begins: dict[str, int] = {}
        self.table = self._table()

    def _table(self) -> TopicTable:
        return TopicTable(self.fs, "/store", self, self.view, 4, file_size=self.FILE)

    # What the table asks of the queues, and of the log.

    def queue_range(self, _topic: str, _queue_id: int) -> tuple[int, int] | None:
        places = [n for n, (at, _) in enumerate(self.records) if at >= self.first]
        ends = [n for n, (at, raw) in enumerate(self.records) if at + len(raw) <= self.dispatched]
        return (places[0], ends[-1] + 1) if places and ends else None

    def read(self, _topic: str, _queue_id: int, at: int, count: int) -> list[Unit]:
        found = enumerate(self.records[at : at + count], at)
        return [Unit(place, offset, len(raw), 0) for place, (offset, raw) in found]

    @contextmanager
    def view(self, offset: int, size: int) -> Iterator[memoryview]:
        (raw,) = (raw for at, raw in self.records if at == offset)
        yield memoryview(raw)[:size]

    def show_from(self, begins: Mapping[str, int]) -> None:
        self.begins = dict(begins)

    def hide_before(self, topic: str, begin: int) -> None:
        self.begins[topic] = begin

    def has(self, topic: str) -> bool:
        return topic in self.kept

    def shown(self, _topic: str) -> list[int]:
        return []

    def shown_topics(self) -> list[str]:
        return []

    # What happens to the log.

    def add(self) -> None:
        name = f"topic{self.random.randrange(5)}"
        change = TopicChange(TopicConfig(name, 8, self.random.randrange(9)))
        if self.random.random() < 0.3:
            change = TopicChange(deleted=name)
        late = self.table.lacking(self.end)
        if late and self.random.random() < 0.3:
            change = self.random.choice(late)
        raw = build_change(change, 1)
        if self.end % self.FILE + len(raw) > self.FILE:
            self.end += self.FILE - self.end % self.FILE
        self.records.append((self.end, raw))
        self.changes.append((self.end, change))
        self.table.take(self.end, len(raw), decode_record(raw).properties)
        self.end += len(raw)
        self.dispatched = self.random.choice([self.dispatched, self.end])

    def remove(self) -> None:
        """Let retention remove files; it may crash on the way."""
        self.dispatched = self.end
        files = range(self.first, self.end - self.end % self.FILE + 1, self.FILE)
        first = self.random.choice(files)
        # The master has stated again what the log would lack.
        self.table.save_before(first)
        if self.random.random() < 0.5:
            self.first = self.random.choice([one for one in files if one <= first])
            self.load()
        else:
            self.first = first
            self.table.delete_before(first)

    def load(self) -> None:
        """Start anew; after a power loss replay goes back."""
        self.dispatched = self.random.choice([self.dispatched, self._some_end(self.dispatched)])
        self.table = self._table()
        assert self.table.load(self.dispatched, synced=True) == self.dispatched
        self.table.delete_before(self.first)
        for offset, raw in self.records:
            if offset >= self.dispatched:
                self.table.take(offset, len(raw), decode_record(raw).properties)
        self.dispatched = self.end

    def cut(self) -> None:
        """Cut the log; a crash may prevent that the table is told."""
        self.end = self._some_end(self.end)
        self.dispatched = min(self.dispatched, self.end)
        self.records = [one for one in self.records if one[0] < self.end]
        self.changes = [one for one in self.changes if one[0] < self.end]
        if self.random.random() < 0.3:
            self.load()
        else:
            end = self.random.choice([self.dispatched, self.end])
            self.table.truncate(end)
            self.table.delete_before(self.first)
            for offset, raw in self.records:
                self.table.take(offset, len(raw), decode_record(raw).properties)

    def _some_end(self, most: int) -> int:
        ends = [at + len(raw) for at, raw in self.records if self.first < at + len(raw) <= most]
        return self.random.choice([self.first, *ends])

    def use(self) -> None:
        self.kept = {f"topic{n}" for n in range(5) if self.random.random() < 0.5}

    def check(self) -> None:
        configs: dict[str, TopicConfig] = {}
        begins: dict[str, int] = {}
        newest: dict[str, int] = {}
        for offset, change in self.changes:
            name, origin = change.name, offset if change.origin is None else change.origin
            if change.deleted:
                begins[name] = max(begins.get(name, 0), origin)
            if origin >= newest.get(name, 0):
                newest[name] = origin
                configs.pop(name, None)
                if change.config is not None:
                    configs[name] = change.config
        table = self.table
        found = {name: table.recorded(name) for name in newest}
        assert {name: one for name, one in found.items() if one} == configs
        assert table.limits == {name.encode(): one.write_queues for name, one in configs.items()}
        others = {name: one.write_queues for name, one in configs.items()}
        others = {name: count for name, count in others.items() if count not in (0, 4)}
        assert list(table.other_queues.items()) == sorted(others.items())
        shown = {name: at for name, at in begins.items() if at > self.first}
        assert {name: at for name, at in self.begins.items() if at > self.first} == shown


@pytest.mark.parametrize("walk", range(int(os.environ.get("HASTORE_SEEDS", "20"))))
def test_the_table_is_what_the_log_says_after_cuts_below_what_retention_saved(walk: int) -> None:
    seed = int(os.environ.get("HASTORE_SEED", "20261124")) + walk
    print(f"HASTORE_SEED={seed} HASTORE_SEEDS=1")
    log = LogOfChanges(seed)
    for _ in range(150):
        log.random.choice([log.add] * 12 + [log.remove, log.cut] * 2 + [log.load, log.use])()
        log.check()


def test_each_kind_of_topic_has_room_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_TOPICS", "MAX_GROUPS", "MAX_DELETED"):
        monkeypatch.setattr(topic_table, limit, 3)
    log = LogOfChanges(1)
    table = log.table

    def take(one: TopicChange) -> None:
        raw = build_change(one, 1)
        table.take(log.end, len(raw), decode_record(raw).properties)
        log.end += len(raw)

    for number in range(3):
        assert table.no_room_for(f"t{number}") is None
        take(TopicChange(TopicConfig(f"t{number}", 1, 1)))
    assert "3 topics have a configuration" in str(table.no_room_for("t3"))
    assert table.no_room_for("t2") is None, "it is there, and may change"
    for number in range(3):
        assert table.no_room_for(f"%RETRY%g{number}") is None
        take(TopicChange(TopicConfig(f"%RETRY%g{number}", 1, 1)))
    assert "3 consumer groups" in str(table.no_room_for("%RETRY%g3"))
    for number in range(3):
        assert table.no_room_to_delete(f"t{number}") is None
        take(TopicChange(deleted=f"t{number}"))
        assert table.no_room_for("t3") is None, "a deletion makes room"
    assert "`hastore topics set t3 --perm none`" in str(table.no_room_to_delete("t3"))
    assert table.no_room_to_delete("t0") is None, "it is deleted, and may have been put to since"
    table.delete_before(log.end)
    assert table.no_room_to_delete("t3") is None, "they had no queues, and are forgotten"
    log.begins.clear()
    log.show_from = None  # type: ignore[assignment,method-assign]
    take(TopicChange(deleted="t4"))
    assert list(log.begins) == ["t4"], "a deletion costs the same however many there were"


def test_a_cut_below_what_was_saved_brings_back_the_change_before(tmp_path: Path) -> None:
    """Retention has saved what the log says below its new begin, and was killed then."""
    with opened(tmp_path) as store:
        create(store, TopicConfig("orders", 4, 4))
        between = create(store)
        delete(store, "other")
        assert store.wait_dispatched(store.max_offset, 60)
        store.topic_table.save_before(FILE_SIZE)
        crash_copy(store, tmp_path / "copy")
    for _ in range(2):
        with opened(tmp_path / "copy") as store:
            if store.max_offset > between:
                assert store.topic_table.recorded("orders") == ORDERS
                store.truncate(between)
            assert store.topic_table.recorded("orders") == TopicConfig("orders", 4, 4)
            assert store.topic_table.offset_of("other") == -1


@pytest.mark.parametrize("walk", range(int(os.environ.get("HASTORE_SEEDS", "4"))))
def test_random_changes_cuts_restarts_and_rebuilds_agree_with_a_model(
    tmp_path: Path, walk: int
) -> None:
    seed = int(os.environ.get("HASTORE_SEED", "20261123")) + walk
    print(f"HASTORE_SEED={seed} HASTORE_SEEDS=1")
    walk_ = Walk(tmp_path, seed)
    walk_.run(80)
    assert walk_.removed
