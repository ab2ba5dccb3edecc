"""A node that has left: when the others forget it, and what it says itself if it still runs."""

from __future__ import annotations

import pathlib

import pytest

from hastore.config.model import Role
from hastore.server import role_service
from hastore.server.node import Node
from tests.ha.nodes import wait_for
from tests.server.retention.kit import Nodes
from tests.server.roles.test_role_service import command, linked, order, writable


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master looks at its group often."""
    monkeypatch.setattr(role_service, "RETRY_MS", 10.0)


def unlinked(node: Node) -> list[int]:
    return [one["node"] for one in node.backend.status()["unlinked"]]


def remove_third(nodes: Nodes) -> None:
    """Remove node 3 from the files that are written from now on."""
    nodes.addresses = {n: one for n, one in nodes.addresses.items() if n != 3}


def told(node: Node) -> str:
    status = node.backend.status()
    return str([status["reason"], *status["problems"]])


def named(node: Node) -> set[int]:
    """Return the nodes that clients, and `hastore status`, learn from this one."""
    return set(node.backend.master_map().nodes)


def test_a_removed_node_is_forgotten_once_the_list_in_force_is_without_it(
    tmp_path: pathlib.Path,
) -> None:
    nodes = Nodes(tmp_path, 3, 1)
    try:
        one, two = nodes.start(1, Role.SYNC_MASTER), nodes.start(2, Role.SLAVE)
        wait_for(lambda: linked(two) and writable(one))
        wait_for(lambda: unlinked(one) == [3])
        remove_third(nodes)
        order(nodes, 1, Role.SYNC_MASTER)
        order(nodes, 2, Role.SLAVE)
        wait_for(lambda: not nodes.changed and len(one.roles.latest_config.nodes) == 2)
        before = one.state.last_epoch
        wait_for(lambda: unlinked(one) == [3])
        assert named(one) == named(two) == {1, 2, 3}, "the list in force has it"
        command(one)
        wait_for(lambda: writable(one) and one.state.last_epoch > before)
        wait_for(lambda: not unlinked(one) and named(one) == {1, 2})
        wait_for(lambda: named(two) == {1, 2})
        assert [number for number, _ in one.member.peers] == [2], "no promotion waits for it"
    finally:
        nodes.stop()


def test_a_node_that_was_never_in_force_is_forgotten_with_its_line(tmp_path: pathlib.Path) -> None:
    nodes = Nodes(tmp_path, 3, 1)
    address = nodes.addresses[3]
    remove_third(nodes)
    try:
        one, two = nodes.start(1, Role.SYNC_MASTER), nodes.start(2, Role.SLAVE)
        wait_for(lambda: linked(two) and writable(one))
        nodes.addresses = {**nodes.addresses, 3: address}
        order(nodes, 1, Role.SYNC_MASTER)
        wait_for(lambda: unlinked(one) == [3])
        command(one)  # it waits for node 3
        wait_for(lambda: one.roles.new_epoch_problem)
        remove_third(nodes)
        before = one.state.last_epoch
        order(nodes, 1, Role.SYNC_MASTER)
        wait_for(lambda: not unlinked(one) and named(one) == {1, 2})
        wait_for(lambda: one.state.last_epoch > before and writable(one))
    finally:
        nodes.stop()


def test_a_node_of_a_promise_stays_until_another_list_is_in_force(tmp_path: pathlib.Path) -> None:
    """The candidate may have begun its epoch with that list, and confirmed puts with that node."""
    nodes = Nodes(tmp_path, 3, 1)
    address = nodes.addresses[3]
    remove_third(nodes)
    try:
        one = nodes.start(1, Role.SYNC_MASTER)
        two = nodes.start(2, Role.SLAVE)
        wait_for(lambda: linked(two) and writable(one))
        member = two.member
        member.learn_nodes({**nodes.addresses, 3: address})
        member.state.promise(member.state.data.promised_epoch, 1, (1, 2, 3))
        member.learn_nodes(nodes.addresses)
        member.forget_removed()
        assert 3 in member.nodes
        command(one)
        wait_for(lambda: member.nodes == (1, 2))
    finally:
        nodes.stop()


def test_a_removed_node_that_still_runs_is_told_to_stop(tmp_path: pathlib.Path) -> None:
    nodes = Nodes(tmp_path, 3, 1)
    try:
        one, two, three = (
            nodes.start(n, Role.SYNC_MASTER if n == 1 else Role.SLAVE) for n in (1, 2, 3)
        )
        wait_for(lambda: linked(two) and linked(three) and writable(one))
        remove_third(nodes)
        order(nodes, 1, Role.SYNC_MASTER)
        order(nodes, 2, Role.SLAVE)
        command(one)
        wait_for(lambda: named(one) == {1, 2})
        # It is refused; or it was quick, and has the epoch's list without itself.
        wait_for(lambda: "stop it" in told(three))
        if "left the group: the list" not in told(three):
            assert "node 3 is not in this node's list" in told(three)
            three.state.take_entries([one.state.history[-1]])
        assert "stop it for good" in told(three)
        assert three.backend.status()["config_pending"] == []
    finally:
        nodes.stop()
