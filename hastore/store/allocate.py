"""The warm-up thread: it has the next commit log file ready before it is needed.

The file is made under hastore's own directory and renamed into place when the log rolls over, so
that the log's directory never holds a file of another size or name: a RocketMQ would refuse it.
"""

import logging
import threading
from collections.abc import Callable

from hastore.errors import StoreError, StoreFullError
from hastore.service import Service
from hastore.store.filesystem import FileSystem

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # after a failure; a full disk heals by itself
_TAKE_TIMEOUT_S = 30.0


class AllocateService(Service):
    """Keep one spare file of full size; `take` hands it over by a rename."""

    def __init__(
        self,
        fs: FileSystem,
        spare_path: str,
        size: int,
        on_failure: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        super().__init__("AllocateMappedFileService", on_failure)
        self._fs = fs
        self._path = spare_path
        self._size = size
        self._changed = threading.Condition()
        self._wanted = False
        self._ready = False
        self._attempts = 0
        self._retry = False
        self.failure_reason: str | None = None  # why there is no spare, for the status

    def want(self) -> None:
        """Ask for a spare without waiting."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def wait_ready(self) -> None:
        """Wait until a spare is there; StoreFullError or StoreError when it could not be made."""
        with self._changed:
            if self._ready:
                return
            if self._retry and self.failure_reason is not None:
                raise StoreFullError(self.failure_reason)  # the thread tries again within a second
            attempts = self._attempts
            self._wanted = True
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: self._ready or self._attempts > attempts or self.stopping.is_set(),
                _TAKE_TIMEOUT_S,
            )
            if self._ready:
                return
            if done and self.failure_reason is not None:
                raise StoreFullError(self.failure_reason)
        raise StoreFullError(f"{self._path}: the next commit log file is not ready")

    def take(self, target: str) -> None:
        """Move the spare to `target`; raises what `wait_ready` raises. Durable after `sync_dir`."""
        self.wait_ready()
        with self._changed:
            self._fs.rename(self._path, target)
            self._ready = self._wanted = False

    def discard(self) -> None:
        """Remove the spare (after `stop`), so that a closed store holds nothing but its log."""
        with self._changed:
            self._ready = False
            if self._fs.exists(self._path):
                self._fs.remove(self._path)

    def run(self) -> None:
        """Make a spare whenever one is wanted; try again each second when that fails."""
        while not self.stopping.is_set():
            with self._changed:
                self._changed.wait_for(
                    lambda: self.stopping.is_set() or (self._wanted and not self._ready),
                )
            if self.stopping.is_set():
                return
            reason = self._make()
            with self._changed:
                self._attempts += 1
                self._ready = reason is None
                self._retry = reason is not None
                if reason is not None and self.failure_reason is None:
                    log.error("no room for the next commit log file: %s", reason)
                self.failure_reason = reason
                self._changed.notify_all()
                if reason is not None:
                    self._changed.wait_for(self.stopping.is_set, _RETRY_S)

    def wake(self) -> None:
        """Wake the thread and all who wait for it."""
        with self._changed:
            self._changed.notify_all()

    def _make(self) -> str | None:
        """Make the spare; return why not. What was reserved in vain is given back."""
        try:
            file = self._fs.open(self._path, create=True)
            try:
                if file.size > self._size:
                    file.truncate(0)
                file.allocate(self._size)
                file.sync()
            finally:
                file.close()
        except (OSError, StoreError) as failure:
            self._give_back()
            return str(failure)
        return None

    def _give_back(self) -> None:
        try:
            if self._fs.exists(self._path):
                self._fs.remove(self._path)
        except OSError as failure:
            log.error("%s could not be removed: %s", self._path, failure)
