"""Decide whether another node's bytes may replace a damaged range, and write them. No I/O itself.

Another node's bytes replace a range only if all of this holds:

- They are valid items that fill the range, and continue what lies before it; what follows the range
  here continues them.
- The same epochs wrote them at both nodes, as far as the histories name the writer. In a log of
  entries the terms are in the entries.
- An item close to the range, before or after it, is the same at both nodes, by digest: so these
  are copies of one log, also where no epoch says so. Not all of them must be: what rots often lies
  side by side, and in a plain log no CRC shows it in properties. If nothing sound lies close to the
  range, the epochs must name the writer.

All of a range is checked before any of it is written. Nothing else is written, and nothing is cut.
A power loss in the middle leaves a range that is still damaged, or in part repaired. A mix of old
and new bytes must not look valid, though a plain record's CRC covers only its body. So the first
bytes of all items are cleared, then all else is written, then the first bytes; each is synced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, Protocol

from hastore.errors import HastoreError
from hastore.ha.rules.epochs import CLASSIC_EPOCH, FLOOR_EPOCH, EpochStarts, epoch_of
from hastore.record.hashes import DEFAULT_ALGORITHM, new_digest
from hastore.record.log_format import LogFormat
from hastore.record.log_walk import Damage, LogWalk, following

NEAR_BYTES = 64 * 1024  # behind the range, and of an item that is compared
CHUNK_BYTES = 8 << 20  # in memory at a time
_NAMELESS = (CLASSIC_EPOCH, FLOOR_EPOCH)


HEAD_BYTES = 8  # size and magic of an item, or of a blank
Parts = Sequence[tuple[int, bytes]]  # (offset, bytes) of what is written together


class Unfit(HastoreError):
    """A node's bytes must not, or cannot, replace a range; the text says why."""


class Source(Protocol):
    """Another node's log. Its methods raise Unfit if the node cannot be asked."""

    where: str
    min_offset: int
    readable_offset: int

    def read(self, start: int, end: int) -> tuple[bytes, EpochStarts]:
        """Return bytes [start, end), and the (epoch, start) entries that cover them."""

    def digest(self, start: int, end: int) -> bytes:
        """Return the digest of bytes, by DEFAULT_ALGORITHM."""


class OwnLog(Protocol):
    """The log with the damage."""

    form: LogFormat
    file_size: int
    epochs: EpochStarts | None  # the history; None in a log of entries

    def read(self, offset: int, size: int) -> bytes:
        """Return at most so many bytes, in one file, as `record.log_walk.Read` says."""

    def write(self, parts: Parts, *, skip_unreadable: bool = False) -> None:
        """Write the bytes of all parts over those that are there, durably. Raises StoreError.

        With `skip_unreadable`, parts are left out whose pages the disk cannot read.
        """


@dataclass(frozen=True, slots=True)
class Mended:
    """What became of a damaged range."""

    damage: Damage
    source: str | None  # the node whose bytes fit; None: none
    refusals: tuple[str, ...] = ()  # why other nodes' bytes did not
    written: bool = False


class _Piece(NamedTuple):
    start: int
    end: int
    digest: bytes
    data: bytes | None  # None: fetched again, because all pieces together are long


