"""Walks of the simulation in which syncs do not return for a while: HangingWorld, for `walk`.

A driver that saved something then would stand still, with its lock held. So once a core knows of
the hang, what it says must need no file that is durable. Only a leader that commits its own removal
is exempt. The choices come from a source of their own: other walks stay what they are.
"""

from __future__ import annotations

import random

from hastore.dledger.core.events import Event, SyncHangs, Update
from tests.dledger.oracle import Violation
from tests.dledger.sim_disk import Entry, Members
from tests.dledger.simulation import Plan, SimNode, World

NOTICED_MS = 200.0
SAVED = ("hard_state", "truncate_from", "install", "member_lists")


class HangingNode(SimNode):
    """A node whose syncs may hang."""

    def __init__(self, world: World, number: int, members: Members) -> None:
        super().__init__(world, number, members)
        self.hangs = False
        self.held = False  # a sync would be over

    def start(self) -> None:
        self.hangs = self.held = False
        super().start()

    def hang(self, noticed_ms: float) -> None:
        """Let no sync return; the core learns it later."""
        if self.up and not self.hangs:
            self.hangs = True
            self.world.after(noticed_ms, self._notice, self.life)

    def _notice(self, life: int) -> None:
        if self.up and self.life == life and self.hangs:
            self.world.count(f"hangs as {self.role.value}")
            self.step(SyncHangs(self.local_ms(), True))

    def goes_on(self) -> None:
        """Let what is held return."""
        if not self.up or not self.hangs:
            return
        self.hangs = False
        if self.held:
            self.held = False
            self._synced(self.life)
        if self.core.hangs:
            self.step(SyncHangs(self.local_ms(), False))

    def _synced(self, life: int) -> None:
        if self.hangs and self.up and self.life == life:
            self.held = True
        else:
            super()._synced(life)

    def _apply(self, update: Update, event: Event, taken: tuple[Entry, ...]) -> None:
        saved = [name for name in SAVED if getattr(update, name) is not None]
        told = update.removed and update.committed_index is None  # else it removed itself
        if self.core.hangs and (saved or told):
            raise Violation(f"node {self.number} saves {saved} while its disk hangs: {event}")
        super()._apply(update, event, taken)


class HangingWorld(World):
    """A world in which now and then the syncs of a node hang, mostly those of a leader."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.hang_rng = random.Random(seed ^ 0x4A46)
        super().__init__(seed, plan)

    def make_node(self, number: int, members: Members) -> SimNode:
        return HangingNode(self, number, members)

    def begin(self) -> None:
        super().begin()
        self.after(150.0, self._hang)

    def _hang(self) -> None:
        if not self.chaos:
            return
        rng, election_ms = self.hang_rng, self.plan.settings.election_timeout_ms
        self.after(rng.expovariate(1.0 / (2.0 * election_ms)), self._hang)
        node = self.leader() if rng.random() < 0.5 else None
        node = node or self.nodes[rng.choice(self.numbers)]
        assert isinstance(node, HangingNode)
        node.hang(NOTICED_MS * rng.random())
        self.after(election_ms * rng.choice((0.5, 2.0, 4.0, 8.0)), node.goes_on)

    def heal(self) -> None:
        for node in self.nodes.values():
            assert isinstance(node, HangingNode)
            self.guard(node.goes_on)
        super().heal()
