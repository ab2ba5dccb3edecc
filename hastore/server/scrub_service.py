"""ScrubService: the thread that reads the log again, slowly, and repairs what has become damaged.

It reads what consumers may read and what is synced, at `store.scrub_rate`, from the log's begin to
its end, and begins again PASS_MS after it began. What it finds is fenced: a read of that range
fails with CorruptRecordError, also where only the CRC of an entry shows the damage. All else is
served. Then it is repaired from another node, if one has the bytes (repairing.py): at once, and
again at each pass. A damaged record that a reader meets is looked at right away, and so is damage
that keeps the log from being cut, or replay from going on: a node that is to follow, or its
consumers, wait for its repair, so that is tried again each minute. So is a message that waits and
whose properties are damaged, which no CRC of a plain log covers: it is compared with other nodes'.

Where a pass is, and what was found, is kept in hastore/scrub.json, so that a restart goes on with
the file that was being read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from hastore.clock import Clock
from hastore.errors import UNREADABLE, HastoreError, StoreError, UsageError
from hastore.fs.filesystem import FileSystem
from hastore.record.log_walk import Damage, LogWalk
from hastore.repair.mending import Mended
from hastore.service import OnFailure, Service
from hastore.store.log_store import LogStore

log = logging.getLogger(__name__)

START_S = 60.0  # a node that starts has other things to read
PASS_MS = 3_600_000.0  # from the begin of a pass to the next one's, at least
SAVE_MS = 60_000.0
DEFAULT_RATE = 1 << 20  # at which known damage is looked at again without `store.scrub_rate`
RETRY_S = 60.0  # after a failure of the disk that is no damage
BLOCKED_MS = 60_000.0  # from one look at what blocks a cut, or replay, to the next
NOTED_MAX = 1000  # ranges; a disk with more is to be replaced
ASKED_MAX = 100  # offsets that readers have met, and that wait
LOOK_RATE = 64 << 20  # bytes a second, at which a file is read up to such an offset

# Repairs the range that the walk has just returned, if the store's `times_cut` is still this.
Mend = Callable[[LogWalk, Damage, int], Mended]


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
        mend: Mend,
        remedy: Callable[[], str],
        on_failure: OnFailure,
    ) -> None:
        """Prepare; `rate` is in bytes a second, None: only what readers meet is looked at.

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
        self.repaired_bytes = 0  # since the start
        self._mend = mend
        self._remedy = remedy
        self._now = Progress()
        self._seen: dict[int, Damage] = {}  # of the pass that is under way
        self._unrepaired: dict[int, str] = {}  # why, by where the range begins
        self._asked: deque[int] = deque()
        self._looked_at: set[int] = set()  # since the last pass, at what readers had met
        self._blocked_ms: dict[int, float] = {}  # when `note_blocked` asked for a look, by offset
        self._wrong: set[int] = set()  # of these, what no CRC shows to be damaged
        self._is_looking = False
        self._is_wanted = False
        self._found: dict[int, Damage] = {}  # by where it begins; replaced, never changed
        self._walk: LogWalk | None = None
        self._cuts = 0  # `times_cut` of the store for which `_found` holds
        self._failure: str | None = None
        self._saved_ms = float("-inf")
        self._woken = threading.Event()

    # -- any thread --------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the progress, what was found, and what was repaired; offsets are bytes."""
        found, walk = self._damages(), self._walk
        return {
            "rate": self._rate,
            "offset": self._now.offset if walk is None else walk.offset,
            "end_offset": None if walk is None else walk.end,
            "passes": self._now.passes,
            "passed_wall_ms": self._now.passed_wall_ms,
            "scrubbed_bytes": self.scrubbed_bytes,
            "repaired_bytes": self.repaired_bytes,
            "damaged_bytes": self.damaged_bytes,
            "damages": [
                {
                    "offset": one.start, "end_offset": one.end, "reason": one.reason,
                    "not_repaired": self._unrepaired.get(one.start),
                }
                for one in found
            ],
        }

    def _damages(self) -> list[Damage]:
        """Return what is known to be damaged, and was not cut off since it was found."""
        end = self._store.max_offset
        return [one for one in self._found.values() if one.start < end]

    @property
    def damaged_bytes(self) -> int:
        """How many bytes are known to be damaged."""
        return sum(one.end - one.start for one in self._damages())

    def problems(self) -> list[str]:
        """Return what an operator must look at."""
        found, failure = self._damages(), self._failure
        told = [] if failure is None else [f"the log cannot be scrubbed: {failure}"]
        if found:
            first = found[0]
            more = f", and {len(found) - 1} other ranges" if len(found) > 1 else ""
            why = self._unrepaired.get(first.start)
            more += "" if why is None else f"; no other node can repair it now ({why})"
            told.append(
                f"the log is damaged: bytes [{first.start}, {first.end}): {first.reason}{more}; "
                f"reads of them fail at this node, all else is served: {self._remedy()}"
            )
        return told

    def scrub_now(self) -> None:
        """Begin the next pass without waiting for its time."""
        self._is_wanted = True
        self._woken.set()

    def note_read(self, offset: int) -> None:
        """Look at the record at this offset soon: a reader has found it damaged."""
        known = offset in self._looked_at or offset in self._asked
        known = known or any(one.start <= offset < one.end for one in self._found.values())
        if not known and len(self._asked) < ASKED_MAX:
            self._asked.append(offset)
            self._woken.set()

    def note_blocked(self, offset: int) -> None:
        """Look soon at this offset, also if the damage there is known: its repair is waited for.

        A node asks at each try to follow, and replay at each try to go on.
        """
        now_ms, asked_ms = self._clock.monotonic_ms(), self._blocked_ms.get(offset)
        is_due = asked_ms is None or now_ms - asked_ms >= BLOCKED_MS
        if is_due and len(self._asked) < ASKED_MAX:
            self._blocked_ms[offset] = now_ms
            self._asked.append(offset)
            self._woken.set()

    def note_wrong(self, offset: int) -> None:
        """Look soon at this record, and if it is valid, compare it with another node's.

        It is one that the store would not have taken as it is. Its reader asks at each try.
        """
        self._wrong.add(offset)
        self.note_blocked(offset)

    # -- the thread --------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the thread, so that it sees `stopping`."""
        self._woken.set()

    def start(self) -> None:
        """Fence what an earlier process found, then start the thread; the store is open."""
        self._cuts = self._store.times_cut
        self._load()
        super().start()

    def run(self) -> None:
        """Scrub until stopped."""
        wait_s = self.start_s
        # What an earlier process found may have been repaired, or cut away, since.
        with contextlib.suppress(_Stopped, OSError):  # the first pass meets it too
            self._look_again()
        while not self.stopping.is_set():
            begun_ms = self._clock.monotonic_ms()
            try:
                self._wait(wait_s)
                begun_ms = self._clock.monotonic_ms()
                self.scrub()
                self._failure = None
            except _Stopped:
                break
            except OSError as failure:
                if self._failure is None:
                    log.error("the log cannot be scrubbed: %s", failure)
                self._failure, wait_s = str(failure), RETRY_S
                continue
            took_ms = self._clock.monotonic_ms() - begun_ms
            wait_s = max(self.pass_ms - took_ms, 0.0) / 1000.0
        if self.scrubbed_bytes:
            self._save()

    def _wait(self, seconds: float) -> None:
        """Wait for the next pass, and look at what readers meet. Raises OSError, _Stopped."""
        until_ms = self._clock.monotonic_ms() + 1000.0 * seconds
        while not self.stopping.is_set():
            self._woken.clear()
            self.look_at_reads()
            left_ms = until_ms - self._clock.monotonic_ms()
            if left_ms <= 0 or self._is_wanted:
                self._is_wanted = False
                return
            self._woken.wait(left_ms / 1000.0)
        raise _Stopped

    def look_at_reads(self) -> None:
        """Look at what readers have met, in the thread of the service. Raises OSError, _Stopped.

        A queue may be damaged and name any offset, so the walk begins where an item is known to.
        """
        if self._is_looking:
            return
        self._is_looking = True
        try:
            while self._asked:
                self._forget_if_cut()
                offset, repaired = self._asked.popleft(), self.repaired_bytes
                begin, (limit, ends_whole) = self._aligned(offset), self._known_end()
                if begin <= offset < limit:
                    walk = LogWalk(
                        self._store.log.form, self._read, self._store.file_size, begin, offset + 1,
                        limit=limit, ends_whole=ends_whole,
                    )  # fmt: skip
                    cuts = self._cuts
                    is_there = self._through_or_moved(walk) and self.repaired_bytes == repaired
                    if is_there and offset in self._wrong:
                        self._replace(walk, offset, cuts)
                self._wrong.discard(offset)
                if self.repaired_bytes == repaired:
                    self._looked_at.add(offset)
        finally:
            self._is_looking = False

    def scrub(self) -> None:
        """Make a pass, or the rest of one, in the calling thread. Raises OSError, _Stopped."""
        self._looked_at.clear()
        self._blocked_ms.clear()
        self._look_again()
        if self._rate is None:
            return
        begin = self._begin()
        self._seen = {}
        while True:
            self._forget_if_cut()
            walk = self._walk = self._new_walk(begin)
            if walk is None or self._through_or_moved(walk):
                break
            begin = self._aligned(walk.offset)
        self._walk = None
        low = self._now.offset
        kept = {start: one for start, one in self._found.items() if start < low}
        self._take(kept | self._seen)
        self._now.offset, self._now.passes = 0, self._now.passes + 1
        self._now.passed_wall_ms = self._clock.wall_ms()
        self._save()

    def _through_or_moved(self, walk: LogWalk) -> bool:
        """Walk to the end, repair what is damaged, and note the rest; False if the log changed."""
        written_to, cuts = -1, self._cuts  # a look at a read may learn of a cut meanwhile
        try:
            while (damage := walk.next_damage()) is not None:
                if self._has_moved(walk, cuts):
                    return False
                self._note(damage)
                if damage.start >= written_to and self._is_mended(walk, damage, cuts):
                    written_to = damage.end
                else:
                    walk.skip(damage)
        except (StoreError, UsageError) as failure:
            if not self._has_moved(walk, cuts):
                raise OSError(str(failure)) from failure
        return not self._has_moved(walk, cuts)

    def _replace(self, walk: LogWalk, offset: int, cuts: int) -> None:
        """Write another node's item over the valid one that `walk` has come to, if it differs."""
        start, end = walk.recent[-1] if walk.recent else (offset, offset)
        if not start <= offset < end:
            return  # it was damaged
        again = LogWalk(
            self._store.log.form, self._read, self._store.file_size, walk.recent[0][0], start,
            limit=walk.limit,
        )  # fmt: skip
        if again.next_damage() is None and not self._has_moved(again, cuts):
            again.end = walk.limit
            self._is_mended(again, Damage(start, end, "a record that no client could put"), cuts)

    def _is_mended(self, walk: LogWalk, damage: Damage, cuts: int) -> bool:
        """Try to repair a range; `walk` then reads it again."""
        mended = self._mend(walk, damage, cuts)
        if not mended.written:
            why = "; ".join(mended.refusals) or "there is no other node"
            if self._unrepaired.get(damage.start) != why:
                log.error("bytes [%d, %d) are not repaired: %s", damage.start, damage.end, why)
            self._unrepaired[damage.start] = why
            return False
        log.warning(
            "bytes [%d, %d) of the log were damaged, and are repaired from %s",
            damage.start, damage.end, mended.source,
        )  # fmt: skip
        self.repaired_bytes += damage.end - damage.start
        self._unrepaired.pop(damage.start, None)
        self._seen.pop(damage.start, None)
        self._take({start: one for start, one in self._found.items() if start != damage.start})
        self._save()
        return True

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
        limit, ends_whole = self._known_end()
        end = min(store.readable_offset, store.flushed_offset, limit)
        if begin >= end:
            return None
        return LogWalk(
            store.log.form, self._read, store.file_size, begin, end,
            limit=limit, ends_whole=ends_whole,
        )  # fmt: skip

    def _known_end(self) -> tuple[int, bool]:
        """Return up to where the log may be read, and whether an item is known to end there.

        Replay knows where items end. What follows the damage that stops it is read all the same; on
        a slave that may end inside a record.
        """
        store = self._store
        if store.replay_problem is None:
            return store.dispatched_offset, True
        whole = store.log.record_end
        return (whole, True) if whole == store.max_offset else (store.flushed_offset, False)

    def _has_moved(self, walk: LogWalk, cuts: int) -> bool:
        """Whether the log was cut more than `cuts` times, or begins behind where the walk is."""
        return self._store.times_cut != cuts or walk.offset < self._store.min_offset

    def _forget_if_cut(self) -> bool:
        """Forget what was found before a cut: other records may be there; a pass finds the rest."""
        if self._store.times_cut == self._cuts:
            return False
        self._cuts, self._found, self._seen = self._store.times_cut, {}, {}
        self._unrepaired.clear()
        self._store.fence((), self._cuts)
        return True

    def _read(self, offset: int, size: int) -> bytes:
        """Read bytes of the log at the rate. Raises StoreError, UsageError if they are gone."""
        rate = LOOK_RATE if self._is_looking else self._rate or DEFAULT_RATE
        if self.stopping.wait(size / rate):
            raise _Stopped
        self.look_at_reads()
        with self._store.view(offset, size) as view:
            data = bytes(view)
        self.scrubbed_bytes += len(data)
        if self._clock.monotonic_ms() - self._saved_ms >= SAVE_MS:
            self._save()
        return data

    # -- what was found ----------------------------------------------------------------------------

    def _note(self, damage: Damage) -> None:
        self._seen[damage.start] = damage
        if self._found.get(damage.start) == damage:
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
        store, sound = self._store, set[int]()
        for start, one in self._found.items():
            if one.end <= store.min_offset or start >= store.readable_offset:
                sound.add(start)
                continue
            walk = LogWalk(
                store.log.form, self._read, store.file_size, start, one.end,
                limit=one.end, searches=False,
            )  # fmt: skip
            try:
                if walk.next_damage() is None:
                    sound.add(start)
            except (StoreError, UsageError):
                sound.add(start)
        if sound:
            self._take({start: one for start, one in self._found.items() if start not in sound})

    # -- the file ----------------------------------------------------------------------------------

    def _load(self) -> None:
        """Read how far the last process came. What cannot be read is begun anew."""
        try:
            if self._fs.exists(self._path):
                self._now = msgspec.json.decode(self._fs.read_bytes(self._path), type=Progress)
        except (OSError, *UNREADABLE) as failure:
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
