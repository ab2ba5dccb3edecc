"""`hastore/once.json`: what the operator allows or asks for one time, written by `hastore
promote` and `demote`.

Good for 60 s and the epoch it was written under; removed, durably, before it is used, or when it is
no longer good.
"""

import logging

import msgspec

from hastore.clock import Clock
from hastore.ha.promotion.promoter import Flags
from hastore.store.fs.filesystem import FileSystem

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
    """The door to the file in one store."""

    def __init__(self, fs: FileSystem, root: str, clock: Clock) -> None:
        self._fs = fs
        self._path = f"{root}/hastore/once.json"
        self._clock = clock

    def take(self, command: str, epoch: int) -> Flags | None:
        """Return and remove what the file allows for `command` in this epoch; None when it does
        not. OSError: it cannot be removed, and is not used.
        """
        if not self._fs.exists(self._path):
            return None
        try:
            found = msgspec.json.decode(self._fs.read_bytes(self._path), type=OneShotFile)
        except msgspec.DecodeError as error:
            log.error(
                "%s is removed, it is not what `hastore promote` writes: %s", self._path, error
            )
            self._remove()
            return None
        if found.epoch != epoch or abs(self._clock.wall_ms() - found.wall_ms) > GOOD_FOR_MS:
            log.error(
                "%s is removed: written under epoch %d (now %d), good for 60 s; give the "
                "command again",
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
        """Remove the file for good: after a power loss nothing must be allowed a second time."""
        self._fs.remove(self._path)
        self._fs.sync_dir(self._path.rpartition("/")[0])
