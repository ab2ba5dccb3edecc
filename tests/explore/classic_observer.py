"""What must hold in every state of a group of mode classic; the numbers are docs/failover.md's.

What was written where, which epoch confirmed it and what was acknowledged is a part of the state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hastore.ha.rules.epochs import epoch_at, last_epoch
from tests.explore.classic_states import View
from tests.ha.simulation import Violation, size_of


class Known(NamedTuple):
    """What the observer has seen; the values are 1, 2, ..., in the order of their puts."""

    written: tuple[tuple[int, int], ...] = ()  # (epoch, offset) of each value
    confirmed_in: tuple[int, ...] = ()  # the epoch that confirmed it; 0: none
    acked: tuple[bool, ...] = ()
    forced: bool = False  # --force-unclean was used: it may lose what was confirmed


def judge(known: Known, notes: tuple[Any, ...]) -> Known:
    """Judge what a node's step has done; return what the observer knows then."""
    for kind, *what in notes:
        if kind == "put":
            value, epoch, start = what
            assert value == len(known.written) + 1
            known = known._replace(
                written=(*known.written, (epoch, start)),
                confirmed_in=(*known.confirmed_in, 0),
                acked=(*known.acked, False),
            )
        elif kind == "forced":
            known = known._replace(forced=True)
        elif kind == "disagrees" and not known.forced:
            number, text = what
            raise Violation(f"6: node {number} is told to cut confirmed records: {text}")
        elif kind == "confirmed":
            known = _confirmed(known, *what)
        elif kind == "acked":
            (value,) = what
            if not known.confirmed_in[value - 1]:
                raise Violation(f"value {value} is acknowledged and was never confirmed")
            acked = tuple(was or n == value for n, was in enumerate(known.acked, 1))
            known = known._replace(acked=acked)
    return known


def _confirmed(known: Known, confirmed: int, epoch: int, history: Any, data: bytes) -> Known:
    found = list(known.confirmed_in)
    for value, (of, at) in enumerate(known.written, 1):
        whole = at + size_of(value) <= confirmed
        if whole and epoch_at(history, at) == of and data[at] in (0, value):
            found[value - 1] = found[value - 1] or epoch
    return known._replace(confirmed_in=tuple(found))


def check(view: View, known: Known) -> None:
    """Check one node that is up against what is known."""
    number, history, disk = view.number, view.history, view.disk
    if history and history[-1].start > view.end:
        raise Violation(f"node {number}: an entry beyond the log's end")
    if disk.confirmed > view.end:
        raise Violation(f"4: node {number}: confirmed beyond its log's end")
    limit = max(disk.confirmed, view.readable)
    held = {}
    for at, value in view.records:
        held[value] = at
        epoch = epoch_at(history, at)
        if (epoch, at) != known.written[value - 1]:
            raise Violation(
                f"3: node {number} has value {value} of {known.written[value - 1]} at {at} in "
                f"epoch {epoch}"
            )
        if at + size_of(value) <= limit and not known.confirmed_in[value - 1]:
            raise Violation(
                f"4: node {number} shows value {value} as confirmed, which it never was"
            )
    if known.forced:
        return
    last = last_epoch(history)
    for value, epoch in enumerate(known.confirmed_in, 1):
        at = known.written[value - 1][1]
        if epoch and last > epoch and at >= disk.min_offset and held.get(value) != at:
            raise Violation(
                f"2: value {value}, confirmed in {epoch}, is missing on node {number} of epoch "
                f"{last}"
            )
