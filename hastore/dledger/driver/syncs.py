"""Syncs: which thread syncs the entries that an update has appended.

A link's thread syncs a little that it has just appended itself: no other thread has to wake up, and
what arrives meanwhile waits in the socket and shares the next sync. The store's flush thread does
the rest: much at a time, so that the link's thread goes on receiving; and for a while after a slow
sync, because the leader's heart beats on the link wait during a sync.
"""

import logging

from hastore.clock import Clock
from hastore.dledger.store.entry_store import EntryStore
from hastore.errors import StoreBrokenError, StoreError

log = logging.getLogger(__name__)

HERE_BYTES_MAX = 128 * 1024
SLOW_MS = 50.0
SLOW_FOR_MS = 1_000.0


class Syncs:
    """`due` and `take` belong to the driver's lock; `here` is called without it."""

    def __init__(self, store: EntryStore, clock: Clock, *, enabled: bool) -> None:
        self.due = False  # an update has asked for a sync
        self.enabled = enabled  # False with `store.flush: async`
        self._store = store
        self._clock = clock
        self._slow_until_ms = 0.0

    def take(self, now_ms: float, received_bytes: int) -> bool:
        """Whether the calling thread should sync, with `here`, once it has released the lock."""
        if not self.due or not self.enabled:
            return False
        if received_bytes > HERE_BYTES_MAX or now_ms < self._slow_until_ms:
            return False
        self.due = False
        return True

    def request(self) -> None:
        """Let the flush thread do what is due."""
        if self.due and self.enabled:
            self.due = False
            self._store.messages.flush_service.request()

    def here(self, now_ms: float) -> None:
        """Sync in this thread; the store then tells the driver. Raises StoreBrokenError."""
        try:
            self._store.flush()
        except StoreBrokenError:
            raise
        except StoreError as failure:  # no sync was begun; the flush thread tries again
            log.error("%s", failure)
            self._store.messages.flush_service.request()
        took_ms = self._clock.monotonic_ms() - now_ms
        if took_ms > SLOW_MS:
            self._slow_until_ms = now_ms + took_ms + SLOW_FOR_MS
