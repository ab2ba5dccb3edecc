"""`<store>/hastore/once.json`: flags for one promotion or demotion, written by `hastore promote`
and `hastore demote`.

The file is valid for 60 s, and only in the epoch in which it was written. RoleService's thread
removes the file, durably, before it uses the flags. It also removes a file that is not valid.
"""

import logging

import msgspec

from hastore.clock import Clock
from hastore.fs.filesystem import FileSystem
from hastore.ha.promotion.promoter import Flags

log = logging.getLogger(__name__)

GOOD_FOR_MS = 60_000


class OneShotFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content."""

    command: str  # "promote" | "demote"
    epoch: int
    wall_ms: int
    no_catch_up: bool = False
    force_unclean: bool = False
    accept_loss: bool = False


class OneShotFlags:
    """The file `once.json` in one store."""

    def __init__(self, fs: FileSystem, root: str, clock: Clock) -> None:
        self._fs = fs
        self._path = f"{root}/hastore/once.json"
        self._clock = clock

    def take(self, command: str, epoch: int) -> Flags | None:
        """If the file is valid and for `command`, remove it and return its flags; else return None.

        A valid file is at most 60 s old and was written in `epoch`; an invalid one is removed too.
        Raises OSError if the file cannot be read or removed; its flags are then not used.
        """
        if not self._fs.exists(self._path):
            return None
        try:
            found = msgspec.json.decode(self._fs.read_bytes(self._path), type=OneShotFile)
        except msgspec.DecodeError as error:
            log.error("%s is removed: it is not a file of `hastore promote`: %s", self._path, error)
            self._remove()
            return None
        if found.epoch != epoch or abs(self._clock.wall_ms() - found.wall_ms) > GOOD_FOR_MS:
            log.error(
                "%s is removed: it was written under epoch %d (now %d), or more than 60 s ago; "
                "give the command again",
                self._path,
                found.epoch,
                epoch,
            )
            self._remove()
            return None
        if found.command != command:
            return None
        self._remove()
        return Flags(
            no_catch_up=found.no_catch_up,
            force_unclean=found.force_unclean,
            accept_loss=found.accept_loss,
        )

    def _remove(self) -> None:
        """Remove the file durably, so that it is not used a second time after a power loss."""
        self._fs.remove(self._path)
        self._fs.sync_dir(self._path.rpartition("/")[0])
