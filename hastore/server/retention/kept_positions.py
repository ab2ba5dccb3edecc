"""Committed positions whose records retention took: kept beside the log, and written anew.

Before retention takes a log file its commits are read into KeptPositions and saved, on every node:
`<store>/hastore/positions`, durable before the file goes. So a node knows them over a restart, and
as master it writes anew, at the log's end, what the log then lacks: a slave that is new, or copied
anew, has only the log. After a promotion or a restart as master it looks at all of them.

The file is JSON, a line each: {"version", "store_part", "lines", "crc32"}, then a commit as in the
log for each group and topic. `store_part` is how often the store was set aside: what was kept of an
earlier log says nothing about this one.

Owned by RetentionService's thread; `find` may be called from any other.
"""

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import CorruptRecordError, Status, StoreError
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.positions import (
    CommitBody,
    Pair,
    Place,
    PositionMap,
    below,
    decode_commit,
    encode_commit,
    origin_of,
)
from hastore.server.positions.commit_records import (
    QUEUE,
    CommitReader,
    commit_key,
    commit_record,
    is_lost,
    read_commits,
)
from hastore.store.fs.filesystem import FileSystem
from hastore.store.message_store import MessageStore, PutResult

log = logging.getLogger(__name__)

_VERSION = 1
_CHUNK_BYTES = 256 * 1024
_FILE_BYTES_MAX = 1 << 30
_QUEUES_A_RECORD = 512  # of positions written anew
_PUT_BYTES = 64 * 1024  # of one append: clients' puts go in between
_PAIRS_AT_ONCE = 64
_NEWEST = 4  # of a group's commits that are looked at


class _Head(msgspec.Struct, frozen=True):
    version: int
    store_part: int
    lines: int
    crc32: int


class _Anew(NamedTuple):
    """Where the log has a pair's places anew, from `offset` on."""

    offset: int
    places: Mapping[int, Place]


