"""Nodes that are added to a group, removed from it, and replaced, as operators do it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hastore.config.model import Mode, NodeAddress
from hastore.server.dledger_node import DLedgerNode
from tests.world.machine_faults import FaultyMachine
from tests.world.machines import addresses

if TYPE_CHECKING:
    from tests.world.walk import Walk

ASK_AFTER_S = 1.5  # a new node is started, and asked for once it has links


def group_of(walk: Walk) -> list[FaultyMachine] | None:
    """Return the machines whose nodes belong to the group now; None while nobody knows."""
    if walk.plan.shape.mode is Mode.CLASSIC:
        return [machine for machine in walk.machines if not machine.aside]
    for machine in walk.machines:
        node = machine.node
        if isinstance(node, DLedgerNode) and node.driver.is_leader and node.driver.core is not None:
            group = node.driver.core.group
            return [walk.machines[n - 1] for n in (*group.members, *group.learners)]
    return None


def _write_list(walk: Walk, nodes: dict[int, NodeAddress]) -> None:
    for machine in walk.machines:
        if machine.number in nodes:
            machine.set_config(nodes=nodes)


def _spare(walk: Walk) -> FaultyMachine | None:
    """Start the machine that is in no group yet, with every node in every file."""
    spare = next((one for one in walk.machines if one.aside and one.number not in walk.left), None)
    if spare is not None:
        spare.aside = False
        nodes = {n: one for n, one in addresses(len(walk.machines)).items() if n not in walk.left}
        _write_list(walk, nodes)
        spare.start()
    return spare


def _ask_all(walk: Walk, command: str, node: int, by: int | None = None) -> None:
    for machine in walk.machines:
        machine.ask(command, node, by)


def add(walk: Walk) -> None:
    """Add the spare machine's node."""
    spare = _spare(walk)
    if spare is not None and walk.plan.shape.mode is Mode.DLEDGER:
        walk.world.after(ASK_AFTER_S, _ask_all, walk, "add", spare.number)


def replace(walk: Walk, index: int) -> None:
    """Replace a node by the spare machine's."""
    spare = _spare(walk)
    if spare is not None:
        walk.world.after(ASK_AFTER_S, _ask_all, walk, "replace", index + 1, spare.number)


def remove(walk: Walk, index: int) -> None:
    """Remove a node, if three or more are left."""
    machine = walk.machines[index]
    if walk.plan.shape.mode is Mode.DLEDGER:
        _ask_all(walk, "remove", index + 1)
        return
    left = [one for one in walk.machines if not one.aside and one is not machine]
    if machine.aside or len(left) < 2 or any(one.config.acks >= len(left) for one in left):
        return
    machine.aside = True
    walk.left.add(machine.number)
    machine.stop()
    known = addresses(len(walk.machines))
    _write_list(walk, {one.number: known[one.number] for one in left})
