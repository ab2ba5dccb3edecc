"""For whom retention keeps files: slaves, and what is confirmed, each as long as it moves.

Called by RetentionService at each of its looks; others only read `lapsed`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

CONFIRMED = "what is confirmed"


@dataclass(slots=True)
class _Holder:
    offset: int
    moved_ms: float  # since when it has not moved although there was data for it
    seen_ms: float


class Holds:
    """Remember since when each holder of files has made no progress.

    A holder is a linked slave, by its name, or CONFIRMED; it needs the log from its offset on.
    After `hold_ms` without progress it is not counted any more, until it moves again. A slave that
    comes back within that time, on a new link, goes on where it was.
    """

    def __init__(self, hold_ms: float) -> None:
        self._hold_ms = hold_ms
        self._holders: dict[str, _Holder] = {}
        self.lapsed: Mapping[str, int] = {}  # who is not counted -> its offset; replaced whole

    def look(self, now_ms: float, end_offset: int, offsets: Mapping[str, int]) -> int | None:
        """Return from which offset on the log is kept for somebody, None when for nobody.

        `offsets`: how far each has come at `now_ms`, in a log that ends at `end_offset`.
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
            log.info("retention counts %s again, from %d on", name, offsets[name])
        return min((at for name, at in offsets.items() if name not in lapsed), default=None)

    def text(self, name: str, offset: int) -> str:
        """Say what it means that a holder is not counted."""
        seconds = self._hold_ms / 1000.0
        if name == CONFIRMED:
            return (
                f"nothing was confirmed for {seconds:g} s (retention.hold): retention may take "
                f"bytes from {offset} on that no slave has confirmed"
            )
        return (
            f"{name} took nothing for {seconds:g} s (retention.hold): retention may take files "
            f"from {offset} on that it needs; it then gets a resync"
        )

    def problems(self) -> list[str]:
        """Say who is not counted, for the status."""
        return [self.text(name, offset) for name, offset in self.lapsed.items()]
