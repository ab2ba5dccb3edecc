"""The cuts of a node's log that nobody has dismissed, as the node or its store says."""

from __future__ import annotations

from typing import Any

import msgspec

from hastore.cli.own_node import ask_node, refuse_other_file
from hastore.config.model import Config, StoreKind
from hastore.errors import UNREADABLE, StoreError
from hastore.fs.filesystem import REAL
from hastore.store.cuts import CutList, cuts_path

Found = list[dict[str, Any]]


def find_cuts(config: Config, path: str, command: str) -> tuple[Found, bool]:
    """Return the cuts of the file's node, and whether it runs.

    Raises UsageError if the node runs with another file, StoreError if the list cannot be read.
    """
    status = ask_node(config)
    refuse_other_file(command, path, config, status)
    if status is not None:
        return list(status.get("cuts") or []), True
    if config.store.kind is StoreKind.MEMORY:
        return [], False
    file = cuts_path(config.store.root)
    try:
        found = msgspec.json.decode(REAL.read_bytes(file), type=CutList)
    except FileNotFoundError:
        return [], False
    except (OSError, *UNREADABLE) as failure:
        raise StoreError(
            f"{file} cannot be read: {failure}; read it as the node's user, or, if it is damaged, "
            "restart the node, which puts it aside"
        ) from failure
    folder = f"{config.store.root}/rescued"
    return [
        {**msgspec.structs.asdict(one), "folder": f"{folder}/{one.folder}" if one.folder else None}
        for one in found.cuts
        if one.made
    ], False
