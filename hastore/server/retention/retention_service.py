"""RetentionService: the thread that removes old files of the log.

Before the thread removes a file, it saves the positions committed in that file (KeptPositions); on
a master it also appends them again. Any thread may call `problems` and `keeps_files_for`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from hastore.clock import Clock
from hastore.config.model import Config
from hastore.errors import NotStoredError, StoreError
from hastore.server.retention.holds import CONFIRMED, Holds
from hastore.server.retention.kept_positions import KeptPositions
from hastore.service import OnFailure, Service
from hastore.store.message_store import MessageStore, PutResult

log = logging.getLogger(__name__)


class LogWriter(Protocol):
    """This node as the writer of its log: Member in mode classic."""

    config: Config

    @property
    def open_epoch(self) -> int:
        """The epoch in which this node takes writes; 0: none."""
        ...

    @property
    def confirms(self) -> bool:
        """Whether this node's log is ever confirmed."""
        ...


class LogReaders(Protocol):
    """The nodes that receive this node's log: HAService in mode classic."""

    def slave_offsets(self) -> dict[str, int]:
        """Return from which offset on each of them needs the log, by its name."""
        ...


class RetentionService(Service):
    """Delete whole old files by age and size.

    A master keeps the files that a linked slave has not reported. Every node, also a slave, keeps
    the files that it does not know to be confirmed. Each hold lapses after `retention.hold` without
    progress.
    """

    def __init__(
        self,
        member: LogWriter,
        store: MessageStore,
        ha: LogReaders,
        kept: KeptPositions,
        put: Callable[[Sequence[bytes]], Sequence[Sequence[PutResult]]],
        clock: Clock,
        *,
        on_failure: OnFailure,
        keep_unconfirmed: bool = False,
        before_removal: Callable[[int], None] | None = None,
    ) -> None:
        """Prepare; `put` appends through the write gate.

        With `keep_unconfirmed` the hold on what is not confirmed never lapses. `before_removal` is
        called with the log's new first offset before files are removed.
        """
        super().__init__("RetentionService", on_failure=on_failure)
        config = member.config.store.retention
        self._member = member
        self._store = store
        self._ha = ha
        self._kept = kept
        self._put = put
        self._clock = clock
        self._crowded = False  # rewritten positions would push each other out of the log
        self._worked_ms = 0.0  # when the current piece of work began
        self._interval_s = config.check_interval_ms / 1000.0
        self._deletes = config.max_age_ms is not None or config.max_size_bytes is not None
        self._holds = Holds(config.hold_ms)
        self._keep_unconfirmed = keep_unconfirmed
        self._before_removal = before_removal

    def run(self) -> None:
        """Remove expired files every interval until stopped."""
        while not self.stopping.wait(self._interval_s):
            try:
                self.look()
            except (OSError, StoreError) as error:  # tried again after the next interval
                log.error("retention could not delete: %s", error)

    def look(self) -> int:
        """Remove the files that may go now; return their number. Raises StoreError, OSError."""
        end = self._store.retention.expired_end(self._hold_offset())
        self._worked_ms = self._clock.monotonic_ms()
        if end is not None and not self._kept.gather(self._store, end, self._pause):
            return 0
        first = self._store.min_offset if end is None else end
        self._rewrite_positions(first)
        confirmed = self._store.confirmed_offset
        if end is not None and self._before_removal is not None:
            self._before_removal(end)
        # Only files below `first` are removed: their positions were gathered. This is called even
        # if nothing expired, because an earlier attempt may have left files on the disk.
        removed = self._store.retention.delete_expired(first)
        if removed:
            log.info("retention removed %d files; the log starts at %d", removed, first)
            if self._member.confirms and first > confirmed:
                log.warning(
                    "retention removed bytes [%d, %d) that were not confirmed", confirmed, first
                )
        return removed

    def _rewrite_positions(self, first_offset: int) -> None:
        """As master, append the positions that the log lacks from `first_offset` on.

        A failure is logged, and the next `look` tries again.
        """
        epoch = self._member.open_epoch
        max_bytes = self._member.config.store.retention.max_size_bytes
        self._crowded = max_bytes is not None and self._kept.memory_bytes > max_bytes // 2
        if not epoch or self._crowded:
            return
        try:
            count = self._kept.rewrite(
                epoch, self._store, first_offset, self._put, self._clock.wall_ms(), self._pause
            )
        except (NotStoredError, StoreError, OSError) as error:
            # The files are removed all the same, because the disk may be full.
            log.warning("consumers' positions are not rewritten yet: %s", error)
        else:
            if count:
                log.info("%d records of consumers' positions were rewritten", count)

    def _pause(self) -> bool:
        """Throttle to 20 %: sleep four times as long as the work took, at most 1 s.

        Return whether the service stops.
        """
        worked_ms = self._clock.monotonic_ms() - self._worked_ms
        stopping = self.stopping.wait(min(4.0 * worked_ms / 1000.0, 1.0))
        self._worked_ms = self._clock.monotonic_ms()
        return stopping

    def problems(self) -> list[str]:
        """Return the lapsed holds and other problems for the status."""
        found = self._holds.problems() if self._deletes else []
        if self._crowded:
            found.append(
                f"consumers' positions take {self._kept.memory_bytes} bytes, more than half of"
                " retention.max_size: they are not rewritten, and a new slave will lack those whose"
                " records are gone; raise retention.max_size"
            )
        return found

    def keeps_files_for(self, name: str) -> bool:
        """Whether retention still keeps the files that a linked slave needs."""
        return name not in self._holds.lapsed

    def _hold_offset(self) -> int | None:
        end = self._store.max_offset
        offsets = self._ha.slave_offsets()
        if self._member.confirms:
            offsets[CONFIRMED] = self._store.confirmed_offset
        held = self._holds.look(self._clock.monotonic_ms(), end, offsets)
        if not self._keep_unconfirmed:
            return held
        confirmed = self._store.confirmed_offset
        return confirmed if held is None else min(held, confirmed)
