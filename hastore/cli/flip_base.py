"""What the planned flips of both modes share: the group, the deadline, and how to go on."""

from __future__ import annotations

import time
from collections.abc import Callable

from hastore.cli.group_files import GroupFiles, Status
from hastore.errors import ConfigError, NotAuthenticatedError, RegistryError, UsageError

POLL_S = 0.1
# Errors of one node, one file or ZooKeeper, which do not know how far a flip is.
STATELESS = (ConfigError, NotAuthenticatedError, RegistryError, UsageError)

Say = Callable[[str, str], None]  # takes a step's name, and what to tell of it


class Flip:
    """A planned flip to node `to`; `run` of a mode does its steps."""

    def __init__(self, group: GroupFiles, to: int, timeout_s: float, say: Say) -> None:
        """Prepare; the deadline is `timeout_s` from now."""
        self._group = group
        self._to = to
        self._say = say
        self._end = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self.master: int | None = None  # the master, or the leader, that the flip has found
        self._is_asked = False  # whether the wanted node was told to take over

    def run(self, *, only_check: bool) -> Status:
        """Do the steps; return the status of node `to`. `only_check`: say them only."""
        raise NotImplementedError

    @property
    def _again(self) -> str:
        """The command that goes on with this flip."""
        return f"`hastore flip -c {self._group.given} --to {self._to}`"

    def _wait_until(self, done: Callable[[], bool], end: float | None = None) -> bool:
        """Wait until `done()`; False if it is not so at `end`, or at the flip's deadline."""
        end = self._end if end is None else end
        while not done():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True


def slave_of(status: Status, number: int) -> Status | None:
    """Return what a master, or a leader, says of a node that follows it; None without a link."""
    return next((one for one in status["slaves"] if one["node"] == number), None)
