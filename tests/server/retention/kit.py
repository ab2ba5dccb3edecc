"""Whole nodes in this process, whose retention removes files."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from hastore.client.consumer.positions_client import Positions
from hastore.config.model import Config, HAConfig, NodeAddress, RetentionConfig, Role, StoreConfig
from hastore.record.codec import NO_HOST, build_record
from hastore.server.node import Node
from tests.ha.nodes import wait_for
from tests.process.harness import Ports

FILE_SIZE = 64 * 1024
FILES = 4  # left by retention


class Nodes:
    """A group of nodes that are started and stopped."""

    def __init__(self, root: pathlib.Path, count: int, acks: int | None = None) -> None:
        self.root = root
        self.acks = count - 1 if acks is None else acks
        self._ports = ports = Ports()
        self.addresses = {
            n: NodeAddress(
                api=f"tcp://127.0.0.1:{ports.take()}", ha=f"127.0.0.1:{ports.take()}",
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
            acks=self.acks,
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


Make = Callable[..., Nodes]


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
