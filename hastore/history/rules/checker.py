"""The checker: events in, a report out. `findings.py` lists what is promised.

What is judged at once, event by event: outcomes, levels, the order of each consumer. What needs
the whole history is kept in tables of some 100 bytes a message, and sorted at the end, so that a
history of n messages takes n log n steps. `Ranges` compares what jobs got with the log: each range
is a count and a digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from hastore.errors import UsageError
from hastore.history.rules import events as e
from hastore.history.rules.agreement import Agreement
from hastore.history.rules.budget import Budget
from hastore.history.rules.columns import NONE, Names, Numbers, begins, joined
from hastore.history.rules.consumers import Consumers
from hastore.history.rules.events import Range, as_range_digest, mixed
from hastore.history.rules.facts import ACKED, REFUSED, UNKNOWN, Facts
from hastore.history.rules.findings import Report
from hastore.history.rules.log_order import (
    judge_epochs,
    judge_log,
    judge_numbers,
    judge_real_time,
)
from hastore.history.rules.positions import Positions

# What `expect` may name beside the faults.
MET = ("flip", "unknown", "refused", "retention", "rescued", "commit", "range")
_Ended = e.Ok | e.Fail | e.Info
_HALF = np.uint64(1 << 63)  # a digest is this above its number in a table


class Checker:
    """Checks one history, which may come from several recorders on one machine.

    checker = Checker()
    checker.begin(header)
    for line, event in ...:
        checker.feed(event, line)
    report = checker.finish()
    """

    def __init__(self) -> None:
        """Begin without events."""
        self.report = Report()
        self._facts = Facts(self.report)
        self._sources = 0
        self._clients: Names[tuple[int, str]] = Names()
        self._consumers = Consumers(self._facts)
        self._positions = Positions(self._facts)
        self._ranges = Ranges(self._facts)
        self._open: dict[tuple[int, int], tuple[e.Send | e.Commit, Any]] = {}
        self._take: dict[type, Callable[[Any, int], object]] = {
            e.Send: self._send,
            e.Ok: self._end, e.Fail: self._end, e.Info: self._end,
            e.Closed: self._closed,
            e.Consumer: lambda one, _: self._consumers.begin(self._client(one), one),
            e.Read: self._read,
            e.Seek: lambda one, _: self._consumers.seek(self._client(one), one),
            e.Assigned: lambda one, _: self._consumers.moved(self._client(one), one),
            e.Revoked: lambda one, _: self._consumers.moved(self._client(one), one),
            e.Commit: self._commit,
            e.Position: self._positions.answered,
            e.Reset: self._positions.reset,
            e.Range: self._ranges.add,
            e.Epoch: lambda one, line: self._facts.epochs.append((one, line)),
            e.Fault: lambda one, _: self._facts.faults.append(one),
            e.Log: self._log,
            e.Record: self._facts.add_record,
            e.Rescued: lambda one, _: self._facts.add_rescued(one),
        }  # fmt: skip

    @property
    def topics(self) -> set[str]:
        """The topics of the events so far; records of others say nothing about them."""
        named = self._facts.header.topics or ()
        return {topic for topic, _ in self._facts.queues} | self._facts.sent_topics | {*named}

    def begin(self, header: e.Header) -> None:
        """Begin with the events of a recorder; the headers of all must say the same."""
        if self._sources and header != self._facts.header:
            raise UsageError("these histories have different headers: check them one by one")
        self._facts.header = header
        self._sources += 1

    def feed(self, event: e.Line, line: int = 0) -> None:
        """Take an event; `line` names it in findings, and 0 stands for none.

        Raises UsageError for one that makes no sense.
        """
        take = self._take.get(type(event))
        if take is None:
            raise UsageError("a second header")
        try:
            take(event, line)
        except (ValueError, OverflowError) as wrong:
            raise UsageError(f"{type(event).__name__}: {wrong}") from wrong

    def finish(self, expect: Collection[str] = ()) -> Report:
        """Judge all; `expect` names faults, or what MET has, that must have been met."""
        facts, report = self._facts, self.report
        budget = Budget(facts.header, facts.faults, self._epochs())
        agreement = Agreement(facts, budget)
        agreement.judge()
        judge_log(facts)
        judge_epochs(facts, agreement)
        numbered = judge_numbers(facts, agreement)
        placed = judge_real_time(facts, agreement)
        self._consumers.judge(budget, self._positions.stated())
        self._positions.judge(budget)
        self._ranges.judge(agreement)
        outcome = Counter(facts.sends["outcome"].tolist())
        report.counts = {
            "sends": len(facts.sends),
            "acknowledged": len(agreement.acked),
            "acknowledged_and_found": agreement.found,
            "unknown": outcome[UNKNOWN],
            "refused": outcome[REFUSED],
            "ordered_in_real_time": placed,
            "numbered_by_producers": numbered,
            "epochs_of_acknowledgements": len(np.unique(facts.sends["epoch"][agreement.acked])),
            "records": len(facts.records),
            "read": self._consumers.reads,
            "commits": self._positions.commits,
            "positions_asked_for": self._positions.answers,
            "ranges": self._ranges.judged,
        }
        report.faults = dict(Counter(one.fault for one in facts.faults))
        report.vacuous = [*self._why_vacuous(), *self._not_met(expect)]
        return report

    # -- events

    def _client(self, event: Any) -> int:
        return self._clients.number((self._sources, event.client))

    def _send(self, event: e.Send, line: int) -> None:
        self._begin(event, line, self._facts.add_send(event, line))

    def _commit(self, event: e.Commit, line: int) -> None:
        self._begin(event, line, self._positions.begin(self._client(event), event, line))

    def _begin(self, event: e.Send | e.Commit, line: int, begun: Any) -> None:
        key = self._client(event), event.op
        if key in self._open:
            raise UsageError(f"call {event.op} of {event.client} has not ended, and begins again")
        self._open[key] = event, begun

    def _end(self, event: _Ended, line: int) -> None:
        found = self._open.pop((self._client(event), event.op), None)
        if found is None:
            text = f"{event.client} {event.op} has ended already, or never began"
            self.report.find("settled", text, line)
        elif isinstance(found[0], e.Send):
            self._facts.end_send(found[1], found[0], event, line)
        else:
            self._positions.end(found[1], event)

    def _closed(self, event: e.Closed, line: int) -> None:
        client = self._client(event)
        for key in [one for one in self._open if one[0] == client]:
            text = f"{event.client} was closed, and its call {key[1]} has not ended"
            self.report.find("settled", text, line)
            del self._open[key]

    def _read(self, event: e.Read, line: int) -> None:
        self._facts.add_read(event, line)
        self._consumers.read(self._client(event), event, line)

    def _log(self, event: e.Log, _line: int) -> None:
        if self._facts.log is not None:
            raise UsageError("a second log: a history is checked with one")
        self._facts.log = event

    # -- the end

    def _epochs(self) -> list[e.Epoch]:
        """Return all epochs that anybody has seen."""
        facts = self._facts
        told = {one.epoch: one for one, _ in facts.epochs}
        seen = np.unique(facts.reads["epoch"]).tolist() + np.unique(facts.sends["epoch"]).tolist()
        for epoch in seen:
            if epoch not in told and epoch not in (0, NONE):
                told[epoch] = e.Epoch(epoch)
        return list(told.values())

    def _why_vacuous(self) -> list[str]:
        counts, why = self.report.counts, []
        if not counts["acknowledged"]:
            why.append("no send was acknowledged")
        if not counts["read"] + counts["records"] + counts["ranges"]:
            why.append("nothing was read, and no log was compared: read the topic, or add --store")
        elif counts["acknowledged"] and not counts["acknowledged_and_found"]:
            why.append("none of the acknowledged messages was read, or is in the log")
        return why

    def _not_met(self, expect: Collection[str]) -> list[str]:
        """Return which expected things did not happen; a fault counts only while puts went on."""
        facts, counts = self._facts, self.report.counts
        ended = facts.sends["ended"][facts.sends["outcome"] == ACKED]
        first, last = (int(ended.min()), int(ended.max())) if len(ended) else (0, 0)
        faults = {one.fault for one in facts.faults if first <= one.t <= last}
        met = {
            "flip": counts["epochs_of_acknowledgements"] > 1,
            "unknown": counts["unknown"] > 0,
            "refused": counts["refused"] > 0,
            "retention": "retention" in faults or (facts.log is not None and facts.log.begin > 0),
            "rescued": bool(facts.rescued),
            "commit": counts["commits"] > 0,
            "range": counts["ranges"] > 0,
        }
        return [
            f"there was no {name}" + ("" if name in met else " between two acknowledgements")
            for name in expect
            if not met.get(name, name in faults)
        ]


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
