"""ScrubService: the thread that reads the log again, slowly, and finds what has become damaged.

It reads what consumers may read and what is synced, at `store.scrub_rate`, from the log's begin to
its end, and begins again PASS_MS after it began. What it finds is fenced: a read of that range
fails with CorruptRecordError, also where only the CRC of an entry shows the damage. All else is
served. Known damage is looked at again before each pass, in case it was repaired.

Where a pass is, and what was found, is kept in hastore/scrub.json, so that a restart goes on with
the file that was being read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from hastore.clock import Clock
from hastore.errors import HastoreError, StoreError, UsageError
from hastore.fs.filesystem import FileSystem
from hastore.record.log_walk import Damage, LogWalk
from hastore.service import OnFailure, Service
from hastore.store.log_store import LogStore

log = logging.getLogger(__name__)

START_S = 60.0  # a node that starts has other things to read
PASS_MS = 3_600_000.0  # from the begin of a pass to the next one's, at least
SAVE_MS = 60_000.0
RETRY_S = 60.0  # after a failure of the disk that is no damage
NOTED_MAX = 1000  # ranges; a disk with more is to be replaced


class Progress(msgspec.Struct):
    """The content of hastore/scrub.json; offsets are bytes of the log, times ms since 1970."""

    offset: int = 0  # the pass is here
    passes: int = 0  # that came to the end of the log
    passed_wall_ms: int | None = None  # when the last one did
    damages: list[tuple[int, int, str]] = []


class _Stopped(Exception):
    """The service is stopping."""


class ScrubService(Service):
    """Look for damage in the log of an open store."""

    def __init__(
        self,
        store: LogStore,
        clock: Clock,
        *,
        fs: FileSystem,
        path: str,
        rate: int | None,
        remedy: Callable[[], str],
        on_failure: OnFailure,
    ) -> None:
        """Prepare; `rate` is in bytes a second, None: the service does nothing.

        `path` is that of the file with the progress. `remedy()` says what to do about damage.
        """
        super().__init__("ScrubService", on_failure=on_failure)
        self.scrubbed_bytes = 0  # since the start
        self.start_s, self.pass_ms = START_S, PASS_MS
        self._store = store
        self._clock = clock
        self._fs = fs
        self._path = path
        self._rate = rate
        self._remedy = remedy
        self._now = Progress()
        self._found: dict[int, Damage] = {}  # by where it begins; replaced, never changed
        self._walk: LogWalk | None = None
        self._cuts = 0  # `times_cut` of the store for which `_found` holds
        self._failure: str | None = None
        self._saved_ms = float("-inf")
        self._woken = threading.Event()

    # -- any thread --------------------------------------------------------------------------------

    def status(self) -> dict[str, Any] | None:
        """Return the progress and what was found; None if the log is not scrubbed."""
        if self._rate is None:
            return None
        found, walk = self._found, self._walk
        return {
            "rate": self._rate,
            "offset": self._now.offset if walk is None else walk.offset,
            "end_offset": None if walk is None else walk.end,
            "passes": self._now.passes,
            "passed_wall_ms": self._now.passed_wall_ms,
            "scrubbed_bytes": self.scrubbed_bytes,
            "damaged_bytes": self.damaged_bytes,
            "damages": [
                {"offset": one.start, "end_offset": one.end, "reason": one.reason}
                for one in found.values()
            ],
        }

    @property
    def damaged_bytes(self) -> int:
        """How many bytes are known to be damaged."""
        return sum(one.end - one.start for one in self._found.values())

    def problems(self) -> list[str]:
        """Return what an operator must look at."""
        found, failure = list(self._found.values()), self._failure
        told = [] if failure is None else [f"the log cannot be scrubbed: {failure}"]
        if found:
            first = found[0]
            more = f", and {len(found) - 1} other ranges" if len(found) > 1 else ""
            told.append(
                f"the log is damaged: bytes [{first.start}, {first.end}): {first.reason}{more}; "
                f"reads of them fail at this node, all else is served: {self._remedy()}"
            )
        return told

    def scrub_now(self) -> None:
        """Begin the next pass without waiting for its time."""
        self._woken.set()

    # -- the thread --------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the thread, so that it sees `stopping`."""
        self._woken.set()

    def start(self) -> None:
        """Fence what an earlier process found, then start the thread; the store is open."""
        if self._rate is not None:
            self._cuts = self._store.times_cut
            self._load()
        super().start()

    def run(self) -> None:
        """Scrub until stopped."""
        if self._rate is None:
            return
        self._wait(self.start_s)
        while not self.stopping.is_set():
            begun_ms = self._clock.monotonic_ms()
            try:
                self.scrub()
                self._failure = None
            except _Stopped:
                break
            except OSError as failure:
                if self._failure is None:
                    log.error("the log cannot be scrubbed: %s", failure)
                self._failure = str(failure)
                self._wait(RETRY_S)
                continue
            took_ms = self._clock.monotonic_ms() - begun_ms
            self._wait(max(self.pass_ms - took_ms, 0.0) / 1000.0)
        if self.scrubbed_bytes:
            self._save()

    def _wait(self, seconds: float) -> None:
        self._woken.wait(seconds)
        if not self.stopping.is_set():
            self._woken.clear()

    def scrub(self) -> None:
        """Make a pass, or the rest of one, in the calling thread. Raises OSError, _Stopped."""
        self._look_again()
        begin = self._begin()
        seen: dict[int, Damage] = {}
        while True:
            if self._forget_if_cut():
                seen.clear()
            walk = self._walk = self._new_walk(begin)
            if walk is None:
                break
            try:
                self._through(walk, seen)
            except (StoreError, UsageError) as failure:
                if not self._has_moved(walk):
                    raise OSError(str(failure)) from failure
            if not self._has_moved(walk):
                break
            begin = self._aligned(walk.offset)
        self._walk = None
        low = self._now.offset
        kept = {start: one for start, one in self._found.items() if start < low}
        self._take(kept | seen)
        self._now.offset, self._now.passes = 0, self._now.passes + 1
        self._now.passed_wall_ms = self._clock.wall_ms()
        self._save()

    def _through(self, walk: LogWalk, seen: dict[int, Damage]) -> None:
        """Walk to the end, or to a change of the log; note what is damaged."""
        while (damage := walk.next_damage()) is not None:
            if self._has_moved(walk):
                return
            seen[damage.start] = damage
            self._note(damage)
            walk.skip(damage)

    def _begin(self) -> int:
        """Return where a pass begins, or goes on: at an item."""
        offset = self._aligned(self._now.offset)
        self._now.offset = offset
        return offset

    def _aligned(self, offset: int) -> int:
        """Return the begin of the file that holds `offset`: an item begins there."""
        store = self._store
        offset = min(offset, store.max_offset)
        return max(store.min_offset, offset - offset % store.file_size)

    def _new_walk(self, begin: int) -> LogWalk | None:
        """Return a walk over what is there now; None if there is nothing from `begin` on."""
        store = self._store
        limit = store.dispatched_offset  # an item ends there
        end = min(store.readable_offset, store.flushed_offset, limit)
        if begin >= end:
            return None
        return LogWalk(store.log.form, self._read, store.file_size, begin, end, limit=limit)

    def _has_moved(self, walk: LogWalk) -> bool:
        """Whether the log was cut since, or begins behind where the walk is."""
        return self._store.times_cut != self._cuts or walk.offset < self._store.min_offset

    def _forget_if_cut(self) -> bool:
        """Forget what was found before a cut: other records may be there; a pass finds the rest."""
        if self._store.times_cut == self._cuts:
            return False
        self._cuts, self._found = self._store.times_cut, {}
        self._store.fence((), self._cuts)
        return True

    def _read(self, offset: int, size: int) -> bytes:
        """Read bytes of the log at the rate. Raises StoreError, UsageError if they are gone."""
        assert self._rate is not None
        if self.stopping.wait(size / self._rate):
            raise _Stopped
        with self._store.view(offset, size) as view:
            data = bytes(view)
        self.scrubbed_bytes += len(data)
        if self._clock.monotonic_ms() - self._saved_ms >= SAVE_MS:
            self._save()
        return data

    # -- what was found ----------------------------------------------------------------------------

    def _note(self, damage: Damage) -> None:
        known = self._found.get(damage.start)
        if known == damage:
            return
        log.error(
            "the log is damaged: bytes [%d, %d): %s; reads of them fail here",
            damage.start, damage.end, damage.reason,
        )  # fmt: skip
        if len(self._found) < NOTED_MAX:
            self._take({**self._found, damage.start: damage})
        self._save()

    def _take(self, found: dict[int, Damage]) -> None:
        """Make these ranges the damaged ones, and fence them."""
        for start, one in self._found.items():
            if start not in found:
                log.warning("bytes [%d, %d) of the log are sound now, or gone", start, one.end)
        self._found = dict(sorted(found.items()))
        ranges = [(one.start, one.end) for one in self._found.values()]
        if not self._store.fence(ranges, self._cuts):
            self._forget_if_cut()

    def _look_again(self) -> None:
        """Drop what is sound by now, as after a repair, and what retention has removed."""
        self._forget_if_cut()
        store, left = self._store, dict(self._found)
        for start, one in self._found.items():
            if one.end <= store.min_offset or start >= store.readable_offset:
                del left[start]
                continue
            walk = LogWalk(
                store.log.form, self._read, store.file_size, start, one.end,
                limit=max(one.end, store.dispatched_offset), searches=False,
            )  # fmt: skip
            try:
                if walk.next_damage() is None:
                    del left[start]
            except (StoreError, UsageError):
                del left[start]
        if len(left) < len(self._found):
            self._take(left)

    # -- the file ----------------------------------------------------------------------------------

    def _load(self) -> None:
        """Read how far the last process came. What cannot be read is begun anew."""
        try:
            if self._fs.exists(self._path):
                self._now = msgspec.json.decode(self._fs.read_bytes(self._path), type=Progress)
        except (OSError, msgspec.DecodeError) as failure:
            log.warning("%s: %s; the log is scrubbed from its begin", self._path, failure)
            return
        self._take({start: Damage(start, end, why) for start, end, why in self._now.damages})

    def _save(self) -> None:
        """Write how far this process is; a failure only costs a part of a pass."""
        self._saved_ms = self._clock.monotonic_ms()
        walk, now = self._walk, self._now
        found = [(one.start, one.end, one.reason) for one in self._found.values()]
        offset = now.offset if walk is None else walk.offset
        now = Progress(offset, now.passes, now.passed_wall_ms, found)
        try:
            self._fs.replace_bytes(self._path, msgspec.json.encode(now) + b"\n")
        except (OSError, HastoreError) as failure:
            log.warning("%s cannot be written: %s", self._path, failure)
