"""Committed positions whose records retention removes: kept in a file, and rewritten to the log.

Before retention removes a log file, each node reads the commits in that file into KeptPositions and
saves them durably to `<store>/hastore/positions`. The node therefore knows them after a restart. A
master also appends again the positions that the log would then lack, because a new or resynced
slave has only the log. After a promotion or a restart as master it checks all kept positions.

The file has one JSON object per line. The first is {"version", "store_part", "lines", "crc32"}. The
others are commits as in the log, at least one for each group and topic. `store_part` counts how
often the store was set aside: positions kept from an earlier log are not valid for this one.

RetentionService's thread uses KeptPositions; any thread may call `find`.
"""

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import UNREADABLE, CorruptRecordError, Status, StoreError
from hastore.fs.filesystem import FileSystem
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.committed_positions import (
    MAX_TABLE_BYTES,
    READ_FACTOR,
    CommitBody,
    Pair,
    Place,
    PositionMap,
    below,
    decode_commit,
    encode_commit,
    origin_of,
)
from hastore.server.api.commit_records import (
    QUEUE,
    CommitReader,
    commit_key,
    commit_record,
    is_lost,
    read_commits,
)
from hastore.store.log_store import LogStore
from hastore.store.message_store import PutResult

log = logging.getLogger(__name__)

_VERSION = 1
_CHUNK_BYTES = 256 * 1024
_FILE_BYTES_MAX = 1 << 30
_QUEUES_A_RECORD = 512  # in a rewritten commit
_PUT_BYTES = 64 * 1024  # per append, so that clients' puts get their turn
_PAIRS_AT_ONCE = 64
_SAMPLE = 256  # commits whose size is looked at
_NEWEST = 4  # how many of a group's newest commits are compared


class _Head(msgspec.Struct, frozen=True):
    version: int
    store_part: int
    lines: int
    crc32: int


class _Rewritten(NamedTuple):
    """The rewritten places of a group in a topic, in records from `offset` on."""

    offset: int
    places: Mapping[int, Place]


class KeptPositions:
    """The positions that the log may have lost, for the current part of the store."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        store_part: Callable[[], int],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare; `store_part()` returns how often the store was set aside."""
        self._fs = fs
        self._path = f"{root}/hastore/positions"
        self._store_part = store_part
        self._kept = 0, PositionMap()  # (store part, its positions); replaced, not changed in place
        self._reader = CommitReader(clock, near_end=False)
        self._due: dict[Pair, None] = {}  # to be checked and rewritten, in this order
        self._rewritten: dict[Pair, _Rewritten] = {}  # in this epoch; see _is_rewritten
        self._epoch = 0

    def load(self) -> None:
        """Read the file that an earlier process saved. Raises OSError."""
        if not self._fs.exists(self._path):
            return
        raw = self._fs.read_bytes(self._path, _FILE_BYTES_MAX)
        try:
            head, kept = _parse(raw)
        except CorruptRecordError as error:
            log.error(
                "%s: %s; positions that were only in this file are lost on this node; another"
                " node of the group may have them",
                self._path, error,
            )  # fmt: skip
            return
        self._kept = head.store_part, kept

    def find(self, group: str, topic: str) -> Mapping[int, Place]:
        """Return the kept positions of a group in a topic, by queue."""
        part, kept = self._kept
        return kept.find(group, topic) if part == self._store_part() else {}

    @property
    def memory_bytes(self) -> int:
        """The memory that the positions take. Their rewritten records are smaller than that."""
        return self._kept[1].memory_bytes

    def file_bytes(self, store: LogStore) -> int:
        """Return about how large the file may become when records of the log are removed.

        All commits in the log count, of the size of the last ones: most repeat others. Raises
        OSError.
        """
        known = store.queues.queue_range(POSITIONS_TOPIC, QUEUE)
        if known is None:
            return self.memory_bytes
        first, end = known
        last = store.queues.read(POSITIONS_TOPIC, QUEUE, max(first, end - _SAMPLE), _SAMPLE)
        size = sum(unit.size for unit in last) // max(1, len(last))
        return min(MAX_TABLE_BYTES, self.memory_bytes + (end - first) * size)

    def gather(self, store: LogStore, end_offset: int, pause: Callable[[], bool]) -> bool:
        """Save the commits below `end_offset` durably, and return True.

        `pause()` is called between pieces of work; if it returns True, `gather` gives up and
        returns False. Raises StoreError, OSError.
        """
        part = self._store_part()
        if part != self._kept[0]:
            self._kept = part, PositionMap()
            self._due.clear()
            self._rewritten.clear()
        known = store.queues.queue_range(POSITIONS_TOPIC, QUEUE)
        if known is None:
            return True
        # Read from the beginning of the log. Drop kept positions whose commits are still in it: an
        # attempt that removed no files may have kept them, and a failover may have replaced those
        # commits since.
        entries, first = self._kept[1].entries, store.min_offset
        kept = PositionMap({pair: below(places, first) for pair, places in entries.items()})
        gone: dict[Pair, None] = {}
        at = known[0]
        limits = {"max_messages": 1024, "max_bytes": _CHUNK_BYTES, "limit_offset": end_offset}
        while (pulled := self._reader.next(store.reader, at, **limits)) is not None:
            records, at = pulled
            for offset, body in read_commits(records):
                if body is not None:
                    if not kept.has_room(body.group, body.topic, len(body.positions)):
                        kept.drop_topics(store.topic_table.gone())
                    if kept.apply_commit(body, offset, READ_FACTOR):
                        gone[body.group, body.topic] = None
                    else:
                        log.warning("too many positions: those of %s are dropped", body.group)
            if pause():
                return False
        if gone:
            # Keep also positions that a failover has cut: they lead a reader to the common point.
            for pair, places in entries.items():
                kept.merge(pair, {q: p for q, p in places.items() if q not in kept.find(*pair)})
            self._save(kept, part)
            self._kept = part, kept
            self._due.update(gone)
        return True

    def rewrite(
        self,
        epoch: int,
        store: LogStore,
        first_offset: int,
        put: Callable[[Sequence[bytes]], Sequence[Sequence[PutResult]]],
        now_ms: int,
        pause: Callable[[], bool],
    ) -> int:
        """As master of `epoch`, append the kept positions that the log lacks.

        Only commits at or beyond `first_offset` count as in the log. The first call in an epoch
        checks all kept positions. Returns the number of records appended. Raises the errors of
        `put`; the next call then tries the rest.
        """
        part, kept = self._kept
        if self._store_part() != part:
            return 0
        if epoch != self._epoch:
            self._due = dict.fromkeys(kept)
            self._rewritten.clear()  # the log may have been cut since then
            self._epoch = epoch
        written = 0
        while self._due:
            pairs: list[Pair] = []
            lacking: dict[Pair, Mapping[int, Place]] = {}
            records: list[bytes] = []
            size = 0
            for pair in self._due:
                pairs.append(pair)
                places = below(kept.find(*pair), first_offset)  # later commits are still in the log
                if places and not (
                    self._is_rewritten(first_offset, pair, places)
                    or _is_in_log(store, first_offset, pair, places)
                ):
                    lacking[pair] = places
                    records += (commit_record(body, now_ms) for body in _bodies(pair, places))
                    size = sum(map(len, records))
                if size >= _PUT_BYTES or len(pairs) >= _PAIRS_AT_ONCE:
                    break
            if records:
                offset = _lowest_offset([result for one in put(records) for result in one])
                for pair, places in lacking.items():
                    self._rewritten[pair] = _Rewritten(offset, places)
            for pair in pairs:
                del self._due[pair]
            written += len(records)
            if self._due and pause():
                break
        return written

    def _is_rewritten(self, first_offset: int, pair: Pair, places: Mapping[int, Place]) -> bool:
        """Whether this epoch has rewritten these places, and the log still has those records.

        `_is_in_log` alone is not enough: it reads only a group's newest commits, which may be of
        the group's other topics. Retention would then append the same positions again and again,
        and these copies would push messages out of the log.
        """
        rewritten = self._rewritten.get(pair)
        return (
            rewritten is not None
            and rewritten.offset >= first_offset
            and all(
                queue in rewritten.places and rewritten.places[queue].origin >= place.origin
                for queue, place in places.items()
            )
        )

    def _save(self, kept: PositionMap, part: int) -> None:
        lines = [
            encode_commit(body)
            for pair, places in kept.entries.items()
            for body in _bodies(pair, places)
        ]
        body = b"\n".join([*lines, b""])
        head = _Head(_VERSION, part, len(lines), zlib.crc32(body))
        self._fs.replace_bytes(self._path, msgspec.json.encode(head) + b"\n" + body)


