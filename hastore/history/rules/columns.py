"""Tables of 64-bit numbers: a row takes 8 bytes a column, and numpy sorts and joins them."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
NONE = -1  # an absent value
LATE = (1 << 62) - 1  # a time after all others
_HALF = 1 << 63
_Name = TypeVar("_Name", bound=Hashable)


class Table:
    """Rows that are added one by one, until somebody reads a column."""

    def __init__(self, *names: str) -> None:
        """Make an empty table with these columns."""
        self._names = {name: place for place, name in enumerate(names)}
        self._cells = array("q")
        self._columns: dict[str, Numbers] = {}  # in place of the cells, afterwards
        self._sorted: dict[str, tuple[Numbers, Numbers]] = {}  # a column's rows, and its values

    def __len__(self) -> int:
        if self._columns:
            return len(next(iter(self._columns.values())))
        return len(self._cells) // len(self._names)

    def add(self, *values: int) -> int:
        """Add a row; return its number."""
        assert not self._columns
        self._cells.extend(values)
        return len(self._cells) // len(self._names) - 1

    def put(self, row: int, **values: int) -> None:
        """Change values of a row that was added."""
        first = row * len(self._names)
        for name, value in values.items():
            self._cells[first + self._names[name]] = value

    def get(self, row: int, name: str) -> int:
        """Return a value of a row."""
        if self._columns:
            return int(self._columns[name][row])
        return self._cells[row * len(self._names) + self._names[name]]

    def __getitem__(self, name: str) -> Numbers:
        """Return a column; after that no row may be added or changed."""
        if not self._columns:
            cells = np.frombuffer(self._cells, np.int64).reshape(-1, len(self._names))
            self._columns = {
                each: np.ascontiguousarray(cells[:, place]) for each, place in self._names.items()
            }
            self._cells = array("q")
        return self._columns[name]

    def row_with(self, name: str, value: int) -> int:
        """Return the first row with a value in a column, NONE if there is none."""
        if name not in self._sorted:
            order = np.argsort(self[name], kind="stable")
            self._sorted[name] = order, self[name][order]
        order, ascending = self._sorted[name]
        place = places_of(ascending, np.array([value]))[0]
        return NONE if place == NONE else int(order[place])


class Names(Generic[_Name]):
    """Numbers for names, in the order in which they come."""

    def __init__(self) -> None:
        """Begin without names."""
        self._numbers: dict[_Name, int] = {}
        self._names: list[_Name] = []

    def number(self, name: _Name) -> int:
        """Return the number of a name."""
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self._names)
            self._names.append(name)
        return found

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[_Name]:
        return iter(self._names)

    def __getitem__(self, number: int) -> _Name:
        return self._names[number]


def as_number(digest: str) -> int:
    """Return a digest of 16 hexadecimal digits as a signed number; raises ValueError."""
    return int(digest, 16) - _HALF


def joined(*parts: Numbers) -> Numbers:
    """Return columns one after the other."""
    return np.concatenate(parts)


def places_of(ascending: Numbers, wanted: Numbers) -> Numbers:
    """Return for each wanted number the place of its first equal, NONE if there is none."""
    if not len(ascending):
        return np.full(len(wanted), NONE, np.int64)
    at = np.searchsorted(ascending, wanted)
    inside = np.minimum(at, len(ascending) - 1)
    return np.where(ascending[inside] == wanted, inside, NONE).astype(np.int64)


def begins(*ordered: Numbers) -> Flags:
    """Return which rows differ from the row before in any of these ordered columns."""
    size = len(ordered[0])
    new = np.ones(size, np.bool_)
    if size:
        new[1:] = False
        for column in ordered:
            new[1:] |= column[1:] != column[:-1]
    return new


def firsts(new: Flags) -> Numbers:
    """Return for each row the first row of its series, by `begins`."""
    rows = np.arange(len(new))
    first: Numbers = np.maximum.accumulate(np.where(new, rows, 0)) if len(new) else rows
    return first


def sums_by(keys: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """Return the distinct keys, ascending, and the sum of each one's values."""
    distinct, place = np.unique(keys, return_inverse=True)
    return distinct, np.bincount(place, values, len(distinct)).astype(np.int64)


def looked_up(keys: Numbers, values: Numbers, wanted: Numbers, default: int) -> Numbers:
    """Return the value of each wanted key; `keys` are ascending and distinct."""
    at = places_of(keys, wanted)
    if not len(keys):
        return np.full(len(wanted), default, np.int64)
    return np.where(at == NONE, default, values[at])


def rows_of(flags: Flags) -> list[int]:
    """Return the numbers of the rows for which a flag is set."""
    found: Any = np.flatnonzero(flags)
    return [int(row) for row in found]
