"""Growth: when the log's end was where, so that a distance in bytes can be told as a time.

Housekeeping notes the end each second while it moves. A slave that lacks what came after an offset
lags for as long as that offset is not the end any more. Older notes are thinned out: a lag is known
to about 1 % of itself.
"""

import threading
from bisect import bisect_right

NOTES_MAX = 3_000
_APART = 0.01  # the distance of two notes, as a part of their age


class Growth:
    """The ends of a log over time; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: list[int] = []  # rising
        self._times_ms: list[float] = []  # monotonic; when the log ended there, at the latest

    def note(self, end: int, now_ms: float) -> None:
        """Note where the log ends now. A log that was cut begins anew."""
        with self._lock:
            if self._ends and end < self._ends[-1]:
                self._ends, self._times_ms = [], []
            if not self._ends or end > self._ends[-1]:
                self._ends.append(end)
                self._times_ms.append(now_ms)
            if len(self._ends) > NOTES_MAX:
                self._thin_out(now_ms)

    def behind_ms(self, offset: int, now_ms: float) -> float:
        """Return for how long the log has had more than what is below `offset`; 0: since the last
        note at most.
        """
        with self._lock:
            at = bisect_right(self._ends, offset)
            return now_ms - self._times_ms[at] if at < len(self._ends) else 0.0

    def _thin_out(self, now_ms: float) -> None:
        """Drop notes that are near to others for their age: after a year some 1,500 are left."""
        ends, times = list[int](), list[float]()
        for end, time_ms in zip(self._ends, self._times_ms, strict=True):
            if not times or time_ms - times[-1] >= _APART * (now_ms - time_ms):
                ends.append(end)
                times.append(time_ms)
        self._ends, self._times_ms = ends, times
