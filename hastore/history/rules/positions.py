"""Committed positions: they never go back, but by a seek or by an operator."""

from __future__ import annotations

from dataclasses import dataclass

from hastore.history.rules.budget import Budget
from hastore.history.rules.columns import LATE
from hastore.history.rules.events import Commit, Fail, Info, Ok, Position, Reset
from hastore.history.rules.facts import Facts

_BEGINS, _ASKED, _ENDS = range(3)  # at equal times: the weaker check


@dataclass(slots=True)
class Write:
    """A commit of one queue, or a reset by an operator."""

    position: int
    began: int
    ended: int  # LATE: it may count at any time
    is_acked: bool
    back: bool
    line: int
    client: int = -1


@dataclass(slots=True)
class _Asked:
    """An answer: what a group's position is."""

    position: int  # -1: none
    began: int
    t: int
    current: bool
    line: int


class Positions:
    """Keeps what was committed and what was answered, by group and queue."""

    def __init__(self, facts: Facts) -> None:
        """Begin without positions."""
        self._facts = facts
        self.writes: dict[tuple[str, int], list[Write]] = {}
        self._asked: dict[tuple[str, int], list[_Asked]] = {}
        self.commits = self.answers = 0

    def begin(self, client: int, event: Commit, line: int) -> list[tuple[tuple[str, int], Write]]:
        """A commit begins; returns what `end` needs."""
        begun = []
        for place in event.places:
            key = event.group, self._facts.queues.number((place.topic, place.queue))
            if place.position is not None:
                write = Write(place.position, event.t, LATE, False, event.back, line, client)
                self.writes.setdefault(key, []).append(write)
                begun.append((key, write))
        self.commits += 1
        return begun

    def end(self, begun: list[tuple[tuple[str, int], Write]], event: Ok | Fail | Info) -> None:
        """A commit ends."""
        for key, write in begun:
            if isinstance(event, Fail):
                self.writes[key].remove(write)
            elif isinstance(event, Ok):
                write.ended, write.is_acked = event.t, True

    def reset(self, event: Reset, line: int) -> None:
        """An operator moves a group, in the queues that are known by now."""
        for number in range(len(self._facts.queues)):
            topic, queue = self._facts.queues[number]
            if event.topic in (None, topic) and event.queue in (None, queue):
                position = event.position or 0
                write = Write(position, event.t, event.t, True, True, line)
                self.writes.setdefault((event.group, number), []).append(write)

    def answered(self, event: Position, line: int) -> None:
        """A group's positions were asked for."""
        self.answers += 1
        for place in event.places:
            key = event.group, self._facts.queues.number((place.topic, place.queue))
            position = -1 if place.position is None else place.position
            asked = _Asked(position, event.began, event.t, event.current, line)
            self._asked.setdefault(key, []).append(asked)

    def stated(self) -> dict[tuple[str, int], list[Write]]:
        """Return by group and queue all commits and resets, and answers as commits at their time.

        What was answered was committed, by whomever.
        """
        found = {key: list(writes) for key, writes in self.writes.items()}
        for key, asked in self._asked.items():
            found.setdefault(key, []).extend(
                Write(one.position, one.t, LATE, False, False, one.line)
                for one in asked if one.position >= 0
            )  # fmt: skip
        return found

    def judge(self, budget: Budget) -> None:
        """Find positions that went back."""
        for key in {**self.writes, **self._asked}:  # not a set: findings come in a fixed order
            writes, asked = self.writes.get(key, []), self._asked.get(key, [])
            self._judge_back(key, writes, asked, budget)

    def _judge_back(
        self, key: tuple[str, int], writes: list[Write], asked: list[_Asked], budget: Budget
    ) -> None:
        """Go through time with the greatest position that was acknowledged.

        From the begin of a commit that may go back, nothing that overlaps it counts. Its end sets
        the position, if no other commit that may go back overlaps it.
        """
        events: list[tuple[int, int, int]] = []
        for place, write in enumerate(writes):
            events.append((write.began, _BEGINS, place))
            if write.is_acked:
                events.append((write.ended, _ENDS, place))
        events += [(one.began, _ASKED, place) for place, one in enumerate(asked)]
        floor: Write | None = None
        lone: Write | None = None
        clear_from = -1
        for _, kind, place in sorted(events):
            if kind == _ASKED:
                answer = asked[place]
                if answer.current and floor is not None and answer.position < floor.position:
                    text = f"is {answer.position}" if answer.position >= 0 else "is gone"
                    self._find(key, f"{text} after {floor.position}", floor, answer.line, budget)
                continue
            write = writes[place]
            if kind == _ENDS:
                counts = write is lone or (write.began >= clear_from and not write.back)
                if counts and (floor is None or write.position > floor.position):
                    floor = write
            elif write.back:
                lone = write if write.began >= clear_from else None
                floor, clear_from = None, max(clear_from, write.ended)
            elif write.is_acked and floor is not None and write.position < floor.position:
                text = f"{write.position} was accepted after {floor.position}"
                self._find(key, text, floor, write.line, budget)

    def _find(
        self, key: tuple[str, int], text: str, floor: Write, line: int, budget: Budget
    ) -> None:
        text = f"{self._name(key)}: {text}"
        excuse = budget.excuse(budget.of_readers, 0, floor.ended)
        self._facts.report.find_loss("positions", text, excuse, floor.line, line)

    def _name(self, key: tuple[str, int]) -> str:
        return f"the position of {key[0]} in {self._facts.name_of(key[1])}"
