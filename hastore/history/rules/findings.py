"""What the checker promises to find, and what it found: promises, findings, the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hastore.history.rules.budget import Excuse

NAMED_MAX = 50  # findings of a promise that are named; further ones are only counted

# The name in findings, and what is promised.
PROMISES = {
    "durable": "an acknowledged message is in the log, and a message that was read stays, within"
    " the fault budget of its level",
    "reported": "a message that was lost beyond that budget is in an archive of the node that"
    " cut it off",
    "level": "a reply states no level below the one that was asked for, and a place",
    "place": "a message is where the reply says; an offset and a place in a queue have one message",
    "phantom": "there is nothing that nobody has sent, and nothing is read before it is sent",
    "refused": "what was certainly not stored is nowhere",
    "once": "a message is stored once for each attempt, and a producer's number once",
    "linear": "appends have a place in real time: who began later is later in the log",
    "order": "messages of a producer keep their order in a queue",
    "epochs": "epochs never go back, and each record is of the node of its epoch",
    "queues": "the places of a queue have no gap, and rise with the log",
    "prefix": "a consumer leaves nothing out",
    "monotonic": "a consumer never goes back",
    "delivered": "a group commits nothing, and goes past nothing, that none of its members got",
    "owners": "a queue has one owner at a time",
    "positions": "committed positions never go back by themselves",
    "ranges": "a range that a job got is equal to the log",
    "settled": "each call of a client that was closed has ended, once",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: its name, what was expected and seen, and the lines of the events."""

    promise: str
    text: str
    lines: tuple[int, ...] = ()

    def named(self, name: Callable[[int], str]) -> str:
        """Return it as a text, with the lines as `name` names them."""
        lines = ", ".join(map(name, self.lines))
        return f"{self.promise}: {self.text}" + (f" ({lines})" if self.lines else "")

    def __str__(self) -> str:
        """Name the numbers of the lines."""
        return self.named("line {}".format)


@dataclass(slots=True)
class Report:
    """The result of a check."""

    findings: list[Finding] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)  # by promise: how many findings
    excused: list[Finding] = field(default_factory=list)  # losses beyond the fault budget
    losses: int = 0  # how many, named or not
    vacuous: list[str] = field(default_factory=list)  # why it proves nothing
    counts: dict[str, int] = field(default_factory=dict)  # what was checked
    faults: dict[str, int] = field(default_factory=dict)  # by name

    @property
    def ok(self) -> bool:
        """Whether all promises were kept, and the history proves something."""
        return not self.broken and not self.vacuous

    def find(self, promise: str, text: str, *lines: int) -> None:
        """Add a finding."""
        assert promise in PROMISES
        self.broken[promise] = self.broken.get(promise, 0) + 1
        if self.broken[promise] <= NAMED_MAX:
            self.findings.append(Finding(promise, text, _real(lines)))

    def find_loss(self, promise: str, text: str, excuse: Excuse | None, *lines: int) -> None:
        """Add a loss that the faults excuse, or a finding if nothing does."""
        if excuse is None:
            self.find(promise, text, *lines)
            return
        text = f"{text}: {excuse.text}"
        self.losses += 1
        if self.losses <= NAMED_MAX:
            self.excused.append(Finding("durable", text, _real(lines)))

    def as_dict(self, name: Callable[[int], str]) -> dict[str, Any]:
        """Return the object that `hastore check --json` prints; `name` names a line."""

        def shown(one: Finding) -> dict[str, Any]:
            lines = [name(line) for line in one.lines]
            return {"promise": one.promise, "text": one.text, "lines": lines}

        return {
            "ok": self.ok,
            "vacuous": self.vacuous,
            "broken": self.broken,
            "findings": [shown(one) for one in self.findings],
            "losses_beyond_the_budget": self.losses,
            "losses": [shown(one) for one in self.excused],
            "counts": self.counts,
            "faults": self.faults,
        }


def _real(lines: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lines without 0, which stands for none."""
    return tuple(dict.fromkeys(line for line in lines if line > 0))
