"""The master's append: the records of many puts, joined and written to the log.

The appender validates outside the log's lock where it can. Under that lock it looks up duplicates,
gives out queue offsets, joins the records, fills in the fields that only the master knows (queue
offset, physical offset, store time and host) and writes. Two ways lead to the same bytes:

    uniform    every payload is a batch of records that are alike (uniform_batch.py), none of them
               was put before, and all fit into the current file: one write
    mixed      all other puts, record by record (validation.py): one write, or several if the
               current file has no room

In a log of entries each record gets an entry's header before it (EntryFraming), and a put that
needs another file is written record by record, so that only an entry that does not fit makes a
blank.

A queue offset or a sequence number counts as given out only after the log holds its record. Once
`put` returns, the records are in the page cache: they survive kill -9, not yet a power loss.

Two callers use `put`, both under the node's write gate: the API's thread, and retention's thread,
which appends committed positions again before their log files are removed.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from hastore.config.model import StoreConfig
from hastore.counters import Traffic
from hastore.errors import Status, StoreError, StoreUncertainError
from hastore.record.codec import Host, find_parts
from hastore.record.layout import (
    BLANK_SIZE,
    FLAG_BORN_IPV6,
    FLAG_IPV6,
    FLAG_PREPARED,
    HEADER_SIZES,
    IPV6_EXTRA,
    MIN_RECORD_SIZE,
    OFFSETS,
    OFFSETS_AT,
    PREFIX,
    STORE_AT,
    STORE_IPV4,
    STORE_IPV6,
    V1_MAGIC,
    store_at,
)
from hastore.record.topic_records import TOPICS_TOPIC
from hastore.store.append.dedup_window import DedupWindow, UnheldNumber
from hastore.store.append.queue_offsets import QueueOffsetTable
from hastore.store.append.results import (
    BuiltBatch,
    Guards,
    Payload,
    PutResult,
    UniformBatch,
    UniformResults,
)
from hastore.store.append.topic_table import TopicTable
from hastore.store.append.uniform_batch import EntryFraming, UniformAppend
from hastore.store.append.validation import PutValidator, ValidRecord
from hastore.store.log.commit_log import CommitLog

log = logging.getLogger(__name__)

_REPLAY_TIMEOUT_S = 5.0
_OK = Status.PUT_OK
_TOPICS = TOPICS_TOPIC.encode()
ValidatedPayload = tuple[bytes, list[ValidRecord | PutResult]]
Results = list[PutResult] | UniformResults


class Replay(Protocol):
    """What a put needs of replay (IndexBuildService)."""

    @property
    def dispatched_offset(self) -> int:
        """Return the offset up to which queue offsets and deduplication window are complete."""
        ...

    @property
    def blocked_reason(self) -> str | None:
        """Return why replay is stuck; None while it works."""
        ...

    def wait_dispatched(self, offset: int, timeout_s: float) -> bool:
        """Wait until replay has reached `offset`; False if it has not after `timeout_s`."""
        ...


class _MixedAppend:
    """The records of one append, gathered one by one. Used under the log's lock.

    The caller calls `add_payload` for each payload, writes `patched()` to the log, then calls
    `settle`.
    """

    def __init__(
        self, log: CommitLog, window: DedupWindow, table: QueueOffsetTable, now_ms: int
    ) -> None:
        self.start = log.max_offset
        self.size = 0
        self.pieces: list[bytes] = []
        self.patches: list[tuple[int, int, int]] = []  # position, queue offset, sysFlag
        self.advanced: dict[tuple[bytes, int], int] = {}  # (topic, queue) -> next queue offset
        self.fresh: dict[tuple[bytes, int], PutResult] = {}  # by (producer, sequence number)
        self.changes: list[tuple[int, int, bytes]] = []  # of topics: offset, size, properties
        self.runs: list[tuple[bytes, int, int]] = []  # of records: topic, how many, their bytes
        self._fresh_topics: dict[tuple[bytes, int], bytes] = {}  # of the same records
        self._log = log
        self._lead = log.form.lead
        self._window = window
        self._table = table
        self._now_ms = now_ms

    def add_payload(
        self, payload: bytes, entries: list[ValidRecord | PutResult]
    ) -> list[PutResult]:
        """Add the new, valid records of a payload; returns the results of all its records."""
        out: list[PutResult] = []
        kept: list[ValidRecord] = []
        start, position, now_ms, lead = self.start, self.size, self._now_ms, self._lead
        advanced, patches, fresh = self.advanced, self.patches, self.fresh
        is_new = self._window.is_new
        for entry in entries:
            if isinstance(entry, PutResult):
                out.append(entry)
                continue
            _, size, flags, topic, queue_id, producer, delivers, belongs = entry
            if producer is not None and (producer in fresh or not is_new(producer)):
                known = self._duplicate_of(producer, topic, size, queue_id)
                if known is not None:
                    out.append(known)
                    continue
            if belongs is not None and self._table.next(*belongs) is None:
                out.append(self._no_queue(*belongs))  # it could not be put without its delay
                continue
            key = (topic, queue_id)
            queue_offset = advanced.get(key)
            if queue_offset is None:
                find = self._table.next if not delivers else self._table.next_delivered
                queue_offset = find(topic, queue_id)
                if queue_offset is None:
                    out.append(self._no_queue(topic, queue_id))
                    continue
            if flags & FLAG_PREPARED:  # prepared and rollback records are in no queue
                queue_offset = 0
            else:
                advanced[key] = queue_offset + 1
            position += lead
            offset = start + position
            result = PutResult(_OK, offset, offset + size, queue_id, queue_offset, now_ms)
            out.append(result)
            kept.append(entry)
            patches.append((position, queue_offset, flags))
            if topic == _TOPICS:
                self.changes.append((offset, size, _properties(payload, entry)))
            if producer is not None:
                fresh[producer] = result
                self._fresh_topics[producer] = topic
            position += size
        if len(kept) == len(entries) and not lead:
            self.pieces.append(payload)
        else:
            self.pieces += [payload[entry.at : entry.at + entry.size] for entry in kept]
        self.size = position
        if kept:
            self._note_runs(kept)
        return out

    def _note_runs(self, kept: list[ValidRecord]) -> None:
        """Note how many records of which topic a payload adds, for the counts by topic."""
        topic, count, size = kept[0].topic, 0, 0
        for entry in kept:
            if entry[3] != topic:
                self.runs.append((topic, count, size))
                topic, count, size = entry[3], 0, 0
            count += 1
            size += entry[1]
        self.runs.append((topic, count, size))

    def patched(self, host: Host, framing: EntryFraming | None) -> bytearray:
        """Return the joined records, with the fields filled in that only the master knows."""
        buffer = bytearray().join(self.pieces) if framing is None else framing.join(self.pieces)
        form = STORE_IPV6 if host.is_ipv6 else STORE_IPV4
        stamp = form.pack(self._now_ms, host.address, host.port)
        width = form.size
        pack_offsets = OFFSETS.pack_into
        start = self.start
        for position, queue_offset, flags in self.patches:
            pack_offsets(buffer, position + OFFSETS_AT, queue_offset, start + position)
            at = position + STORE_AT
            if flags & FLAG_BORN_IPV6:
                at += IPV6_EXTRA
            buffer[at : at + width] = stamp
        if framing is not None:
            framing.seal(buffer)
        return buffer

    def settle(self, end: int, topics: TopicTable) -> None:
        """Count queue offsets and sequence numbers as given out; the log ends at `end`."""
        for change in self.changes:
            topics.take(*change)
        self._table.give_out(self.advanced, end)
        self._window.add_all(self.fresh, end)

    def _duplicate_of(
        self, producer: tuple[bytes, int], topic: bytes, size: int, queue_id: int
    ) -> PutResult | None:
        """Return the result of a record that was put before; None for a new one."""
        earlier = self.fresh.get(producer)  # this append has the same number twice
        if earlier is not None:
            if self._fresh_topics[producer] != topic:
                return _of_another_topic(producer)
            return replace(earlier, duplicate=True)
        seen = self._window.find(*producer)
        if seen is UnheldNumber.NEW:
            return None
        if isinstance(seen, UnheldNumber):
            return PutResult(
                Status.MESSAGE_ILLEGAL,
                reason=f"HS_SEQ {producer[1]} is older than the last 1024 of its producer: the"
                " record may be stored already",
            )
        if not self._log.min_offset <= seen < self.start:
            return PutResult(_OK, seen, seen + size, queue_id, duplicate=True)
        try:
            with self._log.view(seen, MIN_RECORD_SIZE) as raw:
                size, magic, _, queue_id, _, queue_offset, _, flags = PREFIX.unpack_from(raw)
                at = store_at(flags)
                stored_ms = int.from_bytes(raw[at : at + 8], signed=True)
            if not self._has_topic(seen, magic, flags, topic):
                return _of_another_topic(producer)
        except OSError as failure:  # the record is stored nevertheless
            log.error("the original of a duplicate at offset %d cannot be read: %s", seen, failure)
            return PutResult(_OK, seen, seen + size, queue_id, duplicate=True)
        return PutResult(_OK, seen, seen + size, queue_id, queue_offset, stored_ms, True)

    def _has_topic(self, offset: int, magic: int, flags: int, topic: bytes) -> bool:
        """Whether the record at an offset of the log has this topic; reads only that part."""
        body_at = offset + HEADER_SIZES[flags & FLAG_IPV6]
        with self._log.view(body_at - 4, 4) as raw:
            body_size = int.from_bytes(raw)
        named = len(topic).to_bytes(1 if magic == V1_MAGIC and len(topic) < 256 else 2) + topic
        with self._log.view(body_at + body_size, len(named)) as raw:
            return bytes(raw) == named

    def _no_queue(self, topic: bytes, queue_id: int) -> PutResult:
        return PutResult(Status.MESSAGE_ILLEGAL, reason=self._table.why_not(topic, queue_id))


class Appender:
    """Append the records that clients put; thread-safe."""

    def __init__(
        self,
        commit_log: CommitLog,
        window: DedupWindow,
        table: QueueOffsetTable,
        topics: TopicTable,
        replay: Replay,
        *,
        next_ms: Callable[[int], int],
        config: StoreConfig,
        store_host: Host,
        why_full: Callable[[bytes], str | None] = lambda _topic: None,
    ) -> None:
        self._log = commit_log
        self._window = window
        self._table = table
        self._topics = topics
        self._replay = replay
        self._host = store_host
        self._next_ms = next_ms
        self._validator = PutValidator(config, store_host, commit_log.form, why_full)
        self.why_too_large = self._validator.why_too_large
        self.last_store_timestamp_ms = 0
        self.taken = Traffic()  # what was appended, by topic; changed under the log's lock

    def put(
        self, payloads: Sequence[Payload], term: int | None = None, guards: Guards | None = None
    ) -> tuple[Sequence[Results], int, int, bytearray | None]:
        """Append the valid records of all payloads; in a log of entries, as leader of `term`.

        A payload's guard may forbid records by their topic and their producer.

        Returns the results by payload, the start and end of the bytes appended (blanks included),
        and these bytes if the append was uniform.

        Raises StoreFullError, StoreBrokenError or StoreError if this call appended nothing, for
        example because replay does not reach the log's end in 5 s. If bytes were appended, or
        records may have been left in the log, a failure is not raised, because an exception would
        refuse records that may be stored. The results then say for each record whether it is
        stored, not stored, or in doubt. Any other exception is a defect, and says nothing about the
        log.
        """
        uniform = self._validator.uniform
        batches = [uniform(payload) for payload in payloads]
        if guards is not None:  # a batch that is forbidden goes the slow way, which says why
            batches = [
                None
                if batch is None or (guard is not None and guard(batch.topic, batch.producer))
                else batch
                for batch, guard in zip(batches, guards, strict=True)
            ]
        log, table, window = self._log, self._table, self._window
        end = log.max_offset
        if table.end_offset < end or window.end_offset < end:
            self._wait_for_replay(end)
        with log.lock:
            start = log.max_offset
            if table.end_offset != start or window.end_offset != start:
                self._adopt(start)
            now_ms = self.next_store_timestamp_ms()
            try:
                appended = self._append_uniform(batches, now_ms, term)
                if appended is not None:
                    results, data = appended
                    return results, start, log.max_offset, data
                validated = self._append_validated(self._validated(payloads, guards), now_ms, term)
            except StoreUncertainError as failure:  # one write for the whole put: all is in doubt
                validated = [
                    _not_stored(entries, Status.TIMEOUT, failure)
                    for _, entries in self._validated(payloads, guards)
                ]
            except OSError as failure:  # for example, the next file could not be opened
                raise StoreError(f"nothing was appended: {failure}") from failure
            return validated, start, log.max_offset, None

    def next_store_timestamp_ms(self) -> int:
        """Return the store time of the next append; the caller holds the log's lock."""
        self.last_store_timestamp_ms = self._next_ms(self.last_store_timestamp_ms)
        return self.last_store_timestamp_ms

    def _wait_for_replay(self, end: int) -> None:
        """Wait until queue offsets and deduplication window cover the log up to `end`."""
        if not self._replay.wait_dispatched(end, _REPLAY_TIMEOUT_S):
            reason = self._replay.blocked_reason or "replay has not reached the log's end yet"
            raise StoreError(f"the next queue offsets are not known yet: {reason}")

    def _adopt(self, end: int) -> None:
        """Move queue offsets and deduplication window to the log's end, if replay has reached it.

        Replay passes records to both, but no blanks. So if the log ends with a blank, both stop
        before it.
        """
        if self._replay.dispatched_offset < end:
            raise StoreError(
                "the next queue offsets are not known yet: another thread appended to the log"
                " meanwhile; put the records again"
            )
        self._table.advance(end)
        self._window.advance(end)

    def _append_uniform(
        self, batches: Sequence[UniformBatch | None], now_ms: int, term: int | None
    ) -> tuple[list[UniformResults], bytearray] | None:
        """Append to the current file by one write; returns the results and the bytes.

        Each payload must be a uniform batch of new records, and all of them must fit into the file.
        Otherwise nothing is appended, and None is returned.
        """
        log = self._log
        start = log.max_offset
        framing = None if term is None else EntryFraming(log, term)
        append = UniformAppend(start, self._window, self._table, now_ms, framing)
        for batch in batches:
            if batch is None or not append.add_batch(batch):
                return None
        size = append.end - start
        if not size or size + BLANK_SIZE > log.file_size or log.room(size):
            return None
        data = append.patched(self._host)
        log.record_end = log.append(data, None if framing is None else framing.entries())
        append.settle()
        self._count(batches)
        return append.results, data

    def _count(self, batches: Sequence[UniformBatch | None]) -> None:
        """Count what was appended by topic; mostly all batches of an append have the same."""
        topic, count, size = b"", 0, 0
        for batch in batches:
            assert batch is not None
            if batch.topic != topic:
                if count:
                    self.taken.add(topic, count, size)
                topic, count, size = batch.topic, 0, 0
            count += len(batch.starts)
            size += len(batch.payload)
        self.taken.add(topic, count, size)

    def _validated(
        self, payloads: Sequence[Payload], guards: Guards | None
    ) -> list[ValidatedPayload]:
        validate = self._validator.validate
        raws = [one.payload if isinstance(one, BuiltBatch) else one for one in payloads]
        if guards is None:
            return [validate(raw) for raw in raws]
        return [validate(raw, guard) for raw, guard in zip(raws, guards, strict=True)]

    def _append_validated(
        self, validated: Sequence[ValidatedPayload], now_ms: int, term: int | None
    ) -> list[list[PutResult]]:
        """Append mixed payloads, duplicates, and payloads that need a new file."""
        log = self._log
        size = sum([len(payload) for payload, _ in validated])
        if log.form.lead:
            size += log.form.lead * sum([len(entries) for _, entries in validated])
        if size + BLANK_SIZE <= log.file_size and not log.room(size):
            return self._append(validated, now_ms, term)
        return self._append_rolling(validated, now_ms, term)

    def _append(
        self, validated: Sequence[ValidatedPayload], now_ms: int, term: int | None
    ) -> list[list[PutResult]]:
        """Append to the current file, which has room for all payloads, by one write."""
        log = self._log
        append = _MixedAppend(log, self._window, self._table, now_ms)
        results = [append.add_payload(payload, entries) for payload, entries in validated]
        if append.size:
            framing = None if term is None else EntryFraming(log, term)
            data = append.patched(self._host, framing)
            log.record_end = log.append(data, None if framing is None else framing.entries())
            append.settle(log.record_end, self._topics)
            for run in append.runs:
                self.taken.add(*run)
        return results

    def _append_rolling(
        self, validated: Sequence[ValidatedPayload], now_ms: int, term: int | None
    ) -> list[list[PutResult]]:
        """Append payloads that need at least one more file, each by a write of its own.

        A payload is split only if it is larger than a file. After a failure the later payloads are
        not tried: none may overtake the one that failed.
        """
        log = self._log
        start = log.max_offset
        results: list[list[PutResult]] = [[] for _ in validated]
        lead = log.form.lead
        parts = _parts(validated, 0 if lead else log.file_size - BLANK_SIZE)
        for number, (index, part) in enumerate(parts):
            try:
                takes = any(isinstance(entry, ValidRecord) for entry in part[1])
                if takes and log.room(lead + len(part[0])):
                    log.roll()
                    self._adopt_blank()
                results[index] += self._append([part], now_ms, term)[0]
            except (StoreError, OSError) as failure:
                uncertain = isinstance(failure, StoreUncertainError)
                if log.max_offset == start and not uncertain:
                    raise
                status = Status.TIMEOUT if uncertain else Status.SERVICE_NOT_AVAILABLE
                results[index] += _not_stored(part[1], status, failure)
                for later, (_, entries) in parts[number + 1 :]:
                    results[later] += _not_stored(entries, Status.SERVICE_NOT_AVAILABLE, failure)
                break
        return results

    def _adopt_blank(self) -> None:
        """Move queue offsets and deduplication window past the blank that was appended."""
        end = self._log.max_offset
        self._log.record_end = end
        self._table.advance(end)
        self._window.advance(end)