class KeptPositions:
    """The positions that the log may have lost, of the part of the store that is in use."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        store_part: Callable[[], int],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare; `store_part()` counts how often the store was set aside."""
        self._fs = fs
        self._path = f"{root}/hastore/positions"
        self._store_part = store_part
        self._kept = 0, PositionMap()  # of which part of the store; replaced whole
        self._reader = CommitReader(clock, near_end=False)
        self._due: dict[Pair, None] = {}  # to be written anew, in this order
        self._anew: dict[Pair, _Anew] = {}  # what this epoch wrote last; the index may not find it
        self._epoch = 0

    def load(self) -> None:
        """Read what an earlier process saved. OSError."""
        if not self._fs.exists(self._path):
            return
        raw = self._fs.read_bytes(self._path, _FILE_BYTES_MAX)
        try:
            head, kept = _parse(raw)
        except CorruptRecordError as error:
            log.error(
                "%s: %s; positions that only this file knew are lost here: another node of the"
                " group may have them",
                self._path, error,
            )  # fmt: skip
            return
        self._kept = head.store_part, kept

    def find(self, group: str, topic: str) -> Mapping[int, Place]:
        """Return what is kept of a group in a topic, by queue."""
        part, kept = self._kept
        return kept.find(group, topic) if part == self._store_part() else {}

    @property
    def memory_bytes(self) -> int:
        """The memory that all of it takes; written anew it takes less of the log."""
        return self._kept[1].memory_bytes

    def gather(self, store: MessageStore, end_offset: int, pause: Callable[[], bool]) -> bool:
        """Keep, durably, the commits below `end_offset`; StoreError, OSError.

        `pause()` is called between pieces of work; when it returns True the rest is given up, and
        so returns False.
        """
        part = self._store_part()
        if part != self._kept[0]:
            self._kept = part, PositionMap()
            self._due.clear()
            self._anew.clear()
        known = store.queues.queue_range(POSITIONS_TOPIC, QUEUE)
        if known is None:
            return True
        # From the log's beginning on: what was kept of bytes that still lay in the log is of an
        # attempt whose files did not go, and a flip may have cut these bytes and put others there.
        entries, first = self._kept[1].entries, store.min_offset
        kept = PositionMap({pair: below(places, first) for pair, places in entries.items()})
        gone: dict[Pair, None] = {}
        at = known[0]
        limits = {"max_messages": 1024, "max_bytes": _CHUNK_BYTES, "limit_offset": end_offset}
        while (pulled := self._reader.next(store.reader, at, **limits)) is not None:
            records, at = pulled
            for offset, body in read_commits(records):
                if body is not None:
                    if kept.take(body, offset):
                        gone[body.group, body.topic] = None
                    else:
                        log.warning("too many positions: those of %s are let go", body.group)
            if pause():
                return False
        if gone:
            for pair, places in entries.items():  # what was cut still leads to the common point
                kept.merge(pair, {q: p for q, p in places.items() if q not in kept.find(*pair)})
            self._save(kept, part)
            self._kept = part, kept
            self._due.update(gone)
        return True

    def write_anew(
        self,
        epoch: int,
        store: MessageStore,
        first_offset: int,
        put: Callable[[Sequence[bytes]], Sequence[Sequence[PutResult]]],
        now_ms: int,
        pause: Callable[[], bool],
    ) -> int:
        """Append what the log lacks from `first_offset` on, as master of `epoch`; returns how many
        records.

        Raises what `put` raises; what is left is tried again at the next call. All that is kept is
        looked at when the epoch is a new one to this process.
        """
        part, kept = self._kept
        if self._store_part() != part:
            return 0
        if epoch != self._epoch:
            self._due = dict.fromkeys(kept)
            self._anew.clear()  # the log may have been cut meanwhile
            self._epoch = epoch
        written = 0
        while self._due:
            pairs: list[Pair] = []
            lacking: dict[Pair, Mapping[int, Place]] = {}
            records: list[bytes] = []
            size = 0
            for pair in self._due:
                pairs.append(pair)
                places = below(kept.find(*pair), first_offset)  # the others were never taken
                if places and not (
                    self._is_written(first_offset, pair, places)
                    or _is_in_log(store, first_offset, pair, places)
                ):
                    lacking[pair] = places
                    records += (commit_record(body, now_ms) for body in _bodies(pair, places))
                    size = sum(map(len, records))
                if size >= _PUT_BYTES or len(pairs) >= _PAIRS_AT_ONCE:
                    break
            if records:
                offset = _check([result for one in put(records) for result in one])
                self._anew.update((pair, _Anew(offset, lacking[pair])) for pair in lacking)
            for pair in pairs:
                del self._due[pair]
            written += len(records)
            if self._due and pause():
                break
        return written

    def _is_written(self, first_offset: int, pair: Pair, places: Mapping[int, Place]) -> bool:
        """Whether this epoch wrote as much anew, which the log still has.

        The index finds a group's newest commits only, which may be of its other topics: by it alone
        each copy that goes would bring forth another one, and these drive messages out for ever.
        """
        anew = self._anew.get(pair)
        return (
            anew is not None
            and anew.offset >= first_offset
            and all(
                queue in anew.places and anew.places[queue].origin >= place.origin
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
    except msgspec.DecodeError as error:
        raise CorruptRecordError(f"its first line cannot be read: {error}") from error
    if head.version != _VERSION:
        raise CorruptRecordError(f"version {head.version} is not known")
    if zlib.crc32(body) != head.crc32:
        raise CorruptRecordError("its checksum is wrong")
    kept = PositionMap()
    for line in body.splitlines():
        commit = decode_commit(line)
        kept.take(commit, max(commit.origins.values(), default=0))
    return head, kept


def _bodies(pair: Pair, places: Mapping[int, Place]) -> list[CommitBody]:
    """Return the commits that repeat these places, each of a bounded size."""
    found = list(places.items())
    return [
        CommitBody(
            *pair,
            {q: (p.queue_offset, p.epoch, p.offset) for q, p in found[n : n + _QUEUES_A_RECORD]},
            {q: p.origin for q, p in found[n : n + _QUEUES_A_RECORD]},
        )
        for n in range(0, len(found), _QUEUES_A_RECORD)
    ]


def _is_in_log(
    store: MessageStore, first_offset: int, pair: Pair, places: Mapping[int, Place]
) -> bool:
    """Whether the newest of a group's commits, all from `first_offset` on, say as much."""
    missing = dict(places)
    key = commit_key(pair[0])
    try:
        offsets = store.reader.query_key(POSITIONS_TOPIC, key, max_messages=_NEWEST)
    except OSError as failure:  # it looks at the records too
        if not is_lost(failure):
            raise
        return False
    for offset in offsets:
        record = store.reader.record_at(offset) if offset >= first_offset else None
        if record is None or not missing:
            break
        try:
            body = decode_commit(record.body)
        except CorruptRecordError:  # of somebody else: it says nothing of this group
            continue
        if (body.group, body.topic) != pair:
            continue
        for queue in body.positions:
            place = missing.get(queue)
            if place is not None and origin_of(body, queue, offset) >= place.origin:
                del missing[queue]
    return not missing


def _check(results: Sequence[PutResult]) -> int:
    """Return where the first of them lies; StoreError when one was not appended."""
    for result in results:
        if result.status is not Status.PUT_OK:
            raise StoreError(f"positions could not be written anew: {result.reason}")
    return min(result.offset or 0 for result in results)
