"""What a promotion waits for, as its node says: whether it gets on, and what to tell meanwhile."""

import re
from collections.abc import Callable
from typing import Any

from hastore.cli.common import print_note
from hastore.config.model import Role

NO_NEW_EPOCH = "no new epoch has begun"  # a problem of RoleService's begins so
REPLAY_LATE = "replay is "  # in the reason of a promotion that waits for replay alone

Status = dict[str, Any]


def no_new_epoch(status: Status) -> str:
    """Say why a master has not begun the new epoch that it was told to begin, if it says so."""
    return _new_epoch_problem(status) or f"it is {status['role']} in epoch {status['epoch']}"


def told_reason(status: Status, reason: str) -> str:
    """Return the reason with what the node says of its registry, if anything, before it.

    A node that cannot follow ZooKeeper does not know what it was told to be: its own reason is that
    of its old role.
    """
    registry = (text for text in status.get("problems", []) if text.startswith("the registry"))
    return "; ".join([*registry, reason])


def _new_epoch_problem(status: Status) -> str | None:
    told = (text for text in status.get("problems", []) if text.startswith(NO_NEW_EPOCH))
    return next(told, None)


def awaited_nodes(text: str) -> list[int]:
    """Return the nodes whose answers a promotion waits for, as its reason names them."""
    found = re.search(r"waiting for node ([0-9]+(?:, [0-9]+)*)", text)
    return [] if found is None else [int(number) for number in found[1].split(", ")]


class Progress:
    """Whether a promotion gets on, from one status of its node to the next.

    What puts add to the log is no progress of the promotion: it would never be late while producers
    run.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, ...] | None = None
        self._awaited: int | None = None  # the fewest nodes that were awaited so far

    def moved(self, status: Status) -> bool:
        """Whether the promotion has got on since the last call; True at the first."""
        reason = status["reason"] or no_new_epoch(status)
        state: tuple[Any, ...] = (status["role"], status["epoch"])
        grows_by_puts = status["writable"] or status.get("master") is not None
        # An unclean node becomes clean, and counts, when it has reached its master's end.
        if not grows_by_puts or status.get("unclean"):
            state += (status["max_offset"],)
        if not grows_by_puts or REPLAY_LATE in reason:
            state += (status.get("dispatched_offset"),)
        moved = state != self._last
        self._last = state
        awaited = len(awaited_nodes(reason))
        if awaited:
            moved |= self._awaited is not None and awaited < self._awaited
            self._awaited = awaited if self._awaited is None else min(awaited, self._awaited)
        return moved


class Notes:
    """Tells what a promotion waits for, each reason once."""

    def __init__(self, name: str, say: Callable[[str], None] = print_note) -> None:
        """Prepare; `say` takes each line, which begins with `name`."""
        self._name = name
        self._say = say
        self._told: set[object] = set()

    def tell(self, status: Status, role: Role) -> None:
        """Print a note if the node waits for something that was not told yet."""
        if status["role"] != role.value:
            return  # it has not read its role yet, or has given up
        text = status["reason"] or _new_epoch_problem(status)
        if text is None:
            return
        words = re.sub("[0-9][0-9,]*", "", text)  # its numbers of bytes change all the time
        kind = tuple(awaited_nodes(text)), words
        if kind not in self._told:
            self._told.add(kind)
            self._say(f"{self._name}: {text}")
