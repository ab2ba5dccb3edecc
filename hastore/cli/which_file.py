"""Compare the file that a command was given with the file that the running node follows."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from hastore.config.model import Config
from hastore.errors import UsageError


def file_mismatch(path: str, config: Config, status: Mapping[str, Any]) -> str | None:
    """Return how the running node differs from the file at `path`; None if it follows that file.

    If the path that the node names does not exist on this machine, the files are taken to be the
    same, because a node in a container has other paths.
    """
    known = status.get("config")
    runs = f"is node {status['node']} of {status.get('cluster')}/{status.get('group')}"
    own = f"node {config.node} of {config.cluster}/{config.group}"
    address = config.nodes[config.node].api
    if runs != f"is {own}":
        told = f" and runs with {known}" if known else ""
        return f"{address} {runs}{told}; {path} is the file of {own}"
    if not known or not os.path.exists(known) or os.path.samefile(known, path):
        return None
    return f"{own} ({address}) runs with {known}, not with {os.path.abspath(path)}"


def check_file(command: str, path: str, config: Config, status: Mapping[str, Any] | None) -> None:
    """Raise UsageError, with both paths, when the running node does not follow the file."""
    problem = None if status is None else file_mismatch(path, config, status)
    if status is None or problem is None:
        return
    same_node = status["node"] == config.node and status.get("group") == config.group
    remedy = f"run `hastore {command} -c {status['config']}`" if same_node else "check -c FILE"
    raise UsageError(f"{problem}; nothing was changed: {remedy}")


def pending_texts(path: str | None, status: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each changed key not yet in force, with the event that applies it."""
    for change in status.get("config_pending") or []:
        until = "the next start"
        if change["counts_from"] == "promotion":
            until = f"the next promotion, `hastore promote -c {path or 'FILE'}`"
        now, later = (_as_text(change[name]) for name in ("in_force", "in_file"))
        yield f"{change['key']}: {later} in its file, {now} in force until {until}"


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
