"""`hastore dledger`: hand the leadership over, or change the members of a group.

The node that leads takes the request from a file in its store (driver/requests.py), so these
commands run on the leader's machine, with the leader's configuration file.
"""

import time
from collections.abc import Callable
from typing import Any

import click

from hastore.cli.common import (
    print_json,
    print_text,
    with_config,
    with_json,
    with_patience,
    with_security,
)
from hastore.cli.own_node import ANSWER_S, ask_node, ask_own_status, check_file, node_name
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import config_error, load_config
from hastore.config.model import Config, Mode
from hastore.dledger.driver.requests import DONE, write_request
from hastore.errors import HastoreError
from hastore.fs.filesystem import REAL

PATIENCE_S = 10.0
_POLL_S = 0.05

Status = dict[str, Any]


@click.group("dledger", short_help="Hand the leadership over; add or remove a node.")
def dledger_group() -> None:
    """Hand the leadership over, or change the members, of a group that elects its leader.

    FILE is the configuration file of the node that leads; `hastore status` shows which it is.
    """


def request(path: str, command: str, node: int, patience_s: float) -> Status:
    """Ask the leader, whose file is at `path`, for `command` about `node`; return its status after.

    Raises ConfigError if the file is not of this mode, UsageError if the node runs with another
    file, and HastoreError if the node does not lead, refuses, or does not answer in time.
    """
    config = load_config(path)
    if config.mode is not Mode.DLEDGER:
        problem = "is classic, where the operator names the master"
        raise config_error(path, "mode", problem, "use `hastore promote -c FILE`")
    before = ask_node(config)
    check_file(f"dledger {command}", path, config, before)
    if before is None:
        name = node_name(config)
        raise HastoreError(f"{name} does not answer; only a running leader can do this")
    if before["leader"] != config.node:
        raise HastoreError(_not_leading(config, before))
    made = write_request(
        REAL,
        config.store.root,
        command,
        node,
        term=before["term"],
        members=tuple(before["members"]),
        wall_ms=SYSTEM_CLOCK.wall_ms(),
    )
    return _wait(config, made, patience_s)


def _not_leading(config: Config, status: Status) -> str:
    leader = status["leader"]
    if leader is None:
        return f"{node_name(config)} knows no leader; see `hastore status` and try again"
    known = None if leader not in config.nodes else ask_own_status(config, leader, ANSWER_S)
    file = known.get("config") if known is not None else None
    where = f" with -c {file}" if file else "'s file"
    return f"{node_name(config)} does not lead; run this on the machine of node {leader}{where}"


def _wait(config: Config, request_id: str, patience_s: float) -> Status:
    deadline = time.monotonic() + patience_s
    while True:
        status = ask_node(config)
        taken = (status or {}).get("request") or {}
        if status is not None and taken.get("id") == request_id and taken.get("outcome"):
            if taken["outcome"] != DONE:
                text = f"{taken['outcome']}: {taken['reason']}"
                raise HastoreError(f"{node_name(config)}: {text}")
            return status
        if time.monotonic() > deadline:
            raise HastoreError(
                f"{node_name(config)} has not done it within {patience_s:g} s; whether it will is "
                "not known: `hastore status` shows leader and members"
            )
        time.sleep(_POLL_S)


def _command(
    name: str, option: str, short_help: str, help_text: str, done: Callable[[Status, int], str]
) -> click.Command:
    @dledger_group.command(name, short_help=short_help, help=help_text)
    @with_config
    @with_security
    @click.option(
        option,
        "node",
        type=click.IntRange(1, 65_535),
        required=True,
        metavar="N",
        help="The node's number in `nodes`.",
    )
    @with_patience(PATIENCE_S, "How long to wait for the outcome.")
    @with_json
    def command(path: str, node: int, patience_s: float, as_json: bool) -> None:
        began = time.monotonic()
        status = request(path, name, node, patience_s)
        seconds = round(time.monotonic() - began, 3)
        if as_json:
            keys = ("node", "term", "leader", "members")
            print_json({key: status[key] for key in keys} | {"seconds": seconds})
        else:
            print_text(f"{done(status, node)} ({seconds:.1f} s)")

    assert isinstance(command, click.Command)
    return command


def _members(status: Status) -> str:
    return ", ".join(map(str, status["members"]))


transfer_command = _command(
    "transfer",
    "--to",
    "Let another node lead.",
    "Let another node lead. Clients follow it by themselves, and nothing is lost. A node that "
    "lacks more than dledger.transfer_gap entries is refused.",
    lambda status, node: f"node {node} takes over from node {status['node']}",
)
add_command = _command(
    "add",
    "--node",
    "Make a node a member.",
    "Make a node a member. It must be listed under `nodes` in the file of every node, and run.",
    lambda status, node: f"node {node} is a member; the members are {_members(status)}",
)
remove_command = _command(
    "remove",
    "--node",
    "Make a node no member any more.",
    "Make a node no member any more; then stop it.",
    lambda status, node: f"node {node} is no member; the members are {_members(status)}",
)
