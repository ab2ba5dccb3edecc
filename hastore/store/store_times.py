"""Store times: what a master gives its records, and where those of the log fall.

A master never lets store times fall by little: it repeats the last one until its clock has caught
up (`next_ms`). If the log is more than REPEATED_MS ahead of the clock, a clock was wrong. Repeating
would then give all later messages that wrong time, so the master goes on with its clock, and the
times fall. RocketMQ lets them fall at any time, and by little.

Between two falls the times rise. So a lookup by time searches one such run after the other
(`first_late` in derived/unit_files.py). If a RocketMQ broker's clock jitters, there are more falls
than are kept: the oldest small ones are left out then, and lookups there begin earlier than wanted.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from hastore.clock import Clock
from hastore.fs.filesystem import FileSystem
from hastore.store.derived.contract import REPEATED_MS, Dispatched, RecordColumns
from hastore.store.state.time_falls import NO_FALLS, Fall, Falls, read_falls, write_falls

log = logging.getLogger(__name__)

_NO_END = 2**63 - 1
_KEPT = 4096  # falls; if there are more, the oldest small ones go, then the oldest


class StoreTimes:
    """The falls of one log; a Dispatcher, called after the consume queues. Any thread may read."""

    def __init__(
        self, fs: FileSystem, root: str, clock: Clock, last_ms: Callable[[], int | None]
    ) -> None:
        """Prepare; `last_ms()` returns the store time of the last record in the consume queues."""
        self._fs = fs
        self._root = root
        self._clock = clock
        self._last_ms = last_ms
        self.falls = NO_FALLS  # replaced, never changed
        # The greatest time since the last fall that is not small, and since the last fall of any
        # size, which is the last time; None: not known.
        self._top_ms: int | None = None
        self._run_ms: int | None = None
        self._end_offset = 0  # all records below it were taken

    @property
    def last_ms(self) -> int:
        """The greatest store time that replay has read since the last fall that is not small.

        0 if none is known.
        """
        return self._top_ms or 0

    def next_ms(self, last_ms: int) -> int:
        """Return the store time of the next record; `last_ms` is that of the last put."""
        chosen_ms = now_ms = self._clock.wall_ms()
        latest_ms = now_ms + REPEATED_MS
        if chosen_ms < last_ms <= latest_ms:
            chosen_ms = last_ms
        replayed_ms = self._top_ms or 0
        if chosen_ms < replayed_ms <= latest_ms:
            chosen_ms = replayed_ms
        return chosen_ms

    def problem(self) -> str | None:
        """Return a text if messages of the log were stored in this node's future."""
        latest_ms = max([self.last_ms, *(fall.before_ms for fall in self.falls.all)])
        ahead_ms = latest_ms - self._clock.wall_ms()
        if ahead_ms <= REPEATED_MS:
            return None
        return (
            f"the log has messages whose store time is {ahead_ms / 1000:.0f} s ahead of this node's"
            " clock: this clock is behind, or that of a master is or was ahead. Compare the clocks"
            " of all nodes (`timedatectl`) and correct the wrong one. A master stores new messages"
            " with the time of its own clock; lookups by time may begin too early until those"
            " messages are removed or their time has come"
        )

    # -- replay -----------------------------------------------------------------------------------

    def load(self, offset: int, synced: bool) -> int:
        """Read the file, and forget falls at or beyond `offset`."""
        del synced  # it is replaced durably
        known = read_falls(self._fs, self._root)
        self.falls = _within(known, 0, offset)
        self._end_offset = offset
        self._go_on()
        return offset

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Note the falls of a batch durably; raises OSError."""
        if not batch:
            return
        top_ms, run_ms = self._top_ms, self._run_ms
        if isinstance(batch, RecordColumns):
            if batch.end_offset <= self._end_offset:
                return
            if run_ms is not None and batch.start_offset >= self._end_offset:
                risen_ms = batch.rises_from(run_ms, 0)
                if risen_ms is not None:
                    self._top_ms, self._run_ms = max(self.last_ms, risen_ms), risen_ms
                    self._end_offset = batch.end_offset
                    return
        found: list[Fall] = []
        small: set[int] = set()
        for record in batch:
            offset, stored_ms = record[0], record[6]
            if offset < self._end_offset:
                continue
            if top_ms is None or run_ms is None:
                top_ms = stored_ms
            elif stored_ms < run_ms:
                found.append(Fall(offset, top_ms))
                if stored_ms >= top_ms - REPEATED_MS:
                    small.add(offset)
                else:
                    top_ms = stored_ms
            run_ms = stored_ms
            top_ms = max(top_ms, stored_ms)
        if found:
            self._note(found, small)
        self._top_ms, self._run_ms = top_ms, run_ms
        self._end_offset = max(self._end_offset, batch[-1].end_offset)

    def _note(self, found: Sequence[Fall], small: Iterable[int]) -> None:
        """Note new falls durably, and say so."""
        known = self.falls
        small = known.small.union(small)
        large = next((fall for fall in found if fall.offset not in small), None)
        if large is not None:
            log.warning("the store time falls at offset %d, by %d ms or more: a clock was set back",
                        large.offset, REPEATED_MS)  # fmt: skip
        else:
            log.info("the store time falls at offset %d, by little: a clock was set back",
                     found[0].offset)  # fmt: skip
        self._save(_thinned(Falls((*known.all, *found), small, known.thinned_end)))

    def truncate(self, log_end: int) -> None:
        """Forget falls at or beyond `log_end`, durably; the consume queues have been cut."""
        self._keep(_within(self.falls, 0, log_end))
        self._end_offset = min(self._end_offset, log_end)
        self._go_on()

    def delete_before(self, min_offset: int) -> None:
        """Forget falls after which no record of before is left (retention)."""
        self._keep(_within(self.falls, min_offset + 1, _NO_END))

    def flush(self) -> None:
        """Do nothing: each fall was noted durably."""

    def reset(self) -> None:
        """Forget everything, durably."""
        self._keep(NO_FALLS)
        self._top_ms, self._run_ms, self._end_offset = None, None, 0

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _go_on(self) -> None:
        """Let the times go on from the last record in the consume queues."""
        self._top_ms = self._run_ms = self._last_ms()
        last = self.falls.all[-1:]
        if self._top_ms is not None and last and last[0].offset in self.falls.small:
            self._top_ms = max(self._top_ms, last[0].before_ms)

    def _keep(self, kept: Falls) -> None:
        if kept != self.falls:
            self._save(kept)

    def _save(self, falls: Falls) -> None:
        write_falls(self._fs, self._root, falls)
        self.falls = falls


def _within(falls: Falls, start: int, end: int) -> Falls:
    """Return the falls at offsets [start, end)."""
    kept = tuple(fall for fall in falls.all if start <= fall.offset < end)
    small = falls.small.intersection(fall.offset for fall in kept)
    thinned_end = min(falls.thinned_end, end)
    return Falls(kept, small, thinned_end if thinned_end >= start else 0)


def _thinned(falls: Falls) -> Falls:
    """Return at most _KEPT falls: the oldest small ones go, then the oldest."""
    excess = len(falls.all) - _KEPT
    if excess <= 0:
        return falls
    gone = [fall.offset for fall in falls.all if fall.offset in falls.small][:excess]
    small, thinned_end = falls.small.difference(gone), max(falls.thinned_end, *gone[-1:], 0)
    left = frozenset(gone)
    kept = tuple(fall for fall in falls.all if fall.offset not in left)
    return Falls(kept[-_KEPT:], small, thinned_end)
