"""What the tests of a whole node share."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from hastore.config.model import Config, Flush, Mode, NodeAddress, Role, StoreConfig
from hastore.server.base_node import BaseNode

AnyNode = TypeVar("AnyNode", bound=BaseNode)


def config_of(root: pathlib.Path) -> Config:
    """Return the configuration of a node alone, a master, with small files."""
    return Config(
        cluster="test",
        group="g0",
        node=1,
        role=Role.ASYNC_MASTER,
        acks=0,
        nodes={1: NodeAddress(api="tcp://127.0.0.1:0", ha="127.0.0.1:0", http="127.0.0.1:0")},
        store=StoreConfig(root=str(root), commitlog_file_size=65536, index_slots=100,
                          index_entries=400, consume_queue_units=300),
    )  # fmt: skip


@contextlib.contextmanager
def running(node: AnyNode) -> Iterator[AnyNode]:
    """Start a node and stop it at the end."""
    node.start()
    try:
        assert node.roles.settled.wait(60)
        yield node
    finally:
        node.stop()


def config_in_group(
    root: pathlib.Path, number: int, nodes: dict[int, NodeAddress], **changes: object
) -> Config:
    """Return the configuration of one node of a group of mode classic: node 1 is its master."""
    store = msgspec.structs.replace(config_of(root / f"node{number}").store)
    role = Role.SYNC_MASTER if number == 1 else Role.SLAVE
    fields: dict[str, object] = {"role": role, "acks": 1, "store": store, **changes}
    names = {"cluster": "test", "group": "g0"}
    return Config(node=number, nodes=nodes, **names, **fields)  # type: ignore[arg-type]


def group_of_one(root: pathlib.Path, **store: object) -> Config:
    """Return the configuration of a node alone, with small files."""
    settings: dict[str, object] = {
        "root": str(root), "commitlog_file_size": 65536, "index_slots": 100,
        "index_entries": 400, "consume_queue_units": 300, "flush": Flush.SYNC, **store,
    }  # fmt: skip
    return Config(
        cluster="test",
        group="g0",
        node=1,
        mode=Mode.DLEDGER,
        nodes={1: NodeAddress(api="tcp://127.0.0.1:0", ha="127.0.0.1:0", http="127.0.0.1:0")},
        store=StoreConfig(**settings),  # type: ignore[arg-type]
    )
