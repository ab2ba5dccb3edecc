"""The fault budget: which faults excuse that an acknowledged message is gone.

docs/architecture.md has the levels. What is not in the history excuses nothing: without a fault
each message must be there, whatever its level.

Faults that count, each with its node:

    power      the machine lost its power: what was not synced is gone
    lost       the machine, or its disk, is gone for good
    in-sync    the node, or the one that replaced it, has all again that its master has
    force-unclean, accept-loss   an operator gave up messages; no node is needed

A kill excuses nothing. A failover is an epoch of another node, unless it was planned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from hastore.history.rules.events import Epoch, Fault, Header

GIVEN_UP = ("force-unclean", "accept-loss")
COUNTED = ("power", "lost", "in-sync", *GIVEN_UP)
_SYNC = re.compile(r"(SYNC_MEM|SYNC_DISK)\((\d{1,4})\)")
_ALONE = ("MASTER_MEM", "MASTER_DISK", "CLASSIC")
_NODE = 0xFFFF  # the part of an epoch of mode classic that names its node
_FIRST_OWN = 1 << 16  # epochs below it are RocketMQ's, or forgotten


class Level(NamedTuple):
    """A level of a reply."""

    name: str  # without the number
    copies: int  # machines that have the message; 0: a majority

    @property
    def on_disk(self) -> bool:
        """Whether a power loss of all its machines leaves it."""
        return self.name.endswith("_DISK")

    @property
    def is_alone(self) -> bool:
        """Whether only the master is said to have it."""
        return self.name in _ALONE

    def __str__(self) -> str:
        """Return it as a reply states it."""
        return f"{self.name}({self.copies - 1})" if self.name.startswith("SYNC") else self.name


def parse_level(text: str) -> Level | None:
    """Return a level; None for a text that no reply has."""
    counted = _SYNC.fullmatch(text)
    if counted is not None and int(counted[2]) > 0:
        return Level(counted[1], int(counted[2]) + 1)
    if text in _ALONE:
        return Level(text, 1)
    return Level(text, 0) if text in ("QUORUM_MEM", "QUORUM_DISK") else None


class Excuse(NamedTuple):
    """Why a message may be gone."""

    text: str
    is_archived: bool = False  # the node that had it alone cut it off, and keeps it


class Budget:
    """The faults of a history; asked for each message that is gone."""

    def __init__(self, header: Header, faults: Iterable[Fault], epochs: Iterable[Epoch]) -> None:
        """Take all faults, and all epochs that anybody has seen."""
        self._header = header
        counted = (one for one in faults if one.fault in COUNTED)
        self._faults = sorted(counted, key=lambda one: one.t)
        epochs = list(epochs)
        self._epochs = {one.epoch for one in epochs}
        self._unplanned = sorted({one.epoch for one in epochs if not one.planned}, reverse=True)

    @property
    def of_readers(self) -> Level:
        """What readers see has at least this level."""
        if self._header.mode == "sync":
            return Level("SYNC_MEM", self._header.acks + 1)
        return Level("QUORUM_MEM", 0) if self._header.mode == "dledger" else Level("MASTER_MEM", 1)

    def excuse(self, level: Level, epoch: int, since: int) -> Excuse | None:
        """Return why a message acknowledged at `since` may be gone; None if it must be there.

        `epoch`: of the master that acknowledged it, 0 if it is not known.
        """
        if any(one.fault in GIVEN_UP and one.t >= since for one in self._faults):
            return Excuse("an operator gave messages up")
        if level.is_alone:
            return self._alone(level, epoch, since)
        needed = level.copies or (self._header.nodes // 2 + 1 if self._header.nodes else 0)
        most = self._most_gone(since, power=not level.on_disk)
        if not needed or most < needed:
            return None
        what = "disks" if level.on_disk else "machines, or their power,"
        return Excuse(f"{most} {what} were lost at a time; {level} survives fewer than {needed}")

    def _alone(self, level: Level, epoch: int, since: int) -> Excuse | None:
        """Return why a message that only the master had may be gone."""
        node = epoch & _NODE if epoch >= _FIRST_OWN else None
        for one in self._faults:
            fits = one.fault == "lost" or (one.fault == "power" and not level.on_disk)
            if fits and one.t >= since and (node is None or one.node in (None, node)):
                return Excuse(f"{level}, and the master had the fault {one.fault}")
        for later in self._unplanned:
            if not epoch and level.name != "CLASSIC" and not self._is_failover(later):
                continue  # the master is one of the group, perhaps of this very epoch
            if later > epoch and (node is None or later & _NODE != node):
                text = f"{level}, and epoch {later} is of another master"
                return Excuse(text, is_archived=True)
        return None

    def _is_failover(self, epoch: int) -> bool:
        """Return whether an epoch came after one of another node, or of a RocketMQ master."""
        return any(
            one < epoch and (one < _FIRST_OWN or one & _NODE != epoch & _NODE)
            for one in self._epochs
        )

    def _most_gone(self, since: int, *, power: bool) -> int:
        """Return how many nodes were without their bytes at the same time, since a time."""
        gone: set[int | None] = set()
        dark: set[int | None] = set()
        most = 0
        for one in self._faults:
            if one.t < since:
                continue
            if one.fault == "lost":
                gone.add(one.node)
            elif one.fault == "power" and power:
                dark.add(one.node)
            elif one.fault == "in-sync":
                dark.discard(one.node)
                gone.discard(one.node)
            most = max(most, len(gone | dark))
        return most
