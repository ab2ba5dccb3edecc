"""Requests of `hastore dledger` with `--remote`: find the leader, have it write the request.

Whatever is interrupted or lost on the way, the command may be given again: what is as wanted, or
under way, is not asked for a second time. The request names the term and the members that were
seen, so that of two administrators one is refused.
"""

import secrets
from typing import NamedTuple

from hastore.cli.common import print_note
from hastore.cli.own_node import as_node, node_name, refuse_hanging
from hastore.cli.remote_nodes import (
    CHANGE_S,
    Missed,
    Status,
    ask_statuses,
    learners_of,
    listed_whys,
    members_of,
    numbers_in,
    order,
)
from hastore.config.file import config_error, load_names
from hastore.config.model import Config, Mode
from hastore.errors import HastoreError, UsageError
from hastore.protocol import api


class Made(NamedTuple):
    """A request that the leader has taken; without an id there was nothing to ask for."""

    config: Config  # of the leader, as far as it is needed to ask it
    status: Status  # of the leader, before
    request_id: str | None


def ask_leader(path: str, command: str, node: int, by: int | None) -> Made:
    """Have the leader of the group of the file at `path` write a request.

    Raises ConfigError if the file is not of this mode, UsageError if there is no such node, and
    HastoreError if no leader is found, or it does not take the request.
    """
    config = load_names(path)
    if config.mode is not Mode.DLEDGER:
        problem = "is classic, where the operator names the master"
        raise config_error(path, "mode", problem, "use `hastore promote -c FILE`")
    leader, status = _leader(config)
    own = as_node(config, leader)
    if node not in config.nodes and node not in members_of(status):
        raise UsageError(
            f"node {node} is neither under `nodes` in {path} nor a member; nothing was changed: "
            "correct the number, or add the node first (`hastore node add`)"
        )
    already = _already(status, command, node, by)
    if already is not None:
        print_note(f"nothing to do: {already}")
        return Made(own, status, None)
    refuse_hanging(own, status)
    request_id = secrets.token_hex(8)
    change = api.MembersChange(
        request_id, command, node, int(status["term"]), sorted(numbers_in(status["members"])), by
    )
    made = order(own, leader, change, None, CHANGE_S)
    if not isinstance(made, Missed):
        return Made(own, status, request_id)
    text = f"{node_name(own)}, the leader: {made.reason}"
    if made.perhaps_done:
        text += (
            "; whether it has got the request is not known: `hastore status` shows leader and "
            "members, and the command may be given again"
        )
    raise HastoreError(text)


def _leader(config: Config) -> tuple[int, Status]:
    """Return the node that says itself that it leads, in the newest term, with its status."""
    statuses, silent = ask_statuses(config)
    leading = [
        number
        for number, one in statuses.items()
        if one.get("leader") == number and isinstance(one.get("term"), int)
        and numbers_in(one.get("members"))
    ]  # fmt: skip
    if leading:
        leader = max(leading, key=lambda number: int(statuses[number]["term"]))
        return leader, statuses[leader]
    known = {one.get("leader") for one in statuses.values()} - {None}
    named = f", though node {', '.join(map(str, known))} is said to" if known else ""
    whys = "" if not silent else f" ({listed_whys(silent)})"
    raise HastoreError(
        f"no node that answers leads{named}{whys}; nothing was changed: an election needs a "
        "majority, see `hastore status`"
    )


def _already(status: Status, command: str, node: int, by: int | None) -> str | None:
    """Return what is as wanted already, or under way; None if the request is needed."""
    members = numbers_in(status["members"])
    learners = learners_of(status)
    leaving = numbers_in(status.get("leaving"))
    if command == "transfer":
        return f"node {node} leads already" if status["leader"] == node else None
    if command == "add":
        if node in members:
            return f"node {node} is a member already"
        return f"node {node} is a learner already" if node in learners else None
    if command == "remove":
        return None if node in members or node in learners else f"node {node} is no member"
    if by in members and node not in members:
        return f"node {by} is a member already, and node {node} none any more"
    under_way = by in learners and node in leaving
    return f"node {by} is replacing node {node} already" if under_way else None
