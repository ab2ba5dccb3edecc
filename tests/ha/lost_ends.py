"""Random walks of the simulated group over disks that lose the end of the log in silence.

What such a disk has lost may have been confirmed, so most promises of docs/failover.md cannot hold.
What must hold: a slave that follows has a part of its master's log, and not other bytes; and once
all nodes answer, and the operator gives up what differs, all logs become equal.
"""

from __future__ import annotations

from hastore.errors import GroupDisagrees, HastoreError, PromotionRefused
from hastore.ha.promoter import Flags
from tests.ha.simulation import (
    NESTED_MAX,
    PLAIN,
    SimNode,
    Violation,
    World,
    epoch_node,
    settings_of,
    take_steps,
)

LOST_MAX = 16
ALL_GIVEN_UP = Flags(force_unclean=True, accept_loss=True)


class LyingWorld(World):
    """A group whose masters may lose the end of their logs while they are down."""

    def step(self, busy: SimNode | None = None) -> None:
        try:
            super().step(busy)
        except Violation as violation:
            if "disagree" not in str(violation) and "told to cut" not in str(violation):
                raise
            self.count("disagrees")  # the operator has to decide, which is right here

    def do_restart(self, node: SimNode) -> None:
        if node.up:
            return
        store, history = node.store, node.state.history
        if history and epoch_node(history[-1].epoch) == node.number and self.rng.random() < 0.5:
            low = max(history[-1].start, store.max_offset - LOST_MAX)
            end = self.rng.randint(low, max(low, store.max_offset))
            if end < store.max_offset:
                store._cut(end)
                self.count("lie")
        self.crashes = False
        node.start()
        self.crashes = self.crash_rate > 0
        if self.rng.random() < 0.9 and node.resume():
            self.count("resume")

    def do_kill(self, node: SimNode) -> None:
        masters = [each for each in self.nodes.values() if each.open]
        super().do_kill(masters[0] if masters and masters[0] not in self.busy else node)

    def do_promote(self, node: SimNode, flags: Flags = PLAIN) -> None:
        if flags is not PLAIN or self.rng.random() < 0.3:
            super().do_promote(node, flags)

    def check(self) -> None:
        for node in self.nodes.values():
            stream = node.stream
            if not node.up or stream is None or stream.closed:
                continue
            connection, host = stream.connection, stream.connection.host
            if not host.open or host.life != connection.life or connection.closed:
                continue
            low, end = max(node.store.min_offset, host.store.min_offset), node.store.max_offset
            if node.store.data[low:end] != host.store.data[low:end]:
                raise Violation(f"node {node.number} follows over other bytes than it was sent")
            self.counts["prefix"] = self.counts.get("prefix", 0) + 1

    def heal(self) -> None:
        """Let the operator promote some node, and give up what the others have."""
        self.crashes, self.crash_rate, self.loss_rate = False, 0.0, 0.0
        self.cut_off.clear()
        self.depth = NESTED_MAX
        for node in self.nodes.values():
            if not node.up:
                node.start()
            node.end_stream()
        chosen = self.nodes[self.rng.choice(self.numbers)]
        chosen.acks = chosen.state.data.acks_min or self.acks
        chosen.promoter.begin()
        try:
            self.do_promote(chosen, ALL_GIVEN_UP)
        except (PromotionRefused, GroupDisagrees):
            self.count("refused")
            return
        for _ in range(4):
            for node in self.nodes.values():
                if node is not chosen and (node.stream is None or node.stream.closed):
                    node.client.accept_loss = True
                    try:
                        node.client._follow_once()
                    except HastoreError as error:
                        raise Violation(f"healed, yet {error}") from error
        for _ in range(2000):
            self.do_send(chosen)
            for node in self.nodes.values():
                self.do_receive(node)
            self.check()
        for node in self.nodes.values():
            low = max(node.store.min_offset, chosen.store.min_offset)
            if node.store.data[low:] != chosen.store.data[low:]:
                raise Violation(f"healed, yet the log of node {node.number} differs")
        self.count("healed")


def lying_walk(seed: int, steps: int = 250) -> World:
    """Take one walk; a Violation has the seed and the last steps."""
    settings = settings_of(seed) | {"retention": False, "reacks": False, "power": False}
    settings |= {"entries": 512, "crash_rate": 0.0}
    world = LyingWorld(seed, **settings)
    world.more_steps = ["kill", "restart", "restart", "part"] * 3
    take_steps(world, steps, f"seed {seed} ({settings})", shown=60)
    return world
