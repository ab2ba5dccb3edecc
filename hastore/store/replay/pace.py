"""The pauses of replay: how long it waits before the next batch, so that small appends gather.

In a small batch each record costs several times as much as in a large one. Each wake-up takes the
interpreter from the appending thread, and that costs more than replay's own work. Replay pauses
less while a reader waits for new records.
"""

from collections.abc import Callable

VIEW_BYTES = 1 << 20  # the log's bytes in one batch: about a thousand records of 1 KiB
BULK_BYTES = 4 << 20  # the log's bytes in one batch, once the backlog is this large
TRICKLE_S = 0.002  # while appends come this close together, replay lingers longer
_LINGER_MAX_S = 0.01  # the longest linger
_GROWING_BYTES = 1 << 16  # a log that grows by this during a batch is under a bulk load
_REST = 9  # rest, as a multiple of the batch's time: throttles replay to 10 %
_LATE_MAX_BYTES = 1 << 30  # from this backlog on, replay is throttled to 50 % instead
_REST_MAX_S = 0.02


class ReplayPace:
    """Decide how long to wait before the next batch; used by replay's thread.

    `readers_wait` returns whether a reader waits for new records.
    """

    def __init__(self, linger_s: float) -> None:
        self._base_s = self._grown_s = linger_s
        self.readers_wait: Callable[[], bool] = lambda: False

    def quiet(self) -> None:
        """Return to the base linger time, because nothing was appended for a while."""
        self._grown_s = self._base_s

    def trickle(self) -> None:
        """Double the time for which small appends gather, because they follow each other."""
        self._grown_s = min(2 * self._grown_s, _LINGER_MAX_S)

    def linger_s(self) -> float:
        """Return how long replay lets small appends gather after the first one."""
        return self._base_s if self.readers_wait() else self._grown_s

    def rest_s(self, late: int, grown: int, spent_ms: float) -> float:
        """Return how long to rest after a batch that took `spent_ms`.

        `late` is the backlog in bytes, and `grown` is how much of it was appended during the batch.
        During a bulk load appends have priority, because replay catches up in a fraction of the
        load's time.
        """
        if late < VIEW_BYTES:
            self.trickle()
            return min(max(_REST * spent_ms / 1000, self.linger_s()), _LINGER_MAX_S)
        if late < BULK_BYTES or grown < _GROWING_BYTES:
            return 0.0
        share = _REST if late < _LATE_MAX_BYTES else 1
        return min(share * spent_ms / 1000, _REST_MAX_S)
