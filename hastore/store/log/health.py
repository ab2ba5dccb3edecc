"""Whether a store may still be written: one failed sync or write closes it for ever."""

import logging
import threading
from collections.abc import Callable

from hastore.errors import StoreBrokenError, StoreMovedError

log = logging.getLogger(__name__)


class StoreHealth:
    """Remember the first failure that the disk cannot take back; thread-safe.

    After a failed fsync the kernel may have dropped the dirty pages and report success next time:
    only a restart, which recovers from what is really there, opens the store again.
    """

    def __init__(self, on_failure: Callable[[str, BaseException], None] | None = None) -> None:
        self.reason: str | None = None
        self._on_failure = on_failure
        self._guard = threading.Lock()

    def fail(self, what: str, failure: BaseException) -> StoreBrokenError:
        """Close the store for `what` and return the error to raise; the first reason stays."""
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
        """Close the store since its files are gone from their place; return the error to raise.

        This reason takes the place of an earlier one: what failed by path before was its effect.
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
