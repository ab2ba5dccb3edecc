"""Whether another node can take over from a master that is to be demoted."""

import time
from typing import Any

from hastore.cli.common import print_note
from hastore.cli.own_node import (
    as_node,
    ask_node,
    awaiting_promotion,
    node_name,
    of_each,
    pending_changes,
)
from hastore.config.model import Config
from hastore.errors import HastoreError, NotAuthenticatedError

SUCCESSOR_S = 3.0  # a slave that has just started is in sync within a moment
_POLL_S = 0.1

Status = dict[str, Any]


def require_successor(config: Config, status: Status) -> None:
    """Raise HastoreError if no other node can become master once this one is demoted."""
    end = time.monotonic() + SUCCESSOR_S
    problem = successor_problem(config, status)
    while problem is not None and time.monotonic() < end:
        time.sleep(_POLL_S)
        now = ask_node(config)
        if now is not None and not now["writable"]:
            return
        problem = problem if now is None else successor_problem(config, now)
    if problem is not None:
        raise HastoreError(
            f"{node_name(config)} is the master, and no other node can take over at once: "
            f"{problem}; nothing was changed. `hastore flip` moves the role once one can; with "
            "--leave-no-master no node takes puts after this command"
        )
    print_note(
        "no node takes puts until another one is promoted; `hastore flip` moves the role in one go"
    )


def tell_if_no_master(config: Config) -> None:
    """Say which node to promote if a promotion that was called off has left no master."""
    answers = of_each(config.nodes, lambda number: _ask(as_node(config, number)))
    said = [one for one in answers.values() if one is not None]
    if any(one["writable"] or one.get("role_state") in ("master", "promoting") for one in said):
        return
    if len(said) < len(answers):
        print_note("no node that answers takes puts now; `hastore status` says what to do")
        return
    able = [one for one in said if not one["unclean"] and not one.get("written_over")] or said
    best = max(able, key=lambda one: (one["epoch"], one["max_offset"]))
    if best.get("written_over"):
        print_note("no node takes puts now; `hastore status` says what to do")
        return
    file = best.get("config") or "FILE"
    print_note(
        f"no node takes puts now: run `hastore promote -c {file}` for node {best['node']}, which "
        "is the most up to date"
    )


def _ask(config: Config) -> Status | None:
    """Return a node's status: that one does not tell it is no failure of a command that is done."""
    try:
        return ask_node(config)
    except NotAuthenticatedError:
        return None


def successor_problem(config: Config, master: Status) -> str | None:
    """Return why no other node could be promoted now; None if one could.

    `master` is the status of the node that serves.
    """
    own = {one["node"]: one for one in master["slaves"] if not one["classic"]}
    if not any(one["in_sync"] for one in own.values()):
        return "no slave is in sync with it"
    awaiting = awaiting_promotion(master)
    members = set(config.nodes)
    if "nodes" in awaiting:
        members = set(pending_changes(master)["nodes"]["in_file"])
    answers = {one["node"] for one in master.get("unlinked") or [] if one["why"] is None}
    silent = sorted(members - {config.node} - own.keys() - answers)
    # A changed list, or `acks`, needs the answer of every node (docs/failover.md, "Promotion").
    if len(silent) <= (0 if awaiting else master["acks"]):
        return None
    verb = "does" if len(silent) == 1 else "do"
    return f"node {', '.join(map(str, silent))} {verb} not answer, and a promotion needs that"
