"""Store times: what a master gives its records, and where those of the log fall.

A master never lets store times fall by little: it repeats the last one until its clock has caught
up (`next_ms`). If the log is more than REPEATED_MS ahead of the clock, a clock was wrong. Repeating
would then give all later messages that wrong time, so the master goes on with its clock, and the
times fall. RocketMQ lets them fall at any time.

Between two falls the times rise, or fall back by at most REPEATED_MS. So a lookup by time searches
one such run after the other (`first_late` in derived/unit_files.py).
"""

import logging
from collections.abc import Callable, Sequence

from hastore.clock import Clock
from hastore.fs.filesystem import FileSystem
from hastore.store.derived.contract import REPEATED_MS, Dispatched, RecordColumns
from hastore.store.state.time_falls import Fall, read_falls, write_falls

log = logging.getLogger(__name__)

_KEPT = 4096  # falls; if there are more, the oldest are forgotten


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
        self.falls: tuple[Fall, ...] = ()  # replaced, never changed
        self._top_ms: int | None = None  # the greatest time since the last fall; None: not known
        self._end_offset = 0  # all records below it were taken

    @property
    def last_ms(self) -> int:
        """The greatest store time that replay has read since the last fall; 0 if none is known."""
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
        latest_ms = max([self.last_ms, *(fall.before_ms for fall in self.falls)])
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
        self.falls = tuple(fall for fall in known if fall.offset < offset)
        self._end_offset = offset
        self._top_ms = self._last_ms()
        return offset

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Note the falls of a batch durably; raises OSError."""
        if not batch:
            return
        top_ms = self._top_ms
        if isinstance(batch, RecordColumns):
            if batch.end_offset <= self._end_offset:
                return
            if top_ms is not None and batch.start_offset >= self._end_offset:
                risen_ms = batch.rises_from(top_ms, REPEATED_MS)
                if risen_ms is not None:
                    self._top_ms, self._end_offset = risen_ms, batch.end_offset
                    return
        found: list[Fall] = []
        for record in batch:
            offset, stored_ms = record[0], record[6]
            if offset < self._end_offset:
                continue
            if top_ms is not None and stored_ms < top_ms - REPEATED_MS:
                found.append(Fall(offset, top_ms))
                top_ms = stored_ms
            elif top_ms is None or stored_ms > top_ms:
                top_ms = stored_ms
        if found:
            log.warning("the store time falls at offset %d, by %d ms or more: a clock was set back",
                        found[0].offset, REPEATED_MS)  # fmt: skip
            self._save((*self.falls, *found)[-_KEPT:])
        self._top_ms, self._end_offset = top_ms, max(self._end_offset, batch[-1].end_offset)

    def truncate(self, log_end: int) -> None:
        """Forget falls at or beyond `log_end`, durably; the consume queues have been cut."""
        self._keep(lambda fall: fall.offset < log_end)
        self._end_offset = min(self._end_offset, log_end)
        self._top_ms = self._last_ms()

    def delete_before(self, min_offset: int) -> None:
        """Forget falls after which no record of before is left (retention)."""
        self._keep(lambda fall: fall.offset > min_offset)

    def flush(self) -> None:
        """Do nothing: each fall was noted durably."""

    def reset(self) -> None:
        """Forget everything, durably."""
        self._keep(lambda _fall: False)
        self._top_ms, self._end_offset = None, 0

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _keep(self, wanted: Callable[[Fall], bool]) -> None:
        kept = tuple(filter(wanted, self.falls))
        if kept != self.falls:
            self._save(kept)

    def _save(self, falls: tuple[Fall, ...]) -> None:
        write_falls(self._fs, self._root, falls)
        self.falls = falls
