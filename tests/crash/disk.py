"""A disk that follows recorded effects: what is on it for sure, and what a crash may add to that.

The model is what ext4 and XFS allow, and a little more:

    bytes       each sector of 512 bytes has what the last sync left, or what any write since then
                made of it; sectors are independent of each other, of the length, of other files
    the length  that of the last sync, or any since; bytes that are not written are zeros
    names       a change of names is there or not, a rename as a whole. Of two changes, the later
                may be there without the earlier one, unless they have a name or a new directory in
                common. A sync of a directory covers its names, a sync of a file its bytes only
    both        a name says nothing about the bytes, nor the bytes about a name

ext4 and XFS keep all changes of names in order; a state in which they are in order says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.crash.effects import (
    SECTOR,
    Effect,
    Name,
    Names,
    Promise,
    Resize,
    Sync,
    SyncAll,
    SyncNames,
    Tree,
    Write,
)

Change = Write | Resize


@dataclass(slots=True)
class Pending:
    """A file: the bytes that are on the disk, and what came after."""

    base: bytes = b""
    changes: list[Change] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # the length after each change

    def add(self, change: Change) -> None:
        size = self.sizes[-1] if self.sizes else len(self.base)
        if isinstance(change, Write):
            size = max(size, change.at + len(change.data))
        else:
            size = change.size
        self.changes.append(change)
        self.sizes.append(size)

    def settle(self) -> None:
        """Put everything on the disk."""
        self.settle_first(len(self.changes))

    def settle_first(self, count: int) -> None:
        """Put the first changes on the disk."""
        self.base = self.content(dict.fromkeys(range(count)))
        self.changes, self.sizes = self.changes[count:], self.sizes[count:]

    def sectors(self, number: int) -> range:
        """Return the sectors that a change touches; those beyond the new end of a shorter file."""
        change = self.changes[number]
        if isinstance(change, Write):
            return range(change.at // SECTOR, -(-(change.at + len(change.data)) // SECTOR))
        before = self.sizes[number - 1] if number else len(self.base)
        return range(change.size // SECTOR, -(-before // SECTOR))  # none if it became longer

    def _shortens(self, number: int) -> bool:
        return isinstance(self.changes[number], Resize) and len(self.sectors(number)) > 0

    def content(
        self, chosen: Mapping[int, frozenset[int] | None], size: int | None = None
    ) -> bytes:
        """Return the bytes after a crash that kept some changes: of each some sectors, or all.

        A sector that has a change has all changes before it, too: they were in the same page.
        `size` is the number of the change whose length is there, -1 for the old one.
        """
        if not chosen and size is None:
            return self.base
        last = max(chosen, default=-1) if size is None else size
        last = max([last, *(n for n in chosen if self._shortens(n))])
        # What is beyond the new end of a file that became shorter is gone with its old length.
        cuts = [n for n in range(last + 1) if isinstance(self.changes[n], Resize)]
        versions: dict[int, int] = {}
        for number in sorted({*chosen, *cuts}):
            kept = chosen.get(number)
            for sector in self.sectors(number) if kept is None else kept:
                versions[sector] = number
        data = bytearray(self.base.ljust(max([len(self.base), *self.sizes], default=0), b"\0"))
        for number, change in enumerate(self.changes):
            _apply(data, number, change, self.sectors(number), versions)
        end = self.sizes[last] if last >= 0 else len(self.base)
        return bytes(data[:end]).ljust(end, b"\0")


def _apply(
    data: bytearray, number: int, change: Change, sectors: range, versions: Mapping[int, int]
) -> None:
    for sector in sectors:
        if versions.get(sector, -1) < number:
            continue
        low, high = sector * SECTOR, (sector + 1) * SECTOR
        if isinstance(change, Resize):
            low = max(low, change.size)
            high = min(high, len(data))
            data[low:high] = bytes(max(0, high - low))
        else:
            low, high = max(low, change.at), min(high, change.at + len(change.data))
            data[low:high] = change.data[low - change.at : high - change.at]


@dataclass(frozen=True, slots=True)
class NameChange:
    """A change of names, and those that must be there for it."""

    number: int
    change: Names
    needs: frozenset[int]


class Disk:
    """The disk after some effects; `follow` takes the next one."""

    def __init__(self, tree: Tree) -> None:
        self.names: dict[Name, int] = dict(tree.names)
        self.directories = set(tree.directories)
        self.files = {number: Pending(data) for number, data in tree.files.items()}
        self.waiting: list[NameChange] = []  # changes of names that are not on the disk for sure
        self.synced_names = -1  # the last of those that are
        self.promise = Promise()
        self.dirty: set[int] = set()  # files with changes
        self.places: dict[int, str] = {}  # a path of each number, for reports
        self._count = 0
        for (directory, name), number in sorted(tree.names.items()):
            self.places[number] = f"{self.places.get(directory, '')}/{name}"

    def follow(self, effect: Effect) -> None:
        """Take one more effect."""
        match effect:
            case Write() | Resize():
                self.files.setdefault(effect.file, Pending()).add(effect)
                self.dirty.add(effect.file)
            case Sync():
                self._settle(effect.file)
            case Names():
                self._take_names(effect)
            case SyncNames():
                self._sync_names(effect.directory)
            case SyncAll():
                for file in list(self.dirty):
                    self._settle(file)
                self._settle_names(self.waiting)
            case Promise():
                self.promise = effect

    def _settle(self, file: int) -> None:
        self.files.setdefault(file, Pending()).settle()
        self.dirty.discard(file)

    def _take_names(self, effect: Names) -> None:
        touched = {name for name, _ in effect.changes}
        needs = frozenset(
            one.number
            for one in self.waiting
            if touched & {name for name, _ in one.change.changes}
            or one.change.made in effect.directories
            or effect.removed in one.change.directories
        )
        for (directory, name), number in effect.changes:
            if number is not None:
                self.places[number] = f"{self.places.get(directory, '')}/{name}"
        if effect.made is not None:
            self.directories.add(effect.made)
        self.waiting.append(NameChange(self._count, effect, needs))
        self._count += 1

    def _sync_names(self, directory: int) -> None:
        wanted = {one.number for one in self.waiting if directory in one.change.directories}
        wanted = self.with_needs(wanted)
        self._settle_names([one for one in self.waiting if one.number in wanted])

    def _settle_names(self, changes: Sequence[NameChange]) -> None:
        gone = {one.number for one in changes}
        for one in changes:
            _rename(self.names, one.change)
            self.synced_names = max(self.synced_names, one.number)
        self.waiting = [one for one in self.waiting if one.number not in gone]

    def write_back(self, file: int, most: int) -> None:
        """Put older changes of a file on the disk if it has more than so many, as kernels do."""
        if len(self.files[file].changes) > most:
            self.files[file].settle_first(most // 2)

    # -- crashes ----------------------------------------------------------------------------------

    def with_needs(self, numbers: set[int]) -> set[int]:
        """Return these changes of names with all that must be there for them."""
        found = set(numbers)
        for one in reversed(self.waiting):  # a change needs earlier ones
            if one.number in found:
                found |= one.needs
        return found

    def is_possible(self, numbers: set[int]) -> bool:
        """Whether these changes of names, and no others, may be there."""
        return all(
            one.needs & {other.number for other in self.waiting} <= numbers
            for one in self.waiting
            if one.number in numbers
        )

    def is_in_order(self, numbers: set[int]) -> bool:
        """Whether a journal that keeps the order may leave these changes of names."""
        last = max([self.synced_names, *numbers])
        return all((one.number <= last) == (one.number in numbers) for one in self.waiting)

    def after(
        self, numbers: Iterable[int], contents: Mapping[int, bytes], split: frozenset[int]
    ) -> Tree:
        """Return what a crash leaves.

        `numbers` are the changes of names that are there, `contents` the bytes of files with
        changes. A rename in `split` has left the file under its old name in another directory, too.
        """
        names, chosen = dict(self.names), set(numbers)
        for one in self.waiting:
            if one.number in chosen:
                _rename(names, one.change, split=one.number in split)
        files = {number: pending.base for number, pending in self.files.items()}
        files.update(contents)
        return Tree(names, frozenset(self.directories), files)

    def crossing(self) -> list[int]:
        """Return the renames of files from one directory into another that are not synced."""
        return [
            one.number
            for one in self.waiting
            if one.change.kind == "rename"
            and len(one.change.directories) > 1
            and one.change.changes[0][1] not in self.directories
        ]


def _rename(names: dict[Name, int], change: Names, *, split: bool = False) -> None:
    for name, number in change.changes:
        if number is not None:
            names[name] = number
        elif not split:
            names.pop(name, None)
