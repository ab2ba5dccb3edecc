"""`hastore flip`: move the master, or the leadership, to another node while the group works."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from hastore.cli.classic_flip import ClassicFlip
from hastore.cli.common import (
    Seconds,
    bootstrap_addresses,
    complete_files,
    print_json,
    print_note,
    print_text,
    with_bootstrap,
    with_json,
)
from hastore.cli.completion import complete_nodes
from hastore.cli.dledger import Ask, preferred_text, request
from hastore.cli.group_files import NOTHING, POLL_S, STATELESS, Flip, GroupFiles, Status, slave_of
from hastore.client.consumer.admin import Admin
from hastore.client.messages import NodeInfo
from hastore.config.model import Mode
from hastore.errors import HastoreError, UsageError

TIMEOUT_S = 60.0
_KEYS = ("role", "epoch", "max_offset", "writable")  # of the result, with --json


class LeaderFlip(Flip):
    """A planned change of the leader in mode dledger; `run` returns the new leader's status."""

    def run(self, *, only_check: bool) -> Status:
        """Hand the leadership over; raises HastoreError or UsageError, which say the state."""
        group, to = self._group, self._to
        seen = group.look()
        if to not in seen:
            raise HastoreError(f"{group.name(to)} does not answer; {NOTHING}: start it first")
        leader = self.master = _leader(seen)
        if leader is None:
            raise HastoreError(
                f"no node that answers leads; {NOTHING}: an election needs a majority, see "
                "`hastore status`"
            )
        members = seen[leader]["members"]
        if to not in members:
            listed = ", ".join(map(str, members))
            raise UsageError(f"--to {to}: it is no member; the members are {listed}")
        if leader == to:
            self._say("found", f"node {to} leads term {seen[to]['term']} already")
            return seen[to]
        self._say("found", f"node {leader} leads term {seen[leader]['term']}")
        path = group.path if group.remote else group.file_of(leader)
        if path is None:
            file = seen[leader].get("config") or "FILE"
            raise UsageError(
                f"node {leader} leads, and its file {file} is not on this machine; {NOTHING}: run "
                f"`hastore flip -c {file} --to {to}` there"
            )
        note = preferred_text(group.config, to)
        if note is not None:
            self._say("preferred", note)
        if only_check:
            self._say("would", f"would let node {to} take over from node {leader}")
            return seen[to]
        self._wait_close(leader)
        try:
            left_s = max(self._end - time.monotonic(), POLL_S)
            if group.remote:
                Ask(path, True, left_s).request("transfer", to)
            else:
                request(path, "transfer", to, left_s)
        except HastoreError as failure:
            raise HastoreError(f"{failure}; {self._state()}") from failure
        try:
            return self._wait_leads()
        except STATELESS as failure:
            raise HastoreError(f"{failure}; {self._state()}") from failure

    def _wait_close(self, leader: int) -> None:
        """Wait until the wanted node keeps up with the leader."""
        last: list[Any] = [None]

        def near() -> bool:
            status = self._group.ask(leader)
            last[0] = one = None if status is None else slave_of(status, self._to)
            return one is not None and one["in_sync"]

        is_near = self._wait_until(near)
        behind = None if last[0] is None else f"is {last[0]['lag_entries']:,} entries behind"
        if last[0] is not None and last[0].get("full"):
            behind = "has a full disk"
        if not is_near:
            raise HastoreError(
                f"node {self._to} {behind or 'has no link with it'} after {self._timeout_s:g} s; "
                f"{NOTHING}: node {leader} goes on as the leader"
            )
        self._say("in sync", f"node {self._to} {behind}")

    def _wait_leads(self) -> Status:
        last: list[Any] = [None]

        def leads() -> bool:
            last[0] = one = self._group.ask(self._to)
            return one is not None and one["leader"] == self._to and one["writable"]

        if not self._wait_until(leads):
            raise HastoreError(f"node {self._to} does not lead yet; {self._state()}")
        status: Status = last[0]
        self._say("done", f"node {self._to} leads term {status['term']}")
        return status

    def _state(self) -> str:
        """Say who leads now, and how to go on."""
        try:
            leader = _leader(self._group.look())
            now = "no leader is known" if leader is None else f"node {leader} leads now"
        except HastoreError as failure:
            now = f"who leads now is not known ({failure})"
        return f"{now}; nothing is lost: run {self._again} again, or leave it so"


