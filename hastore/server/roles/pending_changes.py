"""Changes in a node's configuration file that are not in force yet. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hastore.config.model import Config
from hastore.ha.rules.epochs import CLASSIC_EPOCH, History

PROMOTION = "promotion"
RESTART = "restart"
_FOLLOWED = ("role", "acks", "nodes")  # `role` is in force at once; the others are compared apart
_AS_IN_THE_FILE = {"store.retention.": "retention.", "max_size_bytes": "max_size"}


def pending_changes(started: Config, latest: Config, history: History) -> list[dict[str, Any]]:
    """Return the keys whose value in the file is not in force, each with `key`, `in_force`,
    `in_file` and `counts_from` ("promotion" or "restart").

    `started` is the configuration that the node started with; `latest` is the latest valid file.
    The `acks` and nodes in force are those of the last entry of the epoch `history`, also after a
    restart.
    """
    found = []
    if history and history[-1].epoch != CLASSIC_EPOCH:
        entry, nodes = history[-1], sorted(latest.nodes)
        if latest.effective_acks != entry.acks:
            found.append(_change("acks", entry.acks, latest.effective_acks, PROMOTION))
        if nodes != sorted(entry.nodes):
            found.append(_change("nodes", sorted(entry.nodes), nodes, PROMOTION))
    before, after = _keys(started), _keys(latest)
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            found.append(_change(key, before.get(key), after.get(key), RESTART))
    for number in started.nodes.keys() & latest.nodes.keys():
        old, new = _keys(started.nodes[number]), _keys(latest.nodes[number])
        for name, value in old.items():
            if value != new[name]:
                found.append(_change(f"nodes.{number}.{name}", value, new[name], RESTART))
    return sorted(found, key=lambda change: (change["counts_from"], change["key"]))


def _change(key: str, in_force: object, in_file: object, counts_from: str) -> dict[str, Any]:
    return {"key": key, "in_force": in_force, "in_file": in_file, "counts_from": counts_from}


def _keys(section: msgspec.Struct) -> dict[str, object]:
    """Return a section's dotted keys, with their values as the file writes them."""
    flat: dict[str, object] = {}
    _flatten("", msgspec.to_builtins(section), flat)
    return flat


def _flatten(prefix: str, values: Mapping[str, Any] | Sequence[Any], flat: dict[str, Any]) -> None:
    assert isinstance(values, Mapping)
    for name, value in values.items():
        if not prefix and name in _FOLLOWED:
            continue
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            _flatten(f"{key}.", value, flat)
            continue
        for old, new in _AS_IN_THE_FILE.items():
            key = key.replace(old, new)
        if key.endswith("_ms"):
            key, value = key.removesuffix("_ms"), None if value is None else f"{value}ms"
        flat[key] = value
