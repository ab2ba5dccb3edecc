"""The allocating thread: it reserves the next commit log file before the log needs it.

The spare file is made under hastore's own directory and renamed into place when the log rolls over.
So the log's directory never holds a file of another size or name, which RocketMQ would refuse.
Appending threads ask for the spare (`want`) and take it (`take_spare`), under the log's lock.

With `warm` (`store.warm_files`) the thread also reads all of each new file, in pieces, while it has
nothing else to do. The file's pages are then in the page cache before they are written. On
systems that allocate memory slowly, as many virtual machines do, a write into cached pages is about
ten times faster. The pages are clean: nothing is written, and the kernel may drop them.
"""

import contextlib
import logging
import threading
from collections import deque

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import NoLogFileError, StoreError, StoreFullError
from hastore.fs.filesystem import NO_ROOM, File, FileSystem
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)

_RETRY_S = 1.0  # after a failure, such as a full disk
_TAKE_TIMEOUT_S = 30.0
_WARM_BYTES = 1 << 20  # read at a time


class AllocateService(Service):
    """Keep one spare file of full size. Thread-safe; `run` runs in the service's own thread."""

    def __init__(
        self,
        fs: FileSystem,
        spare_path: str,
        size: int,
        *,
        on_failure: OnFailure,
        warm: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__("AllocateMappedFileService", on_failure=on_failure)
        self._fs = fs
        self._path = spare_path
        self._size = size
        self._changed = threading.Condition()
        self._wanted = False
        self._ready = False
        self._first = True
        self._attempts = 0
        self._retry = False
        self._warm = warm
        self._clock = clock
        self._cold: deque[tuple[File, int]] = deque()  # file to read ahead, next position
        self.failure_reason: str | None = None  # why there is no spare
        self._out_of_room = False  # whether `failure_reason` is a lack of room

    def want(self) -> None:
        """Ask for a spare without waiting."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def wait_ready(self) -> None:
        """Wait until a spare is ready.

        Raises StoreFullError if there is no room for it, NoLogFileError if it cannot be made for
        another reason.
        """
        with self._changed:
            if self._ready:
                return
            if self._retry and self.failure_reason is not None:
                raise self._failure(self.failure_reason)  # the thread will try again
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
                raise self._failure(self.failure_reason)
        raise NoLogFileError(
            f"{self._path}: the next commit log file was not reserved in {_TAKE_TIMEOUT_S:.0f} s;"
            " look whether the store's disk answers, then try again"
        )

    def take_spare(self, target: str) -> None:
        """Move the spare to `target`; durable after `sync_dir` of both directories.

        Raises StoreFullError if there is no room, NoLogFileError if there is no spare, StoreError
        if the spare cannot be moved for another reason. The next call tries again.
        """
        self.wait_ready()
        with self._changed:
            try:
                self._fs.rename(self._path, target)
            except OSError as failure:
                if isinstance(failure, FileNotFoundError):
                    self._ready = False  # somebody removed it: make another
                reason = f"{self._path} cannot become the next commit log file: {failure}"
                if self.failure_reason is None:
                    log.error("%s", reason)
                self._note(reason, failure)
                kind = StoreFullError if failure.errno in NO_ROOM else StoreError
                raise kind(reason) from failure
            self._ready = self._wanted = False
            self._note(None)

    def discard(self) -> None:
        """Remove the spare, after `stop`: a closed store keeps no empty file. Raises OSError."""
        with self._changed:
            self._ready = False
            if self._fs.exists(self._path):
                self._fs.remove(self._path)

    def warm_rest(self, path: str, position: int) -> None:
        """Let the thread read ahead the rest of a file in use; does nothing without `warm`."""
        if not self._warm:
            return
        try:
            file = self._fs.open(path, writable=False)
        except OSError as failure:
            log.warning("a log file is not read ahead: %s", failure)
            return
        with self._changed:
            self._cold.append((file, position))
            self._changed.notify_all()

    def run(self) -> None:
        """Make a spare whenever one is wanted; after a failure try again each second."""
        try:
            while not self.stopping.is_set():
                with self._changed:
                    self._changed.wait_for(
                        lambda: self.stopping.is_set() or self._lacking or bool(self._cold)
                    )
                    lacking = self._lacking
                if lacking:
                    self._provide()
                elif self._cold:
                    began = self._clock.monotonic_ms()
                    self._warm_piece()
                    self._rest(self._clock.monotonic_ms() - began)
        finally:
            self._drop_cold()

    @property
    def spare_bytes(self) -> int:
        """How many bytes of the disk the spare has; 0 without one."""
        with self._changed:
            return self._size if self._ready else 0

    @property
    def refusal(self) -> str | None:
        """Why there is no spare, and what to do; None if there is one, or none was wanted."""
        with self._changed:
            if self.failure_reason is None:
                return None
            why = self.failure_reason
            if self._out_of_room:
                return f"the disk is full: {why}; make room, and puts go on by themselves"
            return (
                f"the next log file cannot be made: {why}; look at the store's disk, and puts go on"
                " by themselves"
            )

    def _note(self, reason: str | None, failure: Exception | None = None) -> None:
        self.failure_reason = reason
        self._out_of_room = (
            isinstance(failure, StoreFullError) or getattr(failure, "errno", None) in NO_ROOM
        )

    def _failure(self, reason: str) -> StoreFullError:
        return (StoreFullError if self._out_of_room else NoLogFileError)(reason)

    @property
    def _lacking(self) -> bool:
        return self._wanted and not self._ready

    def _provide(self) -> None:
        failure = self._make()
        reason = None if failure is None else str(failure)
        with self._changed:
            self._attempts += 1
            self._ready = reason is None
            self._retry = reason is not None
            if reason is not None and self.failure_reason is None:
                log.error("the next commit log file cannot be reserved: %s", reason)
            self._note(reason, failure)
            self._changed.notify_all()
        if reason is not None:
            self._drop_cold()  # a removed file takes room until it is closed
            with self._changed:
                self._changed.wait_for(self.stopping.is_set, _RETRY_S)

    def wake(self) -> None:
        """Wake the service's thread and the threads that wait for it."""
        with self._changed:
            self._changed.notify_all()

    def _warm_piece(self) -> None:
        """Read the next piece of the first file in the queue."""
        file, at = self._cold[0]
        try:
            if file.pread(_WARM_BYTES, at):
                self._cold[0] = file, at + _WARM_BYTES
                return
        except OSError as failure:
            log.warning("a log file is not read ahead: %s", failure)
        self._close(self._cold.popleft()[0])

    def _rest(self, spent_ms: float) -> None:
        """Throttle reading ahead to 50 %, so that it does not delay appends."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.stopping.is_set() or self._lacking, spent_ms / 1000.0
            )

    def _drop_cold(self) -> None:
        while self._cold:
            self._close(self._cold.popleft()[0])

    def _close(self, file: File) -> None:
        """Close a file that was only read; a failure is only logged, because it loses nothing."""
        try:
            file.close()
        except OSError as failure:
            log.warning("a log file that was read ahead was not closed: %s", failure)

    def _make(self) -> Exception | None:
        """Make the spare. If that fails, free the reserved room and return the failure.

        The first call removes the spare of an earlier process: if a power loss interrupted a
        rename, the spare and the last log file may be the same file under two names.
        """
        try:
            if self._first and self._fs.exists(self._path):
                self._fs.remove(self._path)
            self._first = False
            with contextlib.closing(self._fs.open(self._path, create=True)) as file:
                if file.size > self._size:
                    file.truncate(0)
                file.allocate(self._size)
                file.sync()
                if self._warm:  # through another descriptor: `file` is closed below
                    self._cold.append((self._fs.open(self._path, writable=False), 0))
        except (OSError, StoreError) as failure:
            self._give_back()
            return failure
        return None

    def _give_back(self) -> None:
        try:
            if self._fs.exists(self._path):
                self._fs.remove(self._path)
        except OSError as failure:
            log.error("%s could not be removed: %s", self._path, failure)