def _parse(raw: bytes) -> tuple[_Head, PositionMap]:
    first, _, body = raw.partition(b"\n")
    try:
        head = msgspec.json.decode(first, type=_Head)
    except UNREADABLE as error:
        raise CorruptRecordError(f"its first line is unreadable: {error}") from error
    if head.version != _VERSION:
        raise CorruptRecordError(f"its version {head.version} is unknown")
    if zlib.crc32(body) != head.crc32:
        raise CorruptRecordError("the checksum of its lines is wrong")
    kept = PositionMap()
    for line in body.splitlines():
        commit = decode_commit(line)
        kept.apply_commit(commit, max(commit.origins.values(), default=0), READ_FACTOR)
    return head, kept


def _bodies(pair: Pair, places: Mapping[int, Place]) -> list[CommitBody]:
    """Return commits that repeat these places, each of bounded size."""
    found = list(places.items())
    return [
        CommitBody(
            *pair,
            {q: (p.queue_offset, p.epoch, p.offset) for q, p in found[n : n + _QUEUES_A_RECORD]},
            {q: p.origin for q, p in found[n : n + _QUEUES_A_RECORD]},
        )
        for n in range(0, len(found), _QUEUES_A_RECORD)
    ]


def _is_in_log(store: LogStore, first_offset: int, pair: Pair, places: Mapping[int, Place]) -> bool:
    """Whether the group's newest commits from `first_offset` on have these places or later ones."""
    missing = dict(places)
    key = commit_key(pair[0])
    try:
        offsets = store.reader.query_key(POSITIONS_TOPIC, key, max_messages=_NEWEST)
    except OSError as failure:  # query_key reads the records too
        if not is_lost(failure):
            raise
        return False
    for offset in offsets:
        record = store.reader.record_at(offset) if offset >= first_offset else None
        if record is None or not missing:
            break
        try:
            body = decode_commit(record.body)
        except CorruptRecordError:  # a client put a record that is not a commit
            continue
        if (body.group, body.topic) != pair:
            continue
        for queue in body.positions:
            place = missing.get(queue)
            if place is not None and origin_of(body, queue, offset) >= place.origin:
                del missing[queue]
    return not missing


def _lowest_offset(results: Sequence[PutResult]) -> int:
    """Return the lowest offset of the results. Raises StoreError if a record was refused."""
    for result in results:
        if result.status is not Status.PUT_OK:
            raise StoreError(f"positions could not be rewritten: {result.reason}")
    return min(result.offset or 0 for result in results)
