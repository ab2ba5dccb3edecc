"""Ranges that a job got, as a count and a digest: they are equal to the log."""

from __future__ import annotations

import numpy as np

from hastore.history.rules.agreement import Agreement
from hastore.history.rules.columns import Numbers, begins, joined
from hastore.history.rules.events import Range, as_range_digest, mixed
from hastore.history.rules.facts import Facts

_HALF = np.uint64(1 << 63)  # a digest is this above its number in a table


class Ranges:
    """Keeps the ranges until the log is known."""

    def __init__(self, facts: Facts) -> None:
        """Begin without ranges."""
        self._facts = facts
        self._ranges: list[tuple[Range, int]] = []
        self.judged = 0  # those that could be compared

    def add(self, event: Range, line: int) -> None:
        """A job got a range."""
        self._ranges.append((event, line))
        self._facts.queues.number((event.topic, event.queue))

    def __len__(self) -> int:
        return len(self._ranges)

    def judge(self, agreement: Agreement) -> None:
        """Compare all ranges with the log; without it with what replies and readers say."""
        if not self._ranges:
            return
        queue, place, digest = self._known(agreement)
        sums = np.zeros(len(queue) + 1, np.uint64)
        unsigned = digest.astype(np.uint64) + _HALF
        np.cumsum(mixed(place.astype(np.uint64), unsigned), out=sums[1:])
        for event, line in self._ranges:
            number = self._facts.queues.number((event.topic, event.queue))
            low, high = np.searchsorted(queue, number), np.searchsorted(queue, number, "right")
            first = int(low + np.searchsorted(place[low:high], event.start))
            end = int(low + np.searchsorted(place[low:high], event.end))
            if event.start < event.end and not self._is_whole(event, number, place[first:end]):
                continue
            self.judged += 1
            name = f"{self._facts.name_of(number)} from {event.start} to {event.end}"
            if event.count != end - first:
                text = f"{name}: a job got {event.count} messages, the log has {end - first}"
                self._facts.report.find("ranges", text, line)
            elif as_range_digest(int(sums[end]) - int(sums[first])) != event.digest:
                text = f"{name}: a job got other messages than the log has"
                self._facts.report.find("ranges", text, line)

    def _is_whole(self, event: Range, number: int, found: Numbers) -> bool:
        """Whether all of a range is known. With the log it is, but for what retention removed."""
        if self._facts.log is not None:
            return not (len(found) == 0 or found[0] > event.start) or not self._facts.was_removed(
                number, int(found[0]) if len(found) else event.end
            )
        return len(found) == event.end - event.start

    def _known(self, agreement: Agreement) -> tuple[Numbers, Numbers, Numbers]:
        """Return queue, place and digest of the known messages, in this order."""
        facts = self._facts
        if facts.log is not None:
            parts = [(facts.records, np.arange(len(facts.records)))]
        else:
            acks = agreement.acked[agreement.acks_stay]
            parts = [(facts.sends, acks), (facts.reads, np.flatnonzero(agreement.reads_stay))]
        queue, place, digest = (
            joined(*(table[name][rows] for table, rows in parts))
            for name in ("queue", "queue_offset", "digest")
        )
        order = np.lexsort((place, queue))
        order = order[begins(queue[order], place[order])]
        return queue[order], place[order], digest[order]
