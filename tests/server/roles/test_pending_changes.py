"""Changes of the configuration file that are not in force yet, and what makes them count."""

from __future__ import annotations

import msgspec

from hastore.config.model import Config, NodeAddress, Role, StoreConfig
from hastore.ha.rules.epochs import CLASSIC_EPOCH, EpochEntry
from hastore.server.role_source import has_left, pending_changes


def address(number: int) -> NodeAddress:
    base = 20_000 + 10 * number
    return NodeAddress(
        api=f"tcp://127.0.0.1:{base}", ha=f"127.0.0.1:{base + 1}", http=f"127.0.0.1:{base + 2}"
    )


def config_of(*numbers: int, acks: int = 1, role: Role = Role.SYNC_MASTER) -> Config:
    return Config(
        cluster="test", group="g0", node=1, role=role, acks=acks,
        nodes={number: address(number) for number in numbers},
        store=StoreConfig(root="/store"),
    )  # fmt: skip


PAIR = (EpochEntry(65537, 0, 1, (1, 2)),)


def keys(start: Config, latest: Config, history: tuple[EpochEntry, ...] = PAIR) -> list[str]:
    return [one["key"] for one in pending_changes(start, latest, history)]


def test_nothing_is_pending_where_nothing_differs() -> None:
    assert keys(config_of(1, 2), config_of(1, 2)) == []
    flipped = config_of(1, 2, role=Role.SLAVE)
    assert keys(config_of(1, 2), flipped) == [], "a role is followed live"
    assert keys(config_of(1, 2), config_of(1, 2), history=()) == []
    classic = (EpochEntry(CLASSIC_EPOCH, 0, 0, (1,)),)
    assert keys(config_of(1, 2), config_of(1, 2), classic) == []


def test_acks_and_nodes_count_from_a_promotion() -> None:
    pair, three = config_of(1, 2), config_of(1, 2, 3, acks=2)
    assert pending_changes(pair, three, PAIR) == [
        {"key": "acks", "in_force": 1, "in_file": 2, "counts_from": "promotion"},
        {"key": "nodes", "in_force": [1, 2], "in_file": [1, 2, 3], "counts_from": "promotion"},
    ]
    promoted = (*PAIR, EpochEntry(131073, 900, 2, (1, 2, 3)))
    assert keys(pair, three, promoted) == []


def test_nothing_is_pending_for_a_node_that_has_left() -> None:
    """A promotion by its file would bring the old list back."""
    three = config_of(1, 2, 3, acks=2)
    was, without = EpochEntry(65537, 0, 2, (1, 2, 3)), EpochEntry(131074, 9, 1, (2, 3))
    assert has_left(1, (was, without)) and keys(three, three, (was, without)) == []
    assert not has_left(2, (was, without)) and not has_left(1, (was,)) and not has_left(1, ())
    assert not has_left(4, (was,)), "a new node, before the list with it is in force"
    assert not has_left(1, (EpochEntry(CLASSIC_EPOCH, 0, 0, (2,)),))


def test_acks_stay_pending_over_a_restart_that_resumes_the_epoch() -> None:
    three = config_of(1, 2, 3, acks=2)
    assert keys(three, three) == ["acks", "nodes"]


def test_all_else_counts_from_a_restart() -> None:
    start = config_of(1, 2)
    store = msgspec.structs.replace(start.store, flush_interval_ms=100)
    latest = msgspec.structs.replace(start, store=store)
    assert pending_changes(start, latest, PAIR) == [
        {
            "key": "store.flush_interval",
            "in_force": "500ms",
            "in_file": "100ms",
            "counts_from": "restart",
        }
    ]
    moved = msgspec.structs.replace(start, nodes={1: address(7), 2: address(2)})
    assert keys(start, moved) == ["nodes.1.api", "nodes.1.ha", "nodes.1.http"]
    assert {one["counts_from"] for one in pending_changes(start, moved, PAIR)} == {"restart"}


def test_addresses_of_other_nodes_count_at_once() -> None:
    start = config_of(1, 2)
    moved = msgspec.structs.replace(start, nodes={1: address(1), 2: address(7)})
    assert keys(start, moved) == []
