"""What the models of both modes have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tests.explore.search import State

View = TypeVar("View")


class Bounded:
    """Values by number, of which states are made; a state's last one is what its bounds allow."""

    def __init__(self, bounds: dict[str, int | None]) -> None:
        """Begin without values; `bounds` says how often each kind of event may happen."""
        self.named: list[Any] = []
        self._values: dict[Any, int] = {}
        self._bounds = {name: place for place, name in enumerate(bounds)}
        self._spent: dict[tuple[int, str], int | None] = {}

    def number(self, value: Any) -> int:
        """Return the number of a value: `named` has the values by their numbers."""
        number = self._values.setdefault(value, len(self.named))
        if number == len(self.named):
            self.named.append(value)
        return number

    def spend(self, state: State, name: str) -> State | None:
        """Return the state with one less of a bound; None if nothing is left of it."""
        key = (state[-1], name)
        if key not in self._spent:
            left = list(self.named[state[-1]])
            place = self._bounds.get(name)
            if place is None or left[place] == 0:
                self._spent[key] = None
            else:
                if left[place] is not None:
                    left[place] -= 1
                self._spent[key] = self.number(tuple(left))
        known = self._spent[key]
        return None if known is None else (*state[:-1], known)


def with_changes(
    text: str, before: Iterable[View], after: Iterable[View], change: Callable[[View, View], str]
) -> str:
    """Return a text with what `change` says of each node that is another one than before."""
    changes = [change(was, now) for was, now in zip(before, after, strict=True) if was != now]
    told = "; ".join(one for one in changes if one)
    return f"{text}: {told}" if told else text
