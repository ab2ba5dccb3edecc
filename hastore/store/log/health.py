"""Whether a store may still be written: a failed sync or write closes it for good."""

import logging
import threading
from collections.abc import Callable

from hastore.errors import StoreBrokenError, StoreMovedError

log = logging.getLogger(__name__)


class StoreHealth:
    """Keep the first failure after which the disk's content is unknown; thread-safe.

    After a failed fsync the kernel may have dropped the dirty pages, and the next fsync may report
    success. Only a restart, which recovers from the bytes on the disk, opens the store again.

    `on_failure` is called once for each reason, in the thread that met the failure.
    """

    def __init__(self, on_failure: Callable[[str, BaseException], None] | None = None) -> None:
        self.reason: str | None = None
        self._on_failure = on_failure
        self._guard = threading.Lock()

    def fail(self, what: str, failure: BaseException) -> StoreBrokenError:
        """Close the store; returns the error to raise, which names the first failure."""
        with self._guard:
            first = self.reason is None
            if first:
                self.reason = f"{what}: {failure}; restart the node to recover the store"
        error = StoreBrokenError(self.reason)
        if first:
            log.critical("the store is closed: %s", self.reason)
            if self._on_failure is not None:
                self._on_failure("store", error)
        return error

    def lose(self, reason: str) -> StoreMovedError:
        """Close the store because its folder was moved; returns the error to raise.

        `reason` replaces an earlier reason: the move was the cause of that failure too, for example
        because a file could not be opened any more.
        """
        error = StoreMovedError(reason)
        with self._guard:
            first, self.reason = self.reason != reason, reason
        if first:
            log.critical("the store is closed: %s", reason)
            if self._on_failure is not None:
                self._on_failure("store", error)
        return error

    def check(self) -> None:
        """Raise StoreBrokenError when the store is closed."""
        if self.reason is not None:
            raise StoreBrokenError(self.reason)