def _leader(seen: dict[int, Status]) -> int | None:
    """Return the node that says itself that it leads, in the newest term."""
    leading = [number for number, one in seen.items() if one["leader"] == number]
    return max(leading, key=lambda number: int(seen[number]["term"]), default=None)


def find_file(bootstrap: str | None, to: int) -> str:
    """Return the file of node `to` if that is on this machine, else that of another node.

    The running nodes name their files. Raises UsageError if none is here, or for several groups;
    UnreachableError if no node answers.
    """
    with Admin(bootstrap_addresses(bootstrap)) as admin:
        statuses = [one.status for one in admin.nodes() if isinstance(one, NodeInfo)]
    if len({(one.get("cluster"), one.get("group")) for one in statuses}) > 1:
        raise UsageError("these are nodes of several groups: give -c FILE")
    here = {one["node"]: one["config"] for one in statuses if os.path.exists(one["config"] or "")}
    if not here:
        raise UsageError("no node's file is on this machine: run this there, or give -c FILE")
    return str(here.get(to) or here[min(here)])


@click.command("flip", short_help="Make another node the master, without a loss.")
@click.option(
    "-c", "--config", "path", metavar="FILE", shell_complete=complete_files,
    help="The file of any node of the group; without it the nodes of --bootstrap name theirs.",
)  # fmt: skip
@with_bootstrap
@click.option(
    "--to", "to", type=click.IntRange(1, 65_535), required=True, metavar="N",
    shell_complete=complete_nodes,
    help="The number in `nodes` of the node that becomes the master, or the leader.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=Seconds(), default=TIMEOUT_S, show_default=True,
    metavar="SECONDS",
    help="Give up after this time; to call the flip off may take 5 s more.",
)  # fmt: skip
@click.option(
    "--remote", is_flag=True,
    help="Let the nodes change their own files, asked over the network as an admin (--security).",
)  # fmt: skip
@click.option("--dry-run", "only_check", is_flag=True, help="Only say what would be done.")
@with_json
def flip_command(
    path: str | None,
    bootstrap: str | None,
    to: int,
    timeout_s: float,
    remote: bool,
    only_check: bool,
    as_json: bool,
) -> None:
    """Make another node the master while the present one runs; no acknowledged message is lost.

    FILE is the file of any node of the group on this machine; without it the running nodes name
    theirs. Mode classic: the file of node N must be here too, or the roles in a registry, or
    --remote given: then FILE may be a copy. The node becomes the master only with the answer of the
    present master, so it has all of that one's log; then the other nodes become slaves in their
    files. If the node cannot become the master while the old one still is, the flip is called off.
    Mode dledger: hands the leadership over; the leader's file must be here, or --remote given.

    Run the same command again to complete an interrupted flip, or with the old master's number to
    undo it. Exit code 1: the flip is not complete; the error says what the state is.
    """
    began = time.monotonic()
    if path is not None and bootstrap is not None:
        raise UsageError("give -c FILE or --bootstrap, not both")
    path = path or find_file(bootstrap, to)
    group = GroupFiles(path, wanted=to, remote=remote)
    if to not in group.config.nodes:
        known = ", ".join(map(str, group.config.nodes))
        raise UsageError(f"--to {to}: {path} has no such node; its nodes are {known}")

    def say(step: str, text: str) -> None:
        if as_json:
            print_json({"step": step, "text": text})
        else:
            print_text(text)

    kind: type[Flip] = LeaderFlip if group.config.mode is Mode.DLEDGER else ClassicFlip
    made = kind(group, to, timeout_s, say)
    try:
        status = made.run(only_check=only_check)
    except KeyboardInterrupt:
        print_note(_interrupted_text(group.given, to, made.master))
        raise
    if only_check:
        return
    seconds = time.monotonic() - began
    if as_json:
        result = {"step": "complete", "node": to, "from": made.master}
        print_json(result | {key: status[key] for key in _KEYS} | {"seconds": round(seconds, 3)})
    else:
        end = f"its log ends at {status['max_offset']:,}"
        print_text(f"node {to} takes puts, {end} ({seconds:.1f} s)")


def _interrupted_text(given: str, to: int, master: int | None) -> str:
    text = f"interrupted: run `hastore flip -c {given} --to {to}` again to complete the flip"
    if master in (None, to):
        return text
    return (
        f"{text}, or with --to {master} to undo it; `hastore status` shows the state. If node {to} "
        "was asked already, it becomes the master by itself once it can"
    )
