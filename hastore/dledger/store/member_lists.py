"""The member lists of a log, `hastore/members.json`: index and nodes of each entry that holds one.

Written, durably, before such an entry is appended. So at a start the file may name entries that the
log does not have, but none is missing. Retention may remove an entry: its list stays here.
"""

from collections.abc import Callable

import msgspec

from hastore.errors import StoreBrokenError
from hastore.store.fs.filesystem import FileSystem

_VERSION = 1
_KEPT = 16  # lists; one that was committed is final, so the last few are enough

Lists = tuple[tuple[int, tuple[int, ...]], ...]


class _File(msgspec.Struct, frozen=True):
    version: int = _VERSION
    lists: Lists = ()


class MemberLists:
    """The lists of one store; one thread at a time changes them."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._path = f"{root}/hastore/members.json"
        self._lists: Lists = ()

    @property
    def last(self) -> tuple[int, ...] | None:
        """The last list; None without one."""
        return self._lists[-1][1] if self._lists else None

    def load(self, begin_index: int, read: Callable[[int], tuple[int, ...] | None]) -> None:
        """Read the file; `read` returns the list in an entry from `begin_index` on, or None.

        Raises StoreBrokenError if the file is damaged, OSError.
        """
        if not self._fs.exists(self._path):
            return
        try:
            found = msgspec.json.decode(self._fs.read_bytes(self._path, 1 << 20), type=_File).lists
        except msgspec.DecodeError as failure:
            raise StoreBrokenError(
                f"{self._path} is damaged ({failure}): restore it, or copy it from another node of"
                " the group that has the same log"
            ) from failure
        self._lists = tuple(
            (index, members)
            for index, members in found
            if index < begin_index or read(index) == members
        )

    def note(self, new: Lists) -> None:
        """Add lists of entries that will be appended. Raises OSError."""
        lists = tuple(one for one in self._lists if one[0] < new[0][0]) + new
        self._fs.replace_bytes(self._path, msgspec.json.encode(_File(lists=lists[-_KEPT:])) + b"\n")
        self._lists = lists

    def cut(self, index: int) -> None:
        """Forget the lists of the entries from `index` on, which were removed."""
        self._lists = tuple(one for one in self._lists if one[0] < index)
