"""A fake node for tests of the client API: real records in memory, confirmations on demand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import NotStoredError, Status, UsageError
from hastore.fs.filesystem import without_waiting
from hastore.fs.memory import MemoryFileSystem
from hastore.ha.master.group_transfer import Need, Outcome
from hastore.ha.rules.epochs import EpochStarts, Standing, check_position
from hastore.protocol.api import MapInfo
from hastore.protocol.committed_positions import Place, PositionMap
from hastore.record.codec import Host, Record, decode_record, find_parts, patch_for_store
from hastore.record.log_format import PLAIN
from hastore.record.properties import find_property
from hastore.record.topic_records import TOPICS_TOPIC, TopicConfig
from hastore.server.api.backend import ApiWaker
from hastore.store.append.results import (
    BuiltBatch,
    Guard,
    Guards,
    Payload,
    ProducerProgress,
    UniformBatch,
)
from hastore.store.append.topic_table import TopicTable
from hastore.store.append.uniform_batch import read_uniform_batch
from hastore.store.derived.consume_queue import GrownQueues
from hastore.store.derived.contract import Dispatched, is_of_transaction
from hastore.store.derived.transactions import OpenTransactions
from hastore.store.message_store import PullStatus


@dataclass
class FakePut:
    status: Status
    offset: int | None = None
    end_offset: int | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    store_timestamp_ms: int | None = None
    duplicate: bool = False
    reason: str | None = None


@dataclass
class FakePull:
    status: PullStatus
    next_queue_offset: int = 0
    min_queue_offset: int = 0
    max_queue_offset: int = 0
    records: bytes = b""
    count: int = 0
    last_offset: int | None = None
    sizes: list[int] = field(default_factory=list)
    needs_offset: int | None = None


OK, ILLEGAL = Status.PUT_OK, Status.MESSAGE_ILLEGAL


class FakeStore:
    """A log in memory with real offsets; a queue is a list of (offset, size)."""

    def __init__(self, host: str = "127.0.0.1:10911", default_queues: int = 4) -> None:
        self.store_host = Host.parse(host)
        self.wall_ms = SYSTEM_CLOCK.wall_ms
        self.default_queues = default_queues
        self.log = bytearray()
        self.starts: set[int] = set()
        self.damaged: list[int] = []  # what readers asked to be repaired
        self.units: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self.seen: dict[tuple[bytes, bytes], tuple[int, int, int, int]] = {}
        self.hidden: dict[str, int] = {}  # of deleted topics: where they begin anew
        self.min_offset = 0
        self.replay_problem: str | None = None
        self.forgotten: int | None = None  # what `producer_progress` says
        self.confirmed: int | None = None  # None: all is readable
        self.appends = 0
        self.grown = GrownQueues()
        self.cut_ms: int | None = None  # where searches by key are cut short
        self.bad: set[int] = set()  # offsets of damaged records
        self.time_spent = False  # whether lookups by time are cut short
        self.lock = threading.RLock()
        self.topic_table = TopicTable(
            MemoryFileSystem(), "", self, self.view, default_queues, file_size=1 << 20
        )
        fakes: Any = self
        self.transactions = OpenTransactions(MemoryFileSystem(), "", fakes, fakes, PLAIN)
        self.unread: list[Dispatched] | None = None  # what replay has not read; None: it reads all

    # What TopicTable asks of the queues.

    def has(self, topic: str) -> bool:
        return topic in self.topics()

    def shown(self, topic: str) -> set[int]:
        begin = self.hidden.get(topic, 0)
        queues = {queue: self.units.get((topic, queue)) for queue in self.queues_of(topic)}
        return {queue for queue, units in queues.items() if not units or units[-1][0] >= begin}

    def shown_topics(self) -> list[str]:
        return [topic for topic in self.topics() if self.shown(topic)]

    def show_from(self, begins: Mapping[str, int]) -> None:
        """Hide no records but those of deleted topics, and these from `shown` only."""
        self.hidden = dict(begins)

    def hide_before(self, topic: str, begin: int) -> None:
        self.hidden[topic] = begin

    def begin_of(self, topic: str) -> int:
        return 0

    def read(self, topic: str, queue_id: int, queue_offset: int, max_units: int) -> list[Any]:
        raise AssertionError("nothing is read again without a cut")

    @property
    def reader(self) -> FakeStore:
        return self

    @property
    def queues(self) -> FakeStore:
        return self

    without_waiting = staticmethod(without_waiting)

    @property
    def max_offset(self) -> int:
        return len(self.log)

    @property
    def flushed_offset(self) -> int:
        return len(self.log)

    @property
    def readable_offset(self) -> int:
        return len(self.log) if self.confirmed is None else self.confirmed

    @property
    def dispatched_offset(self) -> int:
        return self.unread[0].offset if self.unread else len(self.log)

    @property
    def whole_offset(self) -> int:
        return len(self.log)

    def wait_dispatched(self, offset: int, timeout_s: float) -> bool:
        return self.dispatched_offset >= offset

    def replay(self) -> None:
        """Let replay read what it has not read."""
        unread, self.unread = self.unread or [], None
        for record in unread:
            self.transactions.dispatch([record])

    def why_too_large(self, body_size: int, size: int) -> str | None:
        return None

    def find_topic(self, name: str) -> TopicConfig | None:
        return self.topic_table.find(name)

    def delivery_queue(self, topic: str, queue_id: int) -> int:
        return queue_id if queue_id < self.default_queues else 0

    @property
    def replayed_records(self) -> int:
        return len(self.starts)

    @contextlib.contextmanager
    def view(self, offset: int, max_bytes: int) -> Iterator[memoryview]:
        if not self.min_offset <= offset <= len(self.log):
            raise UsageError(f"offset {offset} is outside the log")
        yield memoryview(bytes(self.log[offset : offset + max_bytes]))

    def producer_progress(self, producer: bytes) -> ProducerProgress | None:
        numbers = [int(number) for pid, number in self.seen if pid == producer]
        return ProducerProgress(max(numbers, default=None), self.forgotten)

    def put_encoded(
        self, payloads: Sequence[Payload], guards: Guards | None = None
    ) -> list[list[FakePut]]:
        with self.lock:
            self.appends += 1
            of_each = guards or [None] * len(payloads)
            return [
                self._put(records_of(payload), guard)
                for payload, guard in zip(payloads, of_each, strict=True)
            ]

    def _put(self, payload: bytes, guard: Guard | None = None) -> list[FakePut]:
        results = []
        at = 0
        while at < len(payload):
            parts = find_parts(payload, at, len(payload))
            if parts is None:
                return [FakePut(ILLEGAL, reason=f"no record at byte {at}")]
            topic = payload[parts[6] : parts[6] + parts[7]]
            why = None if guard is None else guard(topic, _pid(payload, at, parts))
            if why is None:
                results.append(self._put_one(payload, at, parts))
            else:
                results.append(FakePut(Status.FORBIDDEN, reason=why))
            at += parts[0]
        return results

    def _put_one(self, payload: bytes, at: int, parts: Any) -> FakePut:
        size, _, _, _, _, _, topic_at, topic_size, properties_at = parts
        queue_id = int.from_bytes(payload[at + 12 : at + 16], "big")
        topic = payload[topic_at : topic_at + topic_size].decode()
        config = self.topic_table.recorded(topic)
        count = self.default_queues if config is None else config.write_queues
        if queue_id >= count:
            return FakePut(ILLEGAL, reason=f"queue {queue_id} of {count}")
        properties = payload[properties_at : at + size]
        pid = find_property(properties, b"HS_PID")
        key = (pid or b"", find_property(properties, b"HS_SEQ") or b"")
        if pid is not None and key in self.seen:
            offset, end, queue, queue_offset = self.seen[key]
            return FakePut(OK, offset, end, queue, queue_offset, 0, True)
        queue_units = self.units.setdefault((topic, queue_id), [])
        offset = len(self.log)
        record = bytearray(payload[at : at + size])
        now = self.wall_ms()
        patch_for_store(
            record, 0, queue_offset=len(queue_units), physical_offset=offset,
            store_timestamp_ms=now, store_host=self.store_host,
        )  # fmt: skip
        self.log += record
        queue_units.append((offset, size))
        if topic == TOPICS_TOPIC:
            self.topic_table.take(offset, size, properties)
        self.starts.add(offset)
        self.grown.note([Dispatched(offset, size, topic, queue_id, 0, 0, 0, 0, b"")])
        result = FakePut(OK, offset, offset + size, queue_id, len(queue_units) - 1, now)
        if pid is not None:
            self.seen[key] = (offset, offset + size, queue_id, len(queue_units) - 1)
        # Last: a test may interrupt the put anywhere.
        flags, place = parts[3], len(queue_units) - 1
        read = Dispatched(offset, size, topic, queue_id, place, flags, now, 0, properties)
        if self.unread is not None:
            self.unread.append(read)
        elif is_of_transaction(read):
            self.transactions.dispatch([read])
        return result

    def pull(
        self, topic: str, queue_id: int, queue_offset: int, *,
        max_messages: int, max_bytes: int, limit_offset: int, check_bodies: bool = True,
        codes: frozenset[int] | None = None,
    ) -> FakePull:  # fmt: skip
        assert codes is None, "only a real store knows tags"
        with self.lock:
            units = self.units.get((topic, queue_id))
            if units is None:
                return FakePull(PullStatus.NO_SUCH_QUEUE, queue_offset)
            readable = sum(1 for offset, size in units if offset + size <= limit_offset)
            if queue_offset > len(units):
                return FakePull(PullStatus.OFFSET_TOO_LARGE, len(units), 0, len(units))
            chosen: list[bytes] = []
            size = 0
            for offset, length in units[queue_offset : min(readable, queue_offset + max_messages)]:
                if chosen and size + length > max_bytes:
                    break
                chosen.append(bytes(self.log[offset : offset + length]))
                size += length
            status = PullStatus.FOUND if chosen else PullStatus.NO_NEW
            following = queue_offset + len(chosen)
            last = units[following - 1][0] if chosen else None
            waits_for = None if chosen else units[queue_offset : queue_offset + 1]
            return FakePull(
                status, following, 0, len(units), b"".join(chosen), len(chosen), last,
                [len(record) for record in chosen],
                sum(waits_for[0]) if waits_for else None,
            )  # fmt: skip

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        units = self.units.get((topic, queue_id))
        return None if units is None else (0, len(units))

    def readable_range(
        self, topic: str, queue_id: int, limit_offset: int
    ) -> tuple[int, int] | None:
        units = self.units.get((topic, queue_id))
        if units is None:
            return None
        return 0, sum(1 for offset, size in units if offset + size <= limit_offset)

    def topics(self) -> dict[str, dict[int, tuple[int, int]]]:
        found: dict[str, dict[int, tuple[int, int]]] = {}
        for (topic, queue_id), units in self.units.items():
            found.setdefault(topic, {})[queue_id] = (0, len(units))
        return found

    def queues_of(self, topic: str) -> dict[int, tuple[int, int]]:
        return self.topics().get(topic, {})

    def emptied_of(self, topic: str) -> dict[int, tuple[int, int]]:
        return {}

    def ended(self, topic: str, log_start: int) -> dict[int, int]:
        return {}

    def _records(self) -> list[Record]:
        at, found = 0, []
        while at < len(self.log):
            record = decode_record(self.log, at)
            found.append(record)
            at += record.size
        return found

    def query_key(
        self, topic: str, key: str, *, max_messages: int = 32, begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
    ) -> list[int]:  # fmt: skip
        found = [r for r in self._records() if r.topic == topic and key in r.keys]
        return [r.physical_offset for r in reversed(found)][:max_messages]

    def search_key(
        self, topic: str, key: str, *, max_messages: int, begin_ms: int, end_ms: int,
        limit_offset: int, max_bytes: int,
    ) -> FakeSearch:  # fmt: skip
        def found() -> dict[int, bytes]:
            offsets = self.query_key(topic, key, max_messages=max_messages)
            records = {offset: self.record_bytes(offset) or b"" for offset in offsets}
            return {at: raw for at, raw in records.items() if at + len(raw) <= limit_offset and raw}

        return FakeSearch(found, self.cut_ms, sorted(self.bad, reverse=True))

    def record_bytes(self, offset: int) -> bytes | None:
        record = self.record_at(offset)
        if record is None or offset in self.bad:
            return None
        return bytes(self.log[offset : offset + record.size])

    def is_damaged(self, offset: int) -> bool:
        return offset in self.bad

    def note_damage(self, offset: int) -> None:
        self.damaged.append(offset)

    note_wrong = note_damage

    def first_record(self) -> Record | None:
        return self.record_at(self.min_offset)

    def record_at(self, offset: int) -> Record | None:
        return decode_record(self.log, offset) if offset in self.starts else None

    def queue_offset_by_time(
        self, topic: str, queue_id: int, timestamp_ms: int,
        is_spent: Callable[[], bool] = lambda: False,
    ) -> int:  # fmt: skip
        if self.time_spent:
            while not is_spent():
                pass
            return 0
        for r in self._records():
            right = (r.topic, r.queue_id) == (topic, queue_id)
            if right and r.store_timestamp_ms >= timestamp_ms:
                return r.queue_offset
        return len(self.units[topic, queue_id])


class FakeSearch:
    """A search by key that finds everything in one step."""

    def __init__(
        self, find: Callable[[], dict[int, bytes]], cut_ms: int | None, unreadable: list[int]
    ) -> None:
        self._find = find
        self.found: dict[int, bytes] = {}
        self.cut_ms = cut_ms
        self.cut_offset: int | None = None
        self.unreadable = unreadable
        self.ended = False

    def step(self) -> None:
        self.found, self.ended = self._find(), True

    def cut_short(self) -> None:
        self.cut_ms, self.ended = 0, True


class FakeTransfer:
    """Confirms puts at once, or, with `hold`, when the test calls `end_all`."""

    def __init__(self) -> None:
        self.hold = False
        self.after_done: Callable[[], None] = lambda: None
        self.level = "SYNC_MEM(1)"
        self.waiting: list[tuple[int, float, Need, Callable[[Outcome, str], None]]] = []

    def add(
        self, end_offset: int, deadline_ms: float, need: Need,
        done: Callable[[Outcome, str], None], *, epoch: int | None = None,
    ) -> None:  # fmt: skip
        if self.hold:
            self.waiting.append((end_offset, deadline_ms, need, done))
        else:
            done(Outcome.CONFIRMED, "MASTER_DISK" if need is Need.MASTER_DISK else self.level)

    def end_all(self, outcome: Outcome = Outcome.CONFIRMED) -> int:
        ended, self.waiting = self.waiting, []
        for _, _, _, done in ended:
            done(outcome, self.level if outcome is Outcome.CONFIRMED else "MASTER_MEM")
        if ended:
            self.after_done()
        return len(ended)


class FakeBackend:
    """A node whose state and answers the test sets."""

    def __init__(self, node: int = 1, *, writable: bool = True, epoch: int = 65537) -> None:
        self.node = node
        self.store: Any = FakeStore()
        self.transfer: Any = FakeTransfer()
        self.writable = writable
        self.ends = False
        self.sync = True
        self.unconfirmable: str | None = None
        self.unflushable: str | None = None
        self.flush_sync = False
        self.entries: list[tuple[int, int]] = [(epoch, 0)]
        self.history_is_whole = True  # False: it begins where the log does, as one of DLedger
        self.nodes: dict[int, str] = {}
        self.ha_addresses: dict[int, str] = {}
        self.reading: list[int] | None = None  # who serves reads; None: all but the master
        self.master: int | None = node if writable else None
        self.gate_closed = False
        self.removed: str | None = None  # why it serves no reads
        self.watchers: list[Callable[[], None]] = []
        self.kept = PositionMap()
        self.waits = False  # positions are taken over first
        self.elsewhere: str | None = None  # who knows the positions

    def put_encoded(self, payloads: Sequence[Payload], guards: Guards | None = None) -> Any:
        if self.gate_closed:
            raise NotStoredError("superseded", "SERVICE_NOT_AVAILABLE")
        more = () if guards is None else (guards,)
        results = self.store.put_encoded(payloads, *more)
        self.moved()
        return results

    def moved(self) -> None:
        for callback in self.watchers:
            callback()

    def outdated(self) -> str | None:
        return self.removed

    def writable_reason(self) -> str | None:
        return None if self.writable else "this node is a slave"

    def master_node(self) -> int | None:
        return self.master

    def can_confirm(self, sync_flush: bool) -> str | None:
        return self.unconfirmable

    def never_flushed(self) -> str | None:
        return self.unflushable

    def default_acks_all(self) -> bool:
        return self.sync

    def wait_limit_ms(self, need: Need) -> float:
        return 60_000.0

    def flush_each_put(self) -> bool:
        return self.flush_sync

    def epoch(self) -> int:
        return self.entries[-1][0]

    def history(self) -> Sequence[tuple[int, int]]:
        return self.entries

    def standing(self, history: EpochStarts, epoch: int, offset: int) -> tuple[Standing, int]:
        end, whole = self.store.max_offset, self.history_is_whole
        return check_position(history, end, epoch, offset, is_whole=whole)

    def positions_wait(self) -> bool:
        return self.waits

    def topics_wait(self) -> bool:
        return False

    def routes_wait(self) -> bool:
        return False

    def copies_broker(self) -> bool:
        return False

    def positions_elsewhere(self) -> str | None:
        return self.elsewhere

    def ha_address(self, node: int) -> str | None:
        return self.ha_addresses.get(node)

    def note_classic_slave(self, address: str) -> None:
        self.noted = address

    def kept_positions(self, group: str, topic: str) -> Mapping[int, Place]:
        return self.kept.find(group, topic)

    def master_map(self) -> MapInfo:
        return MapInfo(
            node=self.node,
            role="SYNC_MASTER" if self.writable else "SLAVE",
            epoch=self.epoch(),
            writable=self.writable,
            readable_offset=self.store.readable_offset,
            master_node=self.master,
            master_api=self.nodes.get(self.master) if self.master is not None else None,
            nodes=self.nodes,
            reason=self.writable_reason(),
            default_queues=self.store.default_queues,
            min_offset=self.store.min_offset,
            queues=self.store.topic_table.other_queues,
        )

    def without_remoting(self) -> set[int]:
        return set()

    def reading_nodes(self) -> Sequence[int]:
        if self.reading is not None:
            return self.reading
        return [number for number in self.nodes if number != self.master]

    def status(self) -> dict[str, Any]:
        return {"node": self.node, "role": self.master_map().role, "epoch": self.epoch()}

    def attach_api(self, api: ApiWaker) -> None:
        self.transfer.after_done = api.puts_done
        self.watchers.append(api.wake_readers)


def records_of(payload: Payload) -> bytes:
    """Return the records of a payload. Of one that was built, the store would read the same."""
    if not isinstance(payload, BuiltBatch):
        return payload
    read = read_uniform_batch(
        {payload.topic}, payload.longest_body, payload.longest_record, payload.payload
    )
    assert read is not None, "the store would refuse it, or append it the slow way"
    columns = msgspec.structs.astuple(payload)
    assert msgspec.structs.astuple(read) == columns[: len(msgspec.structs.fields(UniformBatch))]
    return payload.payload


def _pid(payload: bytes, at: int, parts: Any) -> bytes | None:
    return find_property(payload[parts[8] : at + parts[0]], b"HS_PID")