def _parts(validated: Sequence[ValidatedPayload], limit: int) -> list[tuple[int, ValidatedPayload]]:
    """Return each payload with its index; one of more than `limit` bytes is split into records."""
    parts: list[tuple[int, ValidatedPayload]] = []
    for index, (payload, entries) in enumerate(validated):
        if len(payload) <= limit:
            parts.append((index, (payload, entries)))
            continue
        for entry in entries:
            piece = b""
            if isinstance(entry, ValidRecord):
                piece = payload[entry.at : entry.at + entry.size]
                entry = entry._replace(at=0)
            parts.append((index, (piece, [entry])))
    return parts


def _properties(payload: bytes, record: ValidRecord) -> bytes:
    """Return the properties of a record of a payload."""
    end = record.at + record.size
    parts = find_parts(payload, record.at, end)
    return b"" if parts is None else payload[parts[8] : end]


def _of_another_topic(producer: tuple[bytes, int]) -> PutResult:
    """Refuse a record that is no repeat: to acknowledge it would hide that it is not stored."""
    return PutResult(
        Status.MESSAGE_ILLEGAL,
        reason=f"HS_SEQ {producer[1]} of its HS_PID belongs to a message in another topic; an"
        " HS_PID is random and one producer's own",
    )


def _not_stored(
    entries: Sequence[ValidRecord | PutResult], status: Status, failure: Exception
) -> list[PutResult]:
    """Return the results of a payload whose write failed; invalid records keep their results."""
    reason = str(failure)
    return [
        entry if isinstance(entry, PutResult) else PutResult(status, reason=reason)
        for entry in entries
    ]
