"""What each consumer was given: without a gap, never back, by one owner, and nothing left out.

The state is one place for each consumer and queue, and a row for each read, not for each message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hastore.history.rules.budget import Budget
from hastore.history.rules.columns import Names, Table
from hastore.history.rules.events import Assigned, Consumer, Read, Revoked, Seek
from hastore.history.rules.facts import Facts
from hastore.history.rules.positions import Write

_READ, _COMMIT, _ENDED = range(3)  # at equal times: the weaker check
# A time in which a member had a queue: group, queue, begin, end, client, line.
_Span = tuple[int, int, int, int, int, int]


@dataclass(slots=True)
class _Spot:
    """Where a consumer is in a queue."""

    next: int | None = None  # the queue offset that comes next; None: anything
    sought: bool = False  # the caller has moved it since its last read
    stint: int = 0  # how often the queue has come
    t: int = 0  # of the last read
    line: int = 0


class _Gap(NamedTuple):
    """A gap, or a step back, in what a consumer was given."""

    queue: int
    due: int
    came: int
    t: int  # of the read before
    line: int
    next_line: int


@dataclass(slots=True)
class _Progress:
    """What the members of a group were given of a queue, in the order of time."""

    frontier: int | None = None  # all before it was delivered, from where the group began
    line: int = 0
    committed: int = -1  # the end of the first commit that counts, -1 before it
    clients: set[int] = field(default_factory=set)  # that were given some of it


class Consumers:
    """Follows each consumer in the order of its lines."""

    def __init__(self, facts: Facts) -> None:
        """Begin without consumers."""
        self._facts = facts
        self._known: dict[int, Consumer] = {}
        self._spots: dict[tuple[int, int], _Spot] = {}
        self._queues_of: dict[int, set[int]] = {}
        self._sought: dict[int, set[str | None]] = {}  # topics in which all queues were moved
        self._groups: Names[tuple[str, str | int]] = Names()
        self._filtered: set[int] = set()  # groups
        self._gaps: list[_Gap] = []
        self._rows = Table(
            *("group", "queue", "start", "end", "began", "t", "client", "stint"),
            *("free", "first", "shared", "line"),
        )
        self.reads = 0

    # -- events

    def begin(self, client: int, event: Consumer) -> None:
        """A consumer begins, or one of the same name begins anew."""
        self._known[client] = event
        for queue in self._queues_of.get(client, ()):
            spot = self._spots[client, queue]
            spot.next, spot.stint = None, spot.stint + 1

    def seek(self, client: int, event: Seek) -> None:
        """The caller moves a consumer: its next read may begin anywhere."""
        if event.queue is None:
            self._sought.setdefault(client, set()).add(event.topic)
        for queue in self._some(client, event.topic, event.queue):
            spot = self._spot(client, queue)
            spot.next, spot.sought = None, True

    def moved(self, client: int, event: Assigned | Revoked) -> None:
        """A queue comes or leaves: its next read begins where the group is."""
        spot = self._spot(client, self._facts.queues.number((event.topic, event.queue)))
        spot.next, spot.stint = None, spot.stint + 1
        if isinstance(event, Revoked):  # a seek may come before the assignment is seen
            spot.sought = False

    def read(self, client: int, event: Read, line: int) -> None:
        """A consumer was given messages."""
        if not event.messages:
            return
        self.reads += len(event.messages)
        known = self._known.get(client)
        is_filtered = known is not None and known.filtered
        queue = self._facts.queues.number((event.topic, event.queue))
        spot = self._spot(client, queue)
        is_first, due = spot.next is None, spot.next
        for seen in event.messages:
            place = seen.queue_offset
            if due is not None and (place < due or (place > due and not is_filtered)):
                self._gaps.append(_Gap(queue, due, place, spot.t or event.t, spot.line, line))
            due = place + seen.count
        group = self._group_of(client, known, event.topic)
        if is_filtered:
            self._filtered.add(group)
        begins = event.messages[0].queue_offset
        self._rows.add(
            group, queue, begins, due or 0, event.began, event.t, client, spot.stint,
            spot.sought, is_first, known is not None and known.shared, line,
        )  # fmt: skip
        spot.next, spot.sought, spot.t, spot.line = due, False, event.t, line

    def _group_of(self, client: int, known: Consumer | None, topic: str) -> int:
        group = None if known is None else known.group
        return self._groups.number((topic, client if group is None else group))

    def _spot(self, client: int, queue: int) -> _Spot:
        self._queues_of.setdefault(client, set()).add(queue)
        spot = self._spots.get((client, queue))
        if spot is None:
            topics = self._sought.get(client, set())
            moved = None in topics or self._facts.queues[queue][0] in topics
            spot = self._spots[client, queue] = _Spot(sought=moved)
        return spot

    def _some(self, client: int, topic: str | None, queue: int | None) -> list[int]:
        if topic is not None and queue is not None:
            return [self._facts.queues.number((topic, queue))]
        known = self._queues_of.get(client, set())
        return [one for one in known if topic in (None, self._facts.queues[one][0])]

    # -- the end

    def judge(self, budget: Budget, writes: dict[tuple[str, int], list[Write]]) -> None:
        """Find gaps, steps back, two owners, and what was left out.

        `writes`: what was committed in each group and queue.
        """
        for gap in self._gaps:
            self._judge_gap(gap, budget)
        self._judge_owners(budget)
        self._judge_delivery(writes, budget)

    def _judge_gap(self, gap: _Gap, budget: Budget) -> None:
        report, name = self._facts.report, self._facts.name_of(gap.queue)
        lines = gap.line, gap.next_line
        text = f"{name}: a consumer got {gap.came} where {gap.due} comes next"
        if gap.came > gap.due:
            if not self._facts.was_removed(gap.queue, gap.came):
                report.find("prefix", text, *lines)
            return
        excuse = budget.excuse(budget.of_readers, 0, gap.t)
        report.find_loss("monotonic", text, excuse, *lines)

    def _judge_owners(self, budget: Budget) -> None:
        """Find queues that two members read at the same time.

        A member has certainly had its queue from the end of its first read to the begin of its
        last one.
        """
        rows = self._rows
        had: dict[tuple[int, ...], tuple[int, int, int]] = {}
        for row in np.flatnonzero(rows["shared"]).tolist():
            key = tuple(rows.get(row, name) for name in ("group", "queue", "client", "stint"))
            t, began, line = (rows.get(row, name) for name in ("t", "began", "line"))
            first, last, said = had.get(key, (t, began, line))
            had[key] = (min(first, t), max(last, began), said)
        spans = sorted((key[0], key[1], first, last, key[2], line)
                       for key, (first, last, line) in had.items() if first <= last)  # fmt: skip
        for one, other in zip(spans, spans[1:], strict=False):
            if one[:2] == other[:2] and other[2] < one[3] and one[4] != other[4]:
                name = self._facts.name_of(one[1])
                text = f"{name} was read by two members of its group at a time"
                self._facts.report.find("owners", text, one[5], other[5])
        # In a stint with one read a member had the queue at some time in that call.
        calls = sorted((key[0], key[1], began, t, key[2], line)
                       for key, (t, began, line) in had.items() if t > began)  # fmt: skip
        self._judge_calls(spans, calls, budget)

    def _judge_calls(self, spans: list[_Span], calls: list[_Span], budget: Budget) -> None:
        """Find calls that lie within the time in which another member certainly had the queue."""
        at = 0
        latest: dict[int, _Span] = {}  # by member: the span that ends last of those that have begun
        for call in calls:
            group, queue, began, t, client, line = call
            while at < len(spans) and spans[at][:3] < (group, queue, began):
                span = spans[at]
                known = latest.get(span[4])
                if known is None or known[:2] != span[:2] or known[3] < span[3]:
                    latest[span[4]] = span
                at += 1
            for other in latest.values():
                if other[:2] == (group, queue) and other[4] != client and t < other[3]:
                    text = f"{self._facts.name_of(queue)} was read by a member of its group while"
                    text += " another one had it"
                    excuse = budget.excuse(budget.of_readers, 0, other[2])  # a lock is a record
                    self._facts.report.find_loss("owners", text, excuse, other[5], line)
                    break

    def _judge_delivery(
        self, writes: dict[tuple[str, int], list[Write]], budget: Budget
    ) -> None:
        """Find messages that a group went past, or committed, though no member was given them."""
        rows = self._rows
        order = np.lexsort((rows["t"], rows["queue"], rows["group"]))
        series: dict[tuple[int, int], list[int]] = {}
        for row in order.tolist():
            key = rows.get(row, "group"), rows.get(row, "queue")
            series.setdefault(key, []).append(row)
        for (group, queue), reads in series.items():
            if group in self._filtered:
                continue
            name = self._groups[group][1]
            found = writes.get((name, queue), []) if isinstance(name, str) else []
            self._judge_begins(f"{name} in {self._facts.name_of(queue)}", reads, found, budget)
            events = [(rows.get(row, "t"), _READ, row) for row in reads]
            events += [(one.began, _COMMIT, place) for place, one in enumerate(found)]
            progress = _Progress()
            for _, kind, place in sorted(events):
                if kind == _READ:
                    self._deliver(progress, place, queue)
                else:
                    self._commit(progress, found[place], queue)

    def _judge_begins(
        self, name: str, reads: list[int], writes: list[Write], budget: Budget
    ) -> None:
        """Find members that began before what another member had committed.

        A commit counts only while its member has the queue. So whoever reads the queue later has
        got it later, and with the position. What may go back is left out as in Positions.
        """
        rows = self._rows
        events = [(rows.get(row, "began"), _READ, row) for row in reads if rows.get(row, "shared")]
        for place, one in enumerate(writes):
            if one.back or (one.is_acked and self._is_member(one.client)):
                events.append((one.began, _COMMIT, place))
                if not one.back:
                    events.append((one.ended, _ENDED, place))
        floors: dict[int, Write] = {}  # by member: the greatest position that it has committed
        clear_from = -1
        for _, kind, place in sorted(events):
            if kind == _READ:
                client, start = rows.get(place, "client"), rows.get(place, "start")
                floor = max(
                    (one for member, one in floors.items() if member != client),
                    key=lambda one: one.position,
                    default=None,
                )
                begins = rows.get(place, "first") and not rows.get(place, "free")
                if begins and floor is not None and start < floor.position:
                    text = f"the position of {name}: a member began at {start}, after"
                    text += f" {floor.position} was committed"
                    excuse = budget.excuse(budget.of_readers, 0, floor.ended)
                    lines = floor.line, rows.get(place, "line")
                    self._facts.report.find_loss("positions", text, excuse, *lines)
                continue
            write = writes[place]
            if write.back:
                floors.clear()
                clear_from = max(clear_from, write.ended)
            elif kind == _ENDED and write.began >= clear_from:
                known = floors.get(write.client)
                if known is None or known.position < write.position:
                    floors[write.client] = write

    def _is_member(self, client: int) -> bool:
        known = self._known.get(client)
        return known is not None and known.shared

    def _deliver(self, progress: _Progress, row: int, queue: int) -> None:
        start, end = self._rows.get(row, "start"), self._rows.get(row, "end")
        frontier, line = progress.frontier, self._rows.get(row, "line")
        if frontier is not None and start > frontier and self._rows.get(row, "first"):
            # Without a committed position a consumer begins where its caller says.
            positioned = 0 <= progress.committed < self._rows.get(row, "began")
            if (
                positioned
                and not self._rows.get(row, "free")
                and not self._facts.was_removed(queue, start)
            ):
                text = f"{self._facts.name_of(queue)}: a group goes on at {start}, and none of its"
                text += f" members got {frontier} to {start - 1}"
                self._facts.report.find("delivered", text, progress.line, line)
        if frontier is None or end > frontier:
            progress.frontier, progress.line = end, line
        progress.clients.add(self._rows.get(row, "client"))

    def _commit(self, progress: _Progress, write: Write, queue: int) -> None:
        if progress.committed < 0 and (write.is_acked or write.client < 0):
            progress.committed = write.ended if write.is_acked else write.began
        frontier = progress.frontier
        if frontier is None or write.position <= frontier:
            return
        # A consumer without a committed position may begin at the latest, and commit that.
        begins = progress.committed < 0 and write.client not in progress.clients
        if not (write.back or begins or self._facts.was_removed(queue, write.position)):
            text = f"{self._facts.name_of(queue)}: position {write.position} was committed, and"
            text += f" no member of the group had got {frontier}"
            self._facts.report.find("delivered", text, progress.line, write.line)
        progress.frontier, progress.line = write.position, write.line
