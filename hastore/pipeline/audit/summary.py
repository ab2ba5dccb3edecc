"""The result of an audit, as it is printed by --json."""

from __future__ import annotations

from dataclasses import dataclass, field

from hastore.pipeline.audit.difference import Difference
from hastore.pipeline.audit.sides import Extent
from hastore.pipeline.audit.task import Skipped


@dataclass(frozen=True)
class NotCompared:
    """A range that was not compared."""

    start: int
    end: int
    why: str


@dataclass
class Summary:
    """The result of an audit. Offsets are bytes of the log; ranges are half-open."""

    a: Extent
    b: Extent
    algorithm: str
    start: int  # compared from here
    end: int  # up to here
    equal: bool  # no difference was found
    complete: bool  # everything in [start, end) that both sides still have was compared
    bytes: int = 0  # compared on each side
    ranges: int = 0
    seconds: float = 0.0  # without the start of Spark
    mb_per_s: float = 0.0  # a side; 1 MB is 10^6 bytes
    digest: str | None = None  # of all ranges' digests in order; None unless all of it is equal
    equal_until: int = 0  # everything before this offset is equal
    differing_ranges: int = 0
    differing: list[tuple[int, int]] = field(default_factory=list)  # the first 100 of them
    first: Difference | None = None
    ignored_bytes: int = 0  # in blanks, where they mean nothing
    not_compared: list[NotCompared] = field(default_factory=list)


def outside(
    a: Extent, b: Extent, start: int, end: int, asked: tuple[bool, bool]
) -> list[NotCompared]:
    """Return what lies outside of the compared range [start, end), and why.

    `asked` says whether the caller gave its start and its end.
    """
    found = []
    for side, other in ((a, b), (b, a)):
        if side.min_offset < start and not asked[0]:
            why = f"only {side.where} has it: the log of {other.where} begins at {other.min_offset}"
            found.append(NotCompared(side.min_offset, start, why))
    for side, other in ((a, b), (b, a)):
        if side.max_offset <= end or asked[1]:
            continue
        if side.end_offset > end:
            why = f"beyond the {other.end_is} of {other.where}, {other.end_offset}"
        else:
            why = f"at {side.where}, beyond its {side.end_is}"
        found.append(NotCompared(end, side.max_offset, why))
    return found


def skipped(found: Skipped) -> NotCompared:
    """Return a range that a task could not compare."""
    return NotCompared(found.start, found.end, found.why)