class Mender:
    """Repairs the damaged ranges that a walk over the own log finds."""

    def __init__(self, own: OwnLog, sources: Sequence[Source], *, dry_run: bool = False) -> None:
        """Prepare; `sources` are tried in their order. With `dry_run` nothing is written."""
        self._own = own
        self._sources = sources
        self._dry_run = dry_run

    def mend(self, walk: LogWalk, damage: Damage) -> Mended:
        """Repair the range that `walk` has just returned, from the first source that fits.

        If it was written, the walk's next step reads it again. Raises StoreError if it could not be
        written.
        """
        refusals: list[str] = []
        for source in self._sources:
            try:
                pieces = self._examine(walk, damage, source)
                if not self._dry_run:
                    self._write(pieces, source)
            except Unfit as unfit:
                refusals.append(f"{source.where}: {unfit}")
                continue
            return Mended(damage, source.where, tuple(refusals), not self._dry_run)
        return Mended(damage, None, tuple(refusals))

    def _write(self, pieces: Sequence[_Piece], source: Source) -> None:
        for piece in pieces:
            data = piece.data
            if data is None:
                data = source.read(piece.start, piece.end)[0]
                if _digest(data) != piece.digest:
                    raise Unfit("its log has changed meanwhile")
            heads = self._heads(piece.start, data)
            cleared = bytearray(data)
            for at in heads:
                cleared[at - piece.start : at - piece.start + HEAD_BYTES] = bytes(HEAD_BYTES)
            # What the disk cannot read is damaged until it is written whole.
            self._own.write([(at, bytes(HEAD_BYTES)) for at in heads], skip_unreadable=True)
            self._own.write([(piece.start, bytes(cleared))])
            first = ((at, at - piece.start) for at in heads)
            self._own.write([(at, data[place : place + HEAD_BYTES]) for at, place in first])

    def _heads(self, start: int, data: bytes) -> list[int]:
        """Return where the items and blanks in valid bytes begin, which begin at `start`."""
        form, at, found = self._own.form, 0, []
        while at < len(data):
            found.append(start + at)
            left = self._own.file_size - (start + at) % self._own.file_size
            at += form.announced(data, at, len(data)) or form.check_blank(data, at, at + left)
        return found

    def _examine(self, walk: LogWalk, damage: Damage, source: Source) -> list[_Piece]:
        """Return the source's bytes for a range. Raises Unfit if they do not fit."""
        if damage.start < source.min_offset:
            raise Unfit(f"its log begins at {source.min_offset}: retention removed the bytes there")
        if damage.end > source.readable_offset:
            raise Unfit(f"its log is readable up to {source.readable_offset} only")
        pieces: list[_Piece] = []
        at, chain = damage.start, following(walk)
        while at < damage.end:
            fetched = _Fetched(source, at, self._own.epochs)
            theirs = LogWalk(
                self._own.form, fetched.read, self._own.file_size, at,
                min(damage.end, at + CHUNK_BYTES),
                limit=walk.limit, chain=chain, searches=False,
            )  # fmt: skip
            found = theirs.next_damage()
            if found is not None:
                raise Unfit(f"its bytes at {found.start} do not fit either: {found.reason}")
            data = fetched.taken(at, theirs.offset)
            whole = theirs.offset >= damage.end and not pieces
            pieces.append(_Piece(at, theirs.offset, _digest(data), data if whole else None))
            at, chain = theirs.offset, theirs.chain
        self._check_rest(damage, pieces, source)
        if self._has_same(damage, pieces):
            raise Unfit("it has the same bytes")
        beside = LogWalk(
            self._own.form, self._own.read, self._own.file_size, at,
            min(at + NEAR_BYTES, walk.file_end(at), walk.limit),
            limit=walk.limit, chain=chain, searches=False,
        )  # fmt: skip
        broken = beside.next_damage()
        if broken is not None and broken.start == at < walk.end:
            raise Unfit(f"what this node has from {at} on does not continue its bytes")
        near = [*zip_longest(reversed(walk.recent), beside.recent)]
        items = [one for pair in near for one in pair if one is not None]
        self._compare_near(items, (damage.start, at), source)
        return pieces

    def _has_same(self, damage: Damage, pieces: Sequence[_Piece]) -> bool:
        """Whether this log has a source's bytes already: what a CRC does not cover is alike."""
        [piece, *more] = pieces
        if more or piece.data is None or piece.end != damage.end:
            return False  # so long a range is damaged by its CRCs
        try:
            return self._own_bytes(damage.start, damage.end) == piece.data
        except OSError:
            return False

    def _check_rest(self, damage: Damage, pieces: Sequence[_Piece], source: Source) -> None:
        """Compare what the last item of the source has beyond the range, where this log is sound.

        The body of a damaged record may have looked like a record of the log.
        """
        end = pieces[-1].end
        if end == damage.end:
            return
        theirs, _ = source.read(damage.end, end)
        if self._own.read(damage.end, end - damage.end) != theirs:
            raise Unfit(f"its bytes [{damage.end}, {end}) differ from valid bytes of this node")

    def _compare_near(
        self, items: Sequence[tuple[int, int]], damaged: tuple[int, int], source: Source
    ) -> None:
        """Raise Unfit if no item close to the range is the same, or if nothing vouches for it.

        `items` are (start, end) of the sound ones, in the order in which they are compared.
        """
        compared = False
        for start, end in items:
            end = min(end, start + NEAR_BYTES)
            if start < source.min_offset or end > source.readable_offset:
                continue
            if _digest(self._own_bytes(start, end)) == source.digest(start, end):
                return
            compared = True
        if compared:
            raise Unfit(
                f"its log is another one: what both have beside [{damaged[0]}, {damaged[1]})"
                " differs, and is valid at both; `hastore pipeline audit` says in what"
            )
        epochs = self._own.epochs
        if epochs is None or _is_nameless(epochs, *damaged):
            raise Unfit("nothing sound lies beside the range, so that the logs may be different")

    def _own_bytes(self, start: int, end: int) -> bytes:
        found = bytearray()
        while start + len(found) < end:
            found += self._own.read(start + len(found), end - start - len(found))
        return bytes(found)


class _Fetched:
    """The bytes of a source from an offset on, each fetched once; checks who wrote them."""

    def __init__(self, source: Source, start: int, epochs: EpochStarts | None) -> None:
        self._source = source
        self._start = start
        self._epochs = epochs
        self._data = bytearray()

    def read(self, offset: int, size: int) -> bytes:
        """Return what the source has of the range. Raises Unfit."""
        end = min(offset + size, self._source.readable_offset)
        known = self._start + len(self._data)
        if known < end:
            data, epochs = self._source.read(known, end)
            if self._epochs is not None:
                _check_epochs(self._epochs, epochs, known, end)
            self._data += data
        return self.taken(offset, end)

    def taken(self, start: int, end: int) -> bytes:
        """Return bytes that were fetched."""
        return bytes(self._data[start - self._start : end - self._start])


def _check_epochs(own: EpochStarts, theirs: EpochStarts, start: int, end: int) -> None:
    """Raise Unfit if two histories name different writers of a byte in [start, end)."""
    places = {start, *(at for _, at in (*own, *theirs) if start < at < end)}
    for at in sorted(places):
        mine, other = epoch_of(own, at), epoch_of(theirs, at)
        if mine != other and FLOOR_EPOCH not in (mine, other):
            raise Unfit(f"epoch {other} wrote its bytes at {at}, and epoch {mine} those here")


def _is_nameless(epochs: EpochStarts, start: int, end: int) -> bool:
    """Whether the history does not name the writer of a byte in [start, end)."""
    places = (start, *(at for _, at in epochs if start < at < end))
    return any(epoch_of(epochs, at) in _NAMELESS for at in places)


def _digest(data: bytes) -> bytes:
    digest = new_digest(DEFAULT_ALGORITHM)
    digest.update(memoryview(data))
    return digest.digest()
