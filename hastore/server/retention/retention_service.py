"""RetentionService: the thread that removes old files, and what it keeps them for."""

import logging
from collections.abc import Callable, Sequence

from hastore.clock import Clock
from hastore.errors import NotStoredError, StoreError
from hastore.ha.master.ha_service import HAService
from hastore.ha.node.member import Member
from hastore.ha.rules.epochs import CLASSIC_EPOCH
from hastore.server.retention.holds import CONFIRMED, Holds
from hastore.server.retention.kept_positions import KeptPositions
from hastore.service import OnFailure, Service
from hastore.store.message_store import MessageStore, PutResult

log = logging.getLogger(__name__)


class RetentionService(Service):
    """Delete whole old files by age and size.

    Kept, while they make progress within `retention.hold`: what a linked slave has not reported,
    and what is not confirmed as this node knows it, on a slave too.
    """

    def __init__(
        self,
        member: Member,
        store: MessageStore,
        ha: HAService,
        kept: KeptPositions,
        put: Callable[[Sequence[bytes]], Sequence[Sequence[PutResult]]],
        clock: Clock,
        *,
        on_failure: OnFailure,
    ) -> None:
        """Prepare; `put` appends through the write gate."""
        super().__init__("RetentionService", on_failure=on_failure)
        config = member.config.store.retention
        self._member = member
        self._store = store
        self._ha = ha
        self._kept = kept
        self._put = put
        self._clock = clock
        self._crowded = False  # written anew, positions would drive each other out of the log
        self._worked_ms = 0.0  # when the present piece of work began
        self._interval_s = config.check_interval_ms / 1000.0
        self._deletes = config.max_age_ms is not None or config.max_size_bytes is not None
        self._holds = Holds(config.hold_ms)

    def run(self) -> None:
        """Look every interval until stopped."""
        while not self.stopping.wait(self._interval_s):
            try:
                self.look()
            except (OSError, StoreError) as error:  # the next look tries again
                log.error("retention could not delete: %s", error)

    def look(self) -> int:
        """Remove what may go now; returns how many files. StoreError, OSError."""
        end = self._store.retention.expired_end(self._hold_offset())
        self._worked_ms = self._clock.monotonic_ms()
        if end is not None and not self._kept.gather(self._store, end, self._pause):
            return 0
        first = self._store.min_offset if end is None else end
        self._write_positions(first)
        confirmed = self._store.confirmed_offset
        # Never beyond what was gathered; without that too: files may be owed from an earlier look.
        removed = self._store.retention.delete_expired(first)
        if removed:
            log.info("retention removed %d files; the log starts at %d", removed, first)
            if self._confirms and first > confirmed:
                log.warning(
                    "retention removed bytes [%d, %d) that were not confirmed", confirmed, first
                )
        return removed

    def _write_positions(self, first_offset: int) -> None:
        """Write anew, while this node is master, what the log lacks from `first_offset` on; what
        fails is tried at the next look.
        """
        epoch = self._member.open_epoch
        max_bytes = self._member.config.store.retention.max_size_bytes
        self._crowded = max_bytes is not None and self._kept.memory_bytes > max_bytes // 2
        if not epoch or self._crowded:
            return
        try:
            count = self._kept.write_anew(
                epoch, self._store, first_offset, self._put, self._clock.wall_ms(), self._pause
            )
        except (NotStoredError, StoreError, OSError) as error:  # a full disk needs the files to go
            log.warning("positions of consumers are not written anew yet: %s", error)
        else:
            if count:
                log.info("%d records of consumers' positions were written anew", count)

    def _pause(self) -> bool:
        """Rest for four times as long as was worked; whether the service stops."""
        worked_ms = self._clock.monotonic_ms() - self._worked_ms
        stopping = self.stopping.wait(min(4.0 * worked_ms / 1000.0, 1.0))
        self._worked_ms = self._clock.monotonic_ms()
        return stopping

    def problems(self) -> list[str]:
        """Say for whom files are not kept any more, and what else needs a person's eye."""
        found = self._holds.problems() if self._deletes else []
        if self._crowded:
            found.append(
                f"consumers' positions take {self._kept.memory_bytes} bytes, more than half of"
                " retention.max_size: they are not written anew, and a new slave will lack those"
                " whose records are gone; raise retention.max_size"
            )
        return found

    def keeps_files_for(self, name: str) -> bool:
        """Whether the files that a linked slave needs are kept for it."""
        return name not in self._holds.lapsed

    @property
    def _confirms(self) -> bool:
        """Whether bytes of this log are ever confirmed: a RocketMQ master confirms nothing."""
        return self._member.state.last_epoch != CLASSIC_EPOCH

    def _hold_offset(self) -> int | None:
        end = self._store.max_offset
        offsets = self._ha.slave_offsets()
        if self._confirms:
            offsets[CONFIRMED] = self._store.confirmed_offset
        return self._holds.look(self._clock.monotonic_ms(), end, offsets)
