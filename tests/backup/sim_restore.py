"""Walks with backups: a node is lost for good, and one restored from a backup takes its place.

The backup is of any node, at any time. The restored node has the state that `hastore restore`
writes, a number of its own, and the log of the backup. Its number replaces that of the lost node in
all files at once; another node is lost only when all have followed into an epoch of the new list
and are clean: more is not promised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hastore.backup.restore import new_member_state
from hastore.ha.node.node_state import Durable, NodeState
from hastore.protocol.hello import Hello
from tests.ha.simulation import (
    SimConnection,
    SimNode,
    Violation,
    World,
    installed,
    settings_of,
    size_of,
)

_LOST_MAX = 3
_MORE_STEPS = ["back_up"] * 2 + ["lose"] * 4 + ["promote"]


class Copy(NamedTuple):
    """A backup."""

    data: bytes  # of the log, from offset 0 on
    min_offset: int
    confirmed_offset: int
    node: Durable


class RestoreWorld(World):
    """A World with backups. With `as_it_was` the lost node comes back as the node of a backup."""

    def __init__(self, seed: int, *, as_it_was: bool = False, **settings: Any) -> None:
        self.copies: list[Copy] = []
        self.lost = 0
        self.as_it_was = as_it_was
        super().__init__(seed, **settings)
        self.more_steps = _MORE_STEPS

    def call(self, source: SimNode, number: int, hello: Hello) -> tuple[Hello, Any, SimConnection]:
        if number not in self.nodes:
            raise ConnectionRefusedError(f"node {number} is lost")
        return super().call(source, number, hello)

    @property
    def pending(self) -> bool:
        """Whether a node is not clean, or has not followed into an epoch of the present list."""
        states = [node.state for node in self.nodes.values()]
        if any(one.data.unclean for one in states):
            return True
        lists = {one.history[-1].nodes if one.history else () for one in states}
        return bool(self.lost) and lists != {tuple(self.numbers)}

    def do_back_up(self, node: SimNode) -> None:
        """Take a backup of whole records, up to what readers may see."""
        if not node.up or node.state.data.intent is not None:
            return
        store = node.store
        ends = [at + size_of(value) for at, value in store.records()]
        end = max((one for one in ends if one <= store.readable_offset), default=0)
        if end:
            confirmed = min(store.confirmed_offset, end)
            data = bytes(store.data[:end])
            self.copies.append(Copy(data, store.min_offset, confirmed, node.state.data))
            self.count("backup")

    def do_lose(self, node: SimNode) -> None:
        """Lose a node for good; a restored one takes its place."""
        copies = [one for one in self.copies if not self.as_it_was or one.node.node == node.number]
        if self.depth or self.pending or self.lost == _LOST_MAX or not copies:
            return
        self.lost += 1
        self.crashes = False
        node.die()
        self.history.fault("lost", node.number)
        self._forget(node.number)
        number = node.number if self.as_it_was else 10 + self.lost
        self.numbers = sorted({*self.numbers, number} - ({node.number} - {number}))
        new = self._restored(number, self.rng.choice(copies))
        new.acks = node.acks
        self.nodes[number] = new
        for one in self.nodes.values():
            if one.up:
                one.member.learn_nodes(new.config.nodes)
        new.start()
        self.count("restored")

    def _forget(self, number: int) -> None:
        """Let all links of a node end, and the node be gone."""
        for link in self.connections:
            if number in (link.node, link.host.number):
                link.close("the node is lost")
                stream = self.nodes[link.node].stream
                if stream is not None and stream.connection is link:
                    stream._closed = True
        self.connections = [
            one for one in self.connections if number not in (one.node, one.host.number)
        ]
        self.cut_off.discard(number)
        del self.nodes[number]

    def _restored(self, number: int, copy: Copy) -> SimNode:
        new = SimNode(self, number)
        store, end = new.store, len(copy.data)
        store.data, store.min_offset, store.flushed_offset = (
            bytearray(copy.data),
            copy.min_offset,
            end,
        )
        store.confirmed_offset = store.readable_offset = copy.confirmed_offset
        state = NodeState(new.files, "/n")  # type: ignore[arg-type]
        state.load(number, "c", "g")
        if self.as_it_was:
            names = [name for name in Durable.__struct_fields__ if name != "format"]
            state.save(**{name: getattr(copy.node, name) for name in names})
        else:
            state.save(**new_member_state(copy.node, end))
        return new

    @property
    def candidates(self) -> list[int]:
        """The clean node that is furthest: others may count lost nodes of a list before."""
        clean = [one for one in self.nodes.values() if not one.state.data.unclean]
        order = {one.number: (one.state.last_epoch, one.store.max_offset) for one in clean}
        return [max(order, key=order.__getitem__)] if order else self.numbers


def walk_with_backups(seed: int, steps: int = 250, *, as_it_was: bool = False) -> RestoreWorld:
    """Take one walk; a Violation has the seed and the last steps."""
    world = RestoreWorld(seed, as_it_was=as_it_was, **settings_of(seed))
    with installed(world):
        try:
            for _ in range(steps):
                world.step()
            world.powers += world.lost  # who waits for a lost node is refused, and that is right
            world.heal()
        except Violation as violation:
            tail = "\n".join(world.trace[-40:])
            raise Violation(f"seed {seed}, with backups: {violation}\n{tail}") from violation
    return world
