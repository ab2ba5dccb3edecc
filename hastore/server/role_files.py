"""What an operator's files ask of a running node: changes not yet in force, one-shot flags.

Changes in a node's configuration file that are not in force yet. Pure.

`<store>/hastore/once.json`: flags for one promotion or demotion, written by `hastore promote`
and `hastore demote`.

The file is valid for 60 s, and only in the epoch in which it was written. RoleService's thread
removes the file, durably, before it uses the flags. It also removes a file that is not valid.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hastore.clock import Clock
from hastore.config.model import Config
from hastore.fs.filesystem import FileSystem
from hastore.ha.promoter import Flags
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


log = logging.getLogger(__name__)

GOOD_FOR_MS = 60_000


class OneShotFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content."""

    command: str  # "promote" | "demote"
    epoch: int
    wall_ms: int
    no_catch_up: bool = False
    force_unclean: bool = False
    accept_loss: bool = False


class OneShotFlags:
    """The file `once.json` in one store."""

    def __init__(self, fs: FileSystem, root: str, clock: Clock) -> None:
        self._fs = fs
        self._path = f"{root}/hastore/once.json"
        self._clock = clock

    def take(self, command: str, epoch: int) -> Flags | None:
        """If the file is valid and for `command`, remove it and return its flags; else return None.

        A valid file is at most 60 s old and was written in `epoch`; an invalid one is removed too.
        Raises OSError if the file cannot be read or removed; its flags are then not used.
        """
        if not self._fs.exists(self._path):
            return None
        try:
            found = msgspec.json.decode(self._fs.read_bytes(self._path), type=OneShotFile)
        except msgspec.DecodeError as error:
            log.error("%s is removed: it is not a file of `hastore promote`: %s", self._path, error)
            self._remove()
            return None
        if found.epoch != epoch or abs(self._clock.wall_ms() - found.wall_ms) > GOOD_FOR_MS:
            log.error(
                "%s is removed: it was written under epoch %d (now %d), or more than 60 s ago; "
                "give the command again",
                self._path,
                found.epoch,
                epoch,
            )
            self._remove()
            return None
        if found.command != command:
            return None
        self._remove()
        return Flags(
            no_catch_up=found.no_catch_up,
            force_unclean=found.force_unclean,
            accept_loss=found.accept_loss,
        )

    def _remove(self) -> None:
        """Remove the file durably, so that it is not used a second time after a power loss."""
        self._fs.remove(self._path)
        self._fs.sync_dir(self._path.rpartition("/")[0])
