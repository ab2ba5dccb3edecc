"""Crash points: of each prefix of the effects, the states that a crash may leave.

A change that was not synced is there or not. Of few changes all subsets are taken, of more some
are drawn. A part of the states is torn: some sectors of a write are there, or the length without
the bytes, or a file is under two names. A kill leaves everything, in the same boot.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tests.crash.disk import Disk
from tests.crash.effects import Effect, Names, Promise, Resize, Tree, Write

T = TypeVar("T")
Unit = tuple[int, int]  # (file, number of its change), or (-1, number of a change of names)


@dataclass(frozen=True, slots=True)
class CrashState:
    """What a crash left after `point` effects, and what must hold then."""

    point: int
    files: dict[str, bytes]  # by path
    directories: set[str]
    promise: Promise
    kind: str  # kill, subset, torn, length, two names
    cause: Effect  # the last effect before the crash
    place: str  # the file or directory that it was about
    in_order: bool  # whether changes of names are as a journal keeps them
    pending: tuple[str, ...] = ()  # the files with changes that were not synced

    @property
    def digest(self) -> bytes:
        """Of the bytes under all paths."""
        found = hashlib.blake2b(digest_size=16)
        for path in sorted(self.directories):
            found.update(b"%s/\n" % path.encode())
        for path, data in sorted(self.files.items()):
            found.update(b"%s %d\n" % (path.encode(), len(data)))
            found.update(data)
        return found.digest()


@dataclass
class Budget:
    """How many states of a prefix are taken."""

    drawn: int  # subsets, where not all are taken
    torn: int
    all_of: int = 1  # so many subsets are taken all
    kills: float = 0.05  # the share of promises after which a kill is tried


def points(
    start: Tree,
    effects: Sequence[Effect],
    chance: random.Random,
    budget: Budget,
    chosen: Collection[int] | None = None,
) -> Iterator[CrashState]:
    """Yield the states of all prefixes, or of these lengths, each content once for a promise."""
    disk = Disk(start)
    seen: set[tuple[bytes, int]] = set()
    for point, effect in enumerate(effects, 1):
        disk.follow(effect)
        if disk.promise.note is None or (chosen is not None and point not in chosen):
            continue
        if isinstance(effect, Promise):
            found = _states(disk, point, effect, None, chance, budget)
        elif isinstance(effect, Write | Resize):
            unit = effect.file, len(disk.files[effect.file].changes) - 1
            found = _states(disk, point, effect, unit, chance, budget)
        elif isinstance(effect, Names):
            found = _states(disk, point, effect, (-1, disk.waiting[-1].number), chance, budget)
        else:  # what a sync leaves was possible before it
            found = _states(disk, point, effect, None, chance, Budget(1, 0))
        for state in found:
            key = state.digest, id(state.promise)
            if key not in seen:
                seen.add(key)
                yield state


def _states(
    disk: Disk, point: int, effect: Effect, new: Unit | None, chance: random.Random, budget: Budget
) -> Iterator[CrashState]:
    units = _units(disk)
    place = _place(disk, effect, new)
    pending = tuple(sorted({disk.places.get(file, "?") for file in disk.dirty}))

    def state(tree: Tree, kind: str, numbers: set[int]) -> CrashState:
        in_order = disk.is_in_order(numbers)
        return CrashState(
            point, *tree.paths(), disk.promise, kind, effect, place, in_order, pending
        )

    if isinstance(effect, Promise) and chance.random() < budget.kills:
        numbers = _names(units)
        yield state(_tree(disk, units, numbers), "kill", numbers)
    for chosen in _subsets(units, new, chance, budget):
        numbers = _names(chosen)
        if disk.is_possible(numbers):
            yield state(_tree(disk, chosen, numbers), "subset", numbers)
    for _ in range(budget.torn if units else 0):
        yield _torn(disk, units, new, chance, state)


def _place(disk: Disk, effect: Effect, new: Unit | None) -> str:
    if isinstance(effect, Names):
        (directory, name), _ = effect.changes[0]
        return f"{disk.places.get(directory, '')}/{name}"
    if new is not None:
        return disk.places.get(new[0], "?")
    return ""


def _subsets(
    units: Sequence[Unit], new: Unit | None, chance: random.Random, budget: Budget
) -> Iterator[set[Unit]]:
    """Yield subsets of the units with the new one in them; without it they were there before."""
    others = [unit for unit in units if unit != new]
    base = set() if new is None else {new}
    if 1 << len(others) <= budget.all_of:
        for mask in itertools.product((False, True), repeat=len(others)):
            yield base | {unit for unit, is_in in zip(others, mask, strict=True) if is_in}
        return
    for number in range(budget.drawn):
        ends = number < 2 < budget.drawn
        share = (0.0, 1.0)[number] if ends else chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        yield base | {unit for unit in others if chance.random() < share}


def crash(disk: Disk, chance: random.Random) -> Tree:
    """Return one state that a crash may leave now."""
    return _torn(disk, _units(disk), None, chance, lambda tree, kind, numbers: tree)


def _units(disk: Disk) -> list[Unit]:
    units: list[Unit] = [(-1, one.number) for one in disk.waiting]
    for file in sorted(disk.dirty):
        units += [(file, number) for number in range(len(disk.files[file].changes))]
    return units


def _names(units: Iterable[Unit]) -> set[int]:
    return {number for file, number in units if file < 0}


def _tree(disk: Disk, chosen: Collection[Unit], numbers: set[int]) -> Tree:
    contents = {
        file: disk.files[file].content({n: None for of, n in chosen if of == file})
        for file in disk.dirty
    }
    return disk.after(numbers, contents, frozenset())


def _torn(
    disk: Disk, units: Sequence[Unit], new: Unit | None, chance: random.Random,
    state: Callable[[Tree, str, set[int]], T],
) -> T:  # fmt: skip
    """Return a state in which sectors, the length or one of two names are missing."""
    (chosen,) = _subsets(units, new, chance, Budget(1, 0, 0))
    numbers = disk.with_needs(_names(chosen))
    kind, contents = "torn", {}
    for file in disk.dirty:
        pending = disk.files[file]
        share = chance.choice((0.0, 0.3, 0.7))
        kept = {}
        for of, number in chosen:
            if of == file:
                sectors = pending.sectors(number)
                kept[number] = frozenset(one for one in sectors if chance.random() < share)
        size = None
        if chance.random() < 0.3:
            size = chance.randrange(-1, len(pending.changes))
            if not kept or not any(kept.values()):
                kind = "length"
        contents[file] = pending.content(kept, size)
    split = frozenset(one for one in disk.crossing() if one in numbers and chance.random() < 0.5)
    if split:
        kind = "two names"
    return state(disk.after(numbers, contents, split), kind, numbers)
