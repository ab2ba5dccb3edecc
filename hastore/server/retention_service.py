"""RetentionService: the thread that removes old files, and what it keeps them for."""

import logging
from collections.abc import Callable

from hastore.clock import Clock
from hastore.errors import StoreError
from hastore.ha.epochs import CLASSIC_EPOCH
from hastore.ha.ha_service import HAService
from hastore.ha.member import Member
from hastore.server.holds import CONFIRMED, Holds
from hastore.service import Service
from hastore.store.message_store import MessageStore

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
        clock: Clock,
        on_failure: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__("RetentionService", on_failure)
        config = member.config.store.retention
        self._member = member
        self._store = store
        self._ha = ha
        self._clock = clock
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
        hold = self._hold_offset()
        confirmed = self._store.confirmed_offset
        removed = self._store.delete_expired(hold)
        if removed:
            first = self._store.min_offset
            log.info("retention removed %d files; the log starts at %d", removed, first)
            if self._confirms and first > confirmed:
                log.warning(
                    "retention removed bytes [%d, %d) that were not confirmed", confirmed, first
                )
        return removed

    def problems(self) -> list[str]:
        """Say for whom files are not kept any more, where files are removed at all."""
        return self._holds.problems() if self._deletes else []

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
