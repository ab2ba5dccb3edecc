"""Committed positions survive the removal of their records; whole nodes in this process."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hastore.client.consumer.positions_client import Positions
from hastore.config.model import Config, HAConfig, NodeAddress, RetentionConfig, Role, StoreConfig
from hastore.protocol.committed_positions import CommitBody
from hastore.record.codec import NO_HOST, build_record
from hastore.server.api.commit_records import commit_record
from hastore.server.node import Node
from tests.ha.nodes import free_port, wait_for

FILE_SIZE = 64 * 1024
FILES = 4  # left by retention


class Nodes:
    """A group of nodes that are started and stopped."""

    def __init__(self, root: pathlib.Path, count: int) -> None:
        self.root = root
        self.addresses = {
            n: NodeAddress(
                api=f"tcp://127.0.0.1:{free_port()}", ha=f"127.0.0.1:{free_port()}",
                http="127.0.0.1:0",
            )
            for n in range(1, count + 1)
        }  # fmt: skip
        self.running: dict[int, Node] = {}
        self.changed: dict[int, Config] = {}

    def config(
        self, number: int, role: Role, *, retention: bool = True, files: int = FILES
    ) -> Config:
        settings = RetentionConfig(
            max_size_bytes=files * FILE_SIZE if retention else None, check_interval_ms=10
        )
        return Config(
            cluster="test",
            group="g0",
            node=number,
            role=role,
            acks=len(self.addresses) - 1,
            nodes=self.addresses,
            ha=HAConfig(heartbeat_interval_ms=200, housekeeping_interval_ms=2000),
            store=StoreConfig(
                root=str(self.root / f"node{number}"), commitlog_file_size=FILE_SIZE,
                index_slots=100, index_entries=400, consume_queue_units=300,
                flush_interval_ms=20, retention=settings,
            ),
        )  # fmt: skip

    def start(self, number: int, role: Role, **more: Any) -> Node:
        node = Node(self.config(number, role, **more), lambda: self.changed.pop(number, None))
        node.start()
        self.running[number] = node
        assert node.roles.settled.wait(60)
        return node

    def stop(self, *numbers: int) -> None:
        for number in numbers or tuple(self.running):
            self.running.pop(number).stop()

    @contextlib.contextmanager
    def positions(self, number: int) -> Iterator[Positions]:
        client = Positions(self.addresses[number].api)
        try:
            yield client
        finally:
            client.close()


Make = Callable[[int], Nodes]


@pytest.fixture
def make_nodes(tmp_path: pathlib.Path) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def make(count: int) -> Nodes:
            nodes = Nodes(tmp_path, count)
            stack.callback(nodes.stop)
            return nodes

        yield make


def fill(node: Node, files: int) -> None:
    """Put until the log has grown by that many files."""
    end = node.store.max_offset + files * FILE_SIZE
    record = build_record(
        "t", b"x" * 900, queue_id=0, properties=(), born_timestamp_ms=1, born_host=NO_HOST
    )
    while node.store.max_offset < end:
        node.backend.put_encoded([record * 10])


def wait_gone(node: Node, offset: int) -> None:
    """Wait until retention has removed the byte at `offset`."""
    wait_for(lambda: node.store.min_offset > offset, "retention", 60.0)


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
