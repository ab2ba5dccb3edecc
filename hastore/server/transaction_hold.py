"""From where on retention keeps the log for open transactions."""

from collections.abc import Callable, Iterable

from hastore.clock import Clock
from hastore.config.model import RemotingConfig
from hastore.record.transactions import Half


class TransactionHold:
    """Track for how long each open half message may still be asked for.

    By the wall clock it is kept from when it was stored on: for its timeout, or its immunity if
    that is longer, and for all checks. A clock that is set forward ends no hold: what an earlier
    look found counts on the monotonic clock, and from its first look on each is kept for at least
    as long as one without immunity. A clock that is set back keeps none for longer than one that
    was stored at its first look. Retention's thread calls this.
    """

    def __init__(
        self,
        halves: Callable[[], Iterable[Half]],
        clock: Clock,
        config: Callable[[], RemotingConfig],
    ) -> None:
        """Prepare; `halves()` returns the open transactions, in the log's order."""
        self._halves = halves
        self._clock = clock
        self._config = config
        # By the offset: when it was first looked at, and until when it is kept; monotonic ms.
        self._kept: dict[int, tuple[float, float]] = {}

    def held_from(self, late_ms: float) -> int | None:
        """Return the offset of the first half message to keep, or None.

        One is kept while its producers may be asked, and for `late_ms` more.
        """
        config = self._config()
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        checks_ms = config.transaction_check_max * config.transaction_check_interval_ms + late_ms
        usual_ms = config.transaction_timeout_ms + checks_ms
        before, self._kept = self._kept, {}
        found = None
        for half in self._halves():
            open_ms = max(usual_ms, 1_000.0 * (half.immunity_s or 0) + checks_ms)
            first_ms, until_ms = before.get(half.offset, (now_ms, now_ms + usual_ms))
            until_ms = max(until_ms, now_ms + half.stored_ms + open_ms - wall_ms)
            until_ms = min(until_ms, first_ms + open_ms)
            self._kept[half.offset] = first_ms, until_ms
            if found is None and now_ms < until_ms:
                found = half.offset
        return found
