"""Committed positions survive the removal of their records; whole nodes in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hastore.config.model import Role
from hastore.protocol.committed_positions import CommitBody
from hastore.server.api.commit_records import commit_record
from tests.ha.nodes import wait_for
from tests.server.retention.kit import FILES, Make, Nodes, fill, wait_gone


def committed(nodes: Nodes, number: int, group: str = "g") -> dict[int, int]:
    with nodes.positions(number) as client:
        found = client.committed(group, "t")
    return {queue: place.queue_offset for queue, place in sorted(found.items())}


def test_positions_outlive_their_records_and_a_restart_of_the_master(make_nodes: Make) -> None:
    nodes = make_nodes(1)
    master = nodes.start(1, Role.ASYNC_MASTER)
    with nodes.positions(1) as client:
        client.commit("g", "t", {0: 5, 1: 7})
        client.commit("g", "t", {1: 6})  # moved back on purpose
        client.commit("other", "t", {0: 2})
        said = {("g", "t"): {0: 5, 1: 6}, ("other", "t"): {0: 2}}
        for round_ in range(3):
            end = master.store.max_offset
            fill(master, FILES + 2)
            wait_gone(master, end)
            assert committed(nodes, 1) == {0: 5, 1: 6}, round_
            wait_for(lambda: client.all() == said)
    nodes.stop()
    master = nodes.start(1, Role.ASYNC_MASTER)
    assert committed(nodes, 1) == {0: 5, 1: 6}
    assert committed(nodes, 1, "other") == {0: 2}


def test_positions_outlive_their_records_on_a_slave_that_is_promoted(make_nodes: Make) -> None:
    """Only the slave's retention removes files."""
    nodes = make_nodes(2)
    master = nodes.start(1, Role.ASYNC_MASTER, retention=False)
    slave = nodes.start(2, Role.SLAVE)
    wait_for(lambda: master.ha.slaves())
    with nodes.positions(1) as client:
        client.commit("g", "t", {0: 5, 1: 7})
        client.commit("g", "t", {1: 6})
    end = master.store.max_offset
    fill(master, FILES + 2)
    wait_gone(slave, end)
    assert master.store.min_offset == 0
    nodes.stop(2)
    slave = nodes.start(2, Role.SLAVE)
    wait_for(lambda: slave.store.confirmed_offset == master.store.max_offset)
    nodes.changed[1] = nodes.config(1, Role.SLAVE, retention=False)
    wait_for(lambda: master.roles.role == "SLAVE")
    nodes.changed[2] = nodes.config(2, Role.ASYNC_MASTER)
    wait_for(lambda: slave.backend.writable_reason() is None)
    assert committed(nodes, 2) == {0: 5, 1: 6}
    # The log has them again, for a slave that copies it from this node's first byte.
    with nodes.positions(2) as client:
        wait_for(lambda: client.all() == {("g", "t"): {0: 5, 1: 6}})
        client.commit("g", "t", {0: 8})
        wait_for(lambda: client.all() == {("g", "t"): {0: 8, 1: 6}})
    wait_for(lambda: master.store.max_offset == slave.store.max_offset)
    nodes.stop(2)
    nodes.start(2, Role.ASYNC_MASTER)
    wait_for(lambda: nodes.running[2].backend.writable_reason() is None)
    assert committed(nodes, 2) == {0: 8, 1: 6}


def test_the_log_has_the_positions_for_a_node_that_has_only_the_log(make_nodes: Make) -> None:
    """Such as a slave that was resynced."""
    nodes = make_nodes(1)
    master = nodes.start(1, Role.ASYNC_MASTER)
    with nodes.positions(1) as client:
        client.commit("g", "t", {0: 5})
    end = master.store.max_offset
    fill(master, FILES + 2)
    wait_gone(master, end)
    nodes.stop()
    kept = nodes.root / "node1" / "hastore" / "positions"
    kept.rename(nodes.root / "away")
    nodes.start(1, Role.ASYNC_MASTER)
    assert committed(nodes, 1) == {0: 5}


def test_a_commit_between_reading_and_rewriting_counts(make_nodes: Make) -> None:
    nodes = make_nodes(1)
    master = nodes.start(1, Role.ASYNC_MASTER)
    real = master.retention._put
    seen: list[int] = []

    with nodes.positions(1) as client:

        def put(payloads: Sequence[bytes]) -> Any:
            if not seen:
                client.commit("g", "t", {0: 9})
            seen.append(len(payloads))
            return real(payloads)

        client.commit("g", "t", {0: 5, 1: 7})
        end = master.store.max_offset
        master.retention._put = put
        fill(master, FILES + 2)
        wait_gone(master, end)
    assert seen
    assert committed(nodes, 1) == {0: 9, 1: 7}
    nodes.stop()
    nodes.start(1, Role.ASYNC_MASTER)
    assert committed(nodes, 1) == {0: 9, 1: 7}


def test_thousands_of_groups_are_rewritten_in_small_puts(make_nodes: Make) -> None:
    nodes = make_nodes(1)
    files = 60  # half of them must have room for all positions
    master = nodes.start(1, Role.ASYNC_MASTER, files=files)
    real = master.retention._put
    sizes: list[int] = []

    def put(payloads: Sequence[bytes]) -> Any:
        sizes.append(sum(len(payload) for payload in payloads))
        return real(payloads)

    master.retention._put = put
    count = 2000
    for number in range(count):
        body = CommitBody(f"group{number}", "t", {0: (number, None, None)})
        master.backend.put_encoded([commit_record(body, 1)])
    end = master.store.max_offset
    fill(master, files + 1)
    wait_for(lambda: master.store.min_offset > end, "retention", 60.0)
    assert sum(sizes) > count * 100
    assert max(sizes) < 2 * 64 * 1024
    assert not master.backend.problems()
    for number in (0, count // 2, count - 1):
        assert committed(nodes, 1, f"group{number}") == {0: number}


def test_positions_that_would_push_each_other_out_are_not_rewritten(make_nodes: Make) -> None:
    nodes = make_nodes(1)
    master = nodes.start(1, Role.ASYNC_MASTER)
    for number in range(300):
        body = CommitBody(f"group{number}", "t", {0: (number, None, None)})
        master.backend.put_encoded([commit_record(body, 1)])
    end = master.store.max_offset
    fill(master, FILES + 2)
    wait_gone(master, end)
    wait_for(lambda: master.backend.problems())
    assert "retention.max_size" in master.backend.problems()[0]
    filled = master.store.max_offset
    assert committed(nodes, 1, "group7") == {0: 7}
    assert master.store.max_offset == filled
