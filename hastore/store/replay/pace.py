"""How long replay leaves the interpreter to who appends, so that small appends gather.

A batch of few records costs each of them several times as much, and each wake-up takes the
interpreter from the thread that appends: more than all of replay's work. Readers that wait for what
is being appended shorten it.
"""

from collections.abc import Callable

VIEW_BYTES = 1 << 20  # of log for each batch: about a thousand records of 1 KiB
BULK_BYTES = 4 << 20  # the same, when as much is waiting
TRICKLE_S = 0.002  # appends that come within this time gather longer, up to:
_LINGER_MAX_S = 0.01
_GROWING_BYTES = 1 << 16  # of growth while a batch is replayed: more is coming
_REST = 9  # times as long as a batch took: then replay takes a tenth of the time,
_LATE_MAX_BYTES = 1 << 30  # as long as it is not later than this; then half of it
_REST_MAX_S = 0.02


class ReplayPace:
    """Say how long to wait before the next batch; used by replay's thread.

    `readers_wait` tells whether somebody waits for what is appended.
    """

    def __init__(self, linger_s: float) -> None:
        self._base_s = self._grown_s = linger_s
        self.readers_wait: Callable[[], bool] = lambda: False

    def quiet(self) -> None:
        """Take note that nothing came for a while."""
        self._grown_s = self._base_s

    def trickle(self) -> None:
        """Take note that small appends follow each other: they gather longer and longer."""
        self._grown_s = min(2 * self._grown_s, _LINGER_MAX_S)

    def linger_s(self) -> float:
        """Return how long a small append waits for company."""
        return self._base_s if self.readers_wait() else self._grown_s

    def rest_s(self, late: int, grown: int, spent_ms: float) -> float:
        """Return how long to rest after a batch that took `spent_ms`.

        `late`: bytes that are to be replayed yet, `grown` of them came in meanwhile. Bulk is let in
        first: replay makes up for it in a fraction of the time.
        """
        if late < VIEW_BYTES:
            self.trickle()
            return min(max(_REST * spent_ms / 1000, self.linger_s()), _LINGER_MAX_S)
        if late < BULK_BYTES or grown < _GROWING_BYTES:
            return 0.0
        share = _REST if late < _LATE_MAX_BYTES else 1
        return min(share * spent_ms / 1000, _REST_MAX_S)
