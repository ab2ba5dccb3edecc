"""Whether each change of a role was asked for: data of ZooKeeper that are lost or restored are no
order.

A node's promotion is in order if an operator gave a command for it, and none of the commands to be
a slave that came after that one's end has reached the node; and so for the other way. A command
that failed may not have reached it, and neither one whose znode was lost before the node saw it. A
node that starts begins with the file that it has read; it looks for another one before it acts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hastore.config.model import Role
from tests.world.scheduler import Scheduler

FIRST_START = "the first start"  # of RoleService
WHILE_DOWN = "the role was changed while the node was down"
GOES_ON = "an order that a restart has interrupted goes on"


@dataclass
class Order:
    """A command, from its begin to its end."""

    role: Role
    begun_s: float
    ended_s: float = float("inf")
    failed: bool = False


@dataclass
class Orders:
    """The commands for one node."""

    world: Scheduler
    given: list[Order] = field(default_factory=list)
    # When the node has followed a command last: to be a master (True), or a slave.
    followed_s: dict[bool, float] = field(default_factory=dict)
    lost_s: float = -1.0  # when ZooKeeper lost data last
    read_s: float = -1.0  # when the node read its file at its last start

    def begin(self, role: Role) -> Order:
        """Note that a command begins."""
        self.given.append(Order(role, self.world.now))
        return self.given[-1]

    def now(self, role: Role) -> None:
        """Note a command that is done at once."""
        self.begin(role).ended_s = self.world.now

    def watch(self, on_change: Callable[[str, str, str], None]) -> Callable[[str, str, str], None]:
        """Return RoleService's `on_change`, which looks at each change of the role first."""

        def look(action: str, outcome: str, reason: str) -> None:
            for one, how in (("promote", "asked"), ("demote", "done")):
                if (action, outcome) == (one, how) and reason != FIRST_START:
                    to_master = one == "promote"
                    self.followed_s[to_master] = self.world.now
                    known_s = self.read_s if reason in (WHILE_DOWN, GOES_ON) else self.world.now
                    in_order = self._is_in_order(to_master, known_s)
                    assert in_order, f"nobody asked for this: {one}, {reason}"
            on_change(action, outcome, reason)

        return look

    def _is_in_order(self, to_master: bool, known_s: float) -> bool:
        later = [
            one.begun_s for one in self.given
            if one.role.is_master is not to_master and one.begun_s <= known_s
            and self._has_arrived(one)
        ]  # fmt: skip
        return any(
            one.role.is_master is to_master and not any(begun > one.ended_s for begun in later)
            for one in self.given
        )

    def _has_arrived(self, order: Order) -> bool:
        if self.followed_s.get(order.role.is_master, -1.0) >= order.begun_s:
            return True
        return not order.failed and self.lost_s < order.begun_s
