"""Take a backup: copy what the target lacks of a node's log, then write the manifest.

    see the store -> pieces that the target has already -> copy the rest, record by record checked
      -> small files -> see the store again: was anything cut? -> manifest -> remove what is old

Whatever goes wrong before the manifest leaves the backup before as it was. The pieces that were
whole then are named in `partial.json`, and the next run goes on with them. If the log was cut, or
retention removed a file before it was copied, the run looks again and keeps what still fits.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import xxhash

from hastore import __version__
from hastore.backup.backups import other_group, read_manifests, read_partial
from hastore.backup.items import ItemWalk
from hastore.backup.manifest import (
    LAST_BYTES,
    LOG,
    MANIFEST_BYTES_MAX,
    PARTIAL,
    STATE,
    Manifest,
    Piece,
    StateFile,
    digest,
    encode_manifest,
    is_torn,
    manifest_name,
    number_of,
)
from hastore.backup.source import Seen, Source, same_log, shared_end
from hastore.backup.target import Target
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Config, Mode
from hastore.errors import (
    CorruptRecordError,
    StoreBrokenError,
    StoreError,
    StoreFullError,
    UsageError,
)
from hastore.ha.node.node_state import Durable
from hastore.ha.rules.epochs import last_epoch
from hastore.store.offline.log_files import LogFile

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_ATTEMPTS = 10
_PIECES_MAX = 64  # of one log file; then it is copied anew, as one
_PAUSE_S = 0.2  # before another attempt: a cut takes longer than a look
_STEPS_S = 20  # with a bound on the rate: so many reads a second, so the load has no bursts
_CHUNK_LEAST = 64 << 10
OnProgress = Callable[[int, int], None]  # bytes of the log done, bytes due


@dataclass(frozen=True, slots=True)
class Taken:
    """A backup that was taken."""

    manifest: Manifest
    copied_bytes: int  # of the log
    kept_bytes: int  # of the log, which the target had
    removed: int  # objects of older backups that nothing needs any more
    held_back: Mapping[str, str]  # manifests for which all objects were left, and what is with them


class Pace:
    """Lets a copy wait, so that it reads at most `bytes_s` a second; None: as fast as it can."""

    def __init__(
        self,
        bytes_s: float | None,
        clock: Clock = SYSTEM_CLOCK,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """Begin now; `wait`, of seconds, takes the place of a real wait."""
        self._bytes_s = bytes_s
        self._clock = clock
        self._wait = wait or threading.Event().wait
        self._due_ms = clock.monotonic_ms()
        self.chunk = _CHUNK_BYTES
        if bytes_s is not None:
            self.chunk = max(_CHUNK_LEAST, min(_CHUNK_BYTES, int(bytes_s / _STEPS_S)))

    def took(self, size: int) -> None:
        """Wait, after `size` bytes were read, until the next may be. Time lost is not made up."""
        if self._bytes_s is None:
            return
        now_ms = self._clock.monotonic_ms()
        self._due_ms = max(self._due_ms, now_ms - 1_000.0 / _STEPS_S) + size * 1e3 / self._bytes_s
        if self._due_ms > now_ms:
            self._wait((self._due_ms - now_ms) / 1_000.0)


def take_backup(
    config: Config,
    target: Target,
    source: Source,
    *,
    keep: int = 2,
    allow_shorter: bool = False,
    pace: Pace | None = None,
    clock: Clock = SYSTEM_CLOCK,
    progress: OnProgress = lambda _done, _due: None,
) -> Taken:
    """Take a backup of the node of `config`; `keep` backups are left, this one included.

    `pace` bounds the rate at which the log is read.

    Raises UsageError if the target has backups of another group or another log, or, without
    `allow_shorter`, one with more of the log than this node has. Raises StoreBrokenError if the log
    is damaged, StoreError if store or target fail; the backups before are as they were then.
    """
    with target.locked():
        run = _Run(config, target, source, clock, progress, pace or Pace(None))
        return run.run(keep, allow_shorter)


class _Again(Exception):
    """The log has changed below what is being copied; `why` is for the last attempt."""


class _Run:
    def __init__(
        self,
        config: Config,
        target: Target,
        source: Source,
        clock: Clock,
        progress: OnProgress,
        pace: Pace,
    ) -> None:
        self._config = config
        self._pace = pace
        self._target = target
        self._source = source
        self._clock = clock
        self._progress = progress
        self._run = secrets.token_hex(6)  # a part of the names of this run's objects
        self._made = 0
        self._names = target.objects()
        self._backups, self._bad = read_manifests(target, self._names)
        self._number = 1 + max((number_of(name) or 0 for name in self._names), default=0)
        self._pieces: list[Piece] = []  # of this attempt
        self._damaged: int | None = None  # where the last attempt found no record

    def run(self, keep: int, allow_shorter: bool) -> Taken:
        seen = self._source.see()
        self._check_group(seen)
        bases = [(one.node, one.log) for one in (*self._backups[:1], *self._partial(seen))]
        for _ in range(_ATTEMPTS):
            try:
                manifest = self._attempt(seen, bases)
            except _Again as again:
                log.info("the log has changed during the backup: %s; looking again", again)
                why = str(again)
                bases = [(seen.node, tuple(self._pieces)), *bases]
                threading.Event().wait(_PAUSE_S)
                seen = self._source.see()
                continue
            self._check_order(manifest, allow_shorter)
            return self._finish(manifest, keep)
        raise StoreError(
            f"the log of {self._source.root} has changed faster than it was copied, last: {why};"
            " the backups before are as they were; try again, or another node"
        )

    def _attempt(self, seen: Seen, bases: list[tuple[Durable, tuple[Piece, ...]]]) -> Manifest:
        """Copy what is missing; return the manifest. Raises _Again if the log changed below it."""
        self._pieces, made_ms = [], self._clock.wall_ms()
        if seen.node.intent is not None:
            raise _Again("a cut is going on")
        self._pieces = self._without_crumbs(self._reusable(seen, bases))
        self._copy(seen)
        manifest = self._manifest(seen, made_ms)
        after = self._source.see()
        if not same_log(seen, after, manifest.end_offset):
            raise _Again("its end was cut, by a failover or a resync")
        if after.first > max(manifest.end_offset, seen.first):
            raise _Again("retention has removed all that was copied")
        return manifest

    # -- what may be backed up here --------------------------------------------------------------

    def _check_group(self, seen: Seen) -> None:
        """Raise UsageError if the target is not for backups of this group."""
        target = self._target
        foreign = [] if self._backups else target.foreign()
        if foreign:
            raise UsageError(
                f"{target.name} has no backup but other things, such as {foreign[0]}; give a"
                " folder of its own"
            )
        why = other_group(self._backups[0], self._config, seen.node) if self._backups else None
        if why is not None:
            raise UsageError(f"{target.name} has backups of {why}; give another target")

    def _check_order(self, manifest: Manifest, allow_shorter: bool) -> None:
        """Refuse a backup with less of the log than the one before: the same order as of logs."""
        if not self._backups or allow_shorter:
            return
        last = self._backups[0]
        had = (last_epoch(last.node.history), last.end_offset)
        has = (last_epoch(manifest.node.history), manifest.end_offset)
        if has < had:
            raise UsageError(
                f"node {manifest.node.node} has less of the log (epoch {has[0]}, end {has[1]}) than"
                f" backup {last.number} (epoch {had[0]}, end {had[1]}): take it from a node that is"
                " further, or give --allow-shorter, if a failover has cut that part"
            )

    def _partial(self, seen: Seen) -> list[Manifest]:
        """Return what a run that was broken off has left, if it is of this group."""
        found = read_partial(self._target, self._names)
        fits = found is not None and other_group(found, self._config, seen.node) is None
        return [found] if found is not None and fits else []

    # -- the log ---------------------------------------------------------------------------------

    def _reusable(self, seen: Seen, bases: list[tuple[Durable, tuple[Piece, ...]]]) -> list[Piece]:
        """Return the pieces, of one earlier backup or attempt, that begin this log."""
        best: list[Piece] = []
        for node, pieces in bases:
            end = shared_end(node, pieces[-1].end, seen) if pieces else 0
            fit: list[Piece] = []
            for one in pieces:
                if one.end > end or self._names.get(one.name) != one.end - one.start:
                    break
                if self._begins_late_enough(one, seen.first):
                    fit.append(one)
            further = fit and (not best or fit[-1].end > best[-1].end)
            if further and fit[0].start <= seen.first and self._is_same(fit[-1], seen):
                best = fit
        return best

    def _without_crumbs(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces without those of the last log file, if these are too many."""
        size = self._config.store.commitlog_file_size
        start = (pieces[-1].end - 1) // size * size if pieces else 0
        before = [one for one in pieces if one.start < start]
        return before if len(pieces) - len(before) >= _PIECES_MAX else pieces

    def _begins_late_enough(self, piece: Piece, first: int) -> bool:
        """Whether a piece is of the log that begins at `first` now.

        A plain log may begin a little earlier, where the piece does. Of a log of entries the node
        notes what comes before its first entry, so it must begin there.
        """
        if self._config.mode is Mode.CLASSIC:
            return piece.end > first
        return piece.start >= first

    def _is_same(self, piece: Piece, seen: Seen) -> bool:
        """Whether the node's log has the bytes of the end of a piece.

        Raises UsageError if it has others, and was not cut in this moment.
        """
        size = min(LAST_BYTES, piece.end - piece.start)
        file = self._source.file_of(piece.end - 1)
        if file is None:
            return False
        try:
            with self._source.opened(file) as opened:
                data = self._source.read(opened, size, piece.end - size - file.start)
        except FileNotFoundError:
            return False
        if digest(data) == piece.last_xxh3_128:
            return True
        now = self._source.see()
        if now.limit < piece.end or not same_log(seen, now, piece.end):
            raise _Again("its end was cut")
        raise UsageError(
            f"{self._target.name} has other bytes before offset {piece.end} than this node, though"
            " their epochs are the same: it is the backup of another log, or one of both is"
            " damaged; give another target, and run `hastore backup verify` and `hastore log"
            " verify`"
        )

    def _copy(self, seen: Seen) -> None:
        """Copy the log from the end of the pieces on, and add what is copied to them."""
        pieces = self._pieces
        at = pieces[-1].end if pieces else seen.first
        begin = pieces[0].start if pieces else seen.first
        self._require_room(seen.limit - at)

        def progress(offset: int) -> None:
            self._progress(offset - begin, seen.limit - begin)

        progress(at)
        while at < seen.limit:
            file = self._source.file_of(at)
            if file is None:
                raise _Again("retention has removed a file before it was copied")
            end = min(file.end, seen.limit)
            piece = self._copy_piece(file, at, end, progress)
            if piece is None:
                break
            pieces.append(piece)
            self._names[piece.name] = piece.end - piece.start
            at = piece.end
            if at < end:
                break  # the readable offset lies inside a record
            if at < seen.limit:
                self._note_partial(seen)

    def _copy_piece(
        self, file: LogFile, start: int, end: int, progress: Callable[[int], None]
    ) -> Piece | None:
        """Copy the whole records of [start, end), which lies in one file; None if there is none."""
        walk = ItemWalk(self._source.form, start, self._config.store.commitlog_file_size)
        name = self._new_name(f"{LOG}/{start:020d}-{end:020d}")
        whole, last = xxhash.xxh3_128(), b""
        try:
            with self._source.opened(file) as opened, self._target.new(name) as writer:
                at = start
                while at < end:
                    size = min(self._pace.chunk, end - at)
                    data = self._source.read(opened, size, at - file.start)
                    if not data:
                        break
                    self._pace.took(len(data))
                    at += len(data)
                    checked = walk.feed(data)
                    writer.write(checked)
                    whole.update(checked)
                    last = (last + bytes(checked[-LAST_BYTES:]))[-LAST_BYTES:]
                    progress(walk.offset)
        except FileNotFoundError as gone:
            raise _Again("retention has removed a file before it was copied") from gone
        except CorruptRecordError as damage:
            self._refuse_damage(walk.offset, damage)
        if walk.offset == start:
            self._target.remove(name)
            return None
        return Piece(
            start=start, end=walk.offset, name=name, xxh3_128=whole.hexdigest(),
            last_xxh3_128=digest(last), last_store_ms=walk.last_store_ms,
        )  # fmt: skip

    def _refuse_damage(self, offset: int, damage: CorruptRecordError) -> None:
        """Raise _Again: the log may have been cut there; StoreBrokenError if that stays so."""
        if self._damaged != offset:
            self._damaged = offset
            raise _Again(f"{damage}") from damage
        raise StoreBrokenError(
            f"{self._source.root}: {damage}, below what consumers may read: the log is damaged, and"
            " no backup was made; see `hastore log verify`, and back up another node"
        ) from damage

    def _require_room(self, size: int) -> None:
        free = self._target.free_bytes()
        if free is not None and size > free:
            self._remove_leftovers()
            free = self._target.free_bytes()
        if free is not None and size > free:
            raise StoreFullError(
                f"{self._target.name} has {free:,} bytes free of the {size:,} that this backup"
                " needs; nothing was copied, the backups before are as they were",
                needed_bytes=size,
            )

    def _remove_leftovers(self) -> None:
        """Remove what a run that was killed has left: else it would keep each later one out.

        Only a target that knows its room comes here. It is locked, so no run beside this one writes
        there.
        """
        if self._bad:  # they may need anything
            return
        needed = {name for one in self._backups for name in one.objects}
        needed |= {one.name for one in self._pieces}
        for name in [name for name in self._names if name.partition("/")[0] in (LOG, STATE)]:
            if name not in needed:
                self._target.remove(name)
                del self._names[name]

    # -- the manifest ----------------------------------------------------------------------------

    def _manifest(self, seen: Seen, made_ms: int) -> Manifest:
        end = self._pieces[-1].end if self._pieces else 0
        return Manifest(
            number=self._number,
            version=__version__,
            made_ms=made_ms,
            mode=self._config.mode.value,
            file_size=self._config.store.commitlog_file_size,
            addresses={number: one.api for number, one in self._config.nodes.items()},
            confirmed_offset=min(seen.confirmed, end),
            node=seen.node,
            log=tuple(self._pieces),
            files=self._copy_files(),
        )

    def _copy_files(self) -> tuple[StateFile, ...]:
        """Copy the small files, after the log: they say what was before its first file."""
        had = {one.path: one for backup in self._backups[:1] for one in backup.files}
        found = []
        for path, data in self._source.state_files().items():
            name = self._new_name(f"{STATE}/{path.replace('/', '-')}")
            one = StateFile(path=path, name=name, size=len(data), xxh3_128=digest(data))
            same = had.get(path)
            if (
                same is not None
                and (same.size, same.xxh3_128) == (one.size, one.xxh3_128)
                and self._names.get(same.name) == same.size
            ):
                found.append(same)
                continue
            with self._target.new(one.name) as writer:
                writer.write(data)
            self._names[one.name] = one.size
            found.append(one)
        return tuple(found)

    def _new_name(self, name: str) -> str:
        self._made += 1
        return f"{name}.{self._run}-{self._made}"

    def _note_partial(self, seen: Seen) -> None:
        """Note what is whole, for the next run if this one is broken off."""
        self._target.settle()
        partial = Manifest(
            number=self._number, version=__version__, made_ms=self._clock.wall_ms(),
            mode=self._config.mode.value, file_size=self._config.store.commitlog_file_size,
            addresses={}, confirmed_offset=0, node=seen.node, log=tuple(self._pieces), files=(),
        )  # fmt: skip
        self._target.replace(PARTIAL, encode_manifest(partial))

    def _finish(self, manifest: Manifest, keep: int) -> Taken:
        """Write the manifest, if all is there and nobody else wrote one; remove what is old."""
        target = self._target
        target.settle()
        self._names = target.objects()
        lacking = [name for name, size in manifest.objects.items() if self._names.get(name) != size]
        if lacking:
            raise StoreError(
                f"{target.name}/{lacking[0]} is not there as it was written: does something else"
                " remove files there? No backup was made"
            )
        if manifest_name(manifest.number) in self._names:
            raise StoreError(
                f"{target.name}: another run has written backup {manifest.number} meanwhile; see to"
                " it that one runs at a time, and try again"
            )
        target.replace(manifest_name(manifest.number), encode_manifest(manifest))
        kept = [manifest, *self._backups][: max(1, keep)]
        held_back = self._held_back(kept, keep)
        removed = self._remove_old(kept, held_back)
        own = f".{self._run}-"
        copied = sum(one.end - one.start for one in manifest.log if own in one.name)
        there = manifest.end_offset - manifest.start_offset - copied
        return Taken(manifest, copied, there, removed, held_back)

    def _held_back(self, kept: list[Manifest], keep: int) -> dict[str, str]:
        """Return the unreadable manifests that must stay, and why they are unreadable.

        One of a later version may need any object. So may a damaged one, until it would have been
        removed if it were whole: who mends it by hand has until then.
        """
        return {
            name: why
            for name, why in self._bad.items()
            if len(kept) < keep or (number_of(name) or 0) > kept[-1].number or not self._torn(name)
        }

    def _torn(self, name: str) -> bool:
        try:
            return is_torn(self._target.read(name, MANIFEST_BYTES_MAX))
        except FileNotFoundError:
            return False

    def _remove_old(self, kept: list[Manifest], held_back: Mapping[str, str]) -> int:
        """Remove the backups that are not kept, then what none of those that stay needs."""
        stay = {manifest_name(one.number) for one in kept} | set(held_back)
        needed = {name for one in kept for name in one.objects}
        old = [name for name in self._names if number_of(name) is not None and name not in stay]
        if not held_back:  # they may need anything
            old += [
                name
                for name in (*self._names, PARTIAL)
                if number_of(name) is None and name not in needed
            ]
        for name in old:  # manifests come first: none ever names what is not there
            self._target.remove(name)
        return len(old)
