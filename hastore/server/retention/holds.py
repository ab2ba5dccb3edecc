"""Holds: from which offset on retention keeps the log, for slaves and for unconfirmed bytes.

RetentionService's thread calls `look`; any thread may read `lapsed`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

CONFIRMED = "confirmation"


@dataclass(slots=True)
class _Holder:
    offset: int
    moved_ms: float  # when the offset last rose, or was at the end of the log
    seen_ms: float  # when `look` last got the holder


class Holds:
    """Track how long each holder of files has made no progress.

    A holder is a linked slave, by its name, or CONFIRMED; it needs the log from its offset on.
    After `hold_ms` without progress its hold lapses, until its offset moves again. A slave that
    reconnects within `hold_ms` does not reset its time without progress.
    """

    def __init__(self, hold_ms: float) -> None:
        self._hold_ms = hold_ms
        self._holders: dict[str, _Holder] = {}
        self.lapsed: Mapping[str, int] = {}  # holder -> offset; replaced, never changed

    def look(self, now_ms: float, end_offset: int, offsets: Mapping[str, int]) -> int | None:
        """Return the offset from which the log must be kept; None if no hold is in force.

        `offsets` has each holder's offset at `now_ms`; the log ends at `end_offset`.
        """
        lapsed: dict[str, int] = {}
        for name, offset in offsets.items():
            holder = self._holders.get(name)
            if holder is None:
                holder = self._holders[name] = _Holder(offset, now_ms, now_ms)
            elif offset > holder.offset or offset >= end_offset:
                holder.moved_ms = now_ms
            holder.offset, holder.seen_ms = offset, now_ms
            if offset < end_offset and now_ms - holder.moved_ms >= self._hold_ms:
                lapsed[name] = offset
        for name in [n for n, h in self._holders.items() if now_ms - h.seen_ms > self._hold_ms]:
            del self._holders[name]
        before, self.lapsed = self.lapsed, lapsed
        for name in lapsed.keys() - before.keys():
            log.warning("%s", self.text(name, lapsed[name]))
        for name in before.keys() & offsets.keys() - lapsed.keys():
            log.info("retention keeps files for %s again, from %d on", name, offsets[name])
        return min((at for name, at in offsets.items() if name not in lapsed), default=None)

    def text(self, name: str, offset: int) -> str:
        """Return why a hold has lapsed, and what retention may now remove."""
        seconds = self._hold_ms / 1000.0
        if name == CONFIRMED:
            return (
                f"nothing was confirmed for {seconds:g} s (retention.hold): retention may remove "
                f"bytes from {offset} on that no slave has confirmed"
            )
        return (
            f"{name} received nothing for {seconds:g} s (retention.hold): retention may remove the "
            f"files that it needs, from {offset} on; the slave then needs a resync"
        )

    def problems(self) -> list[str]:
        """Return a text for each lapsed hold, for the status."""
        return [self.text(name, offset) for name, offset in self.lapsed.items()]
