"""`hastore status`: what each node of a group says of itself."""

from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from hastore.cli.common import (
    DONE,
    bootstrap_addresses,
    put_json,
    say,
    stdout,
    with_bootstrap,
    with_json,
)
from hastore.client.admin import Admin

_OFFSETS = ("max_offset", "confirmed_offset", "readable_offset")


@click.command("status")
@click.option("--timeout", "timeout_s", default=3.0, show_default=True, metavar="SECONDS")
@with_bootstrap
@with_json
def status_command(timeout_s: float, bootstrap: str | None, as_json: bool) -> int:
    """Show roles, epochs, offsets and slaves; exit code 1 when no node answers."""
    with Admin(bootstrap_addresses(bootstrap), timeout_s=timeout_s) as admin:
        infos = admin.status()
        known = {address for one in admin.maps().values() for address in one.nodes.values()}
    for info in infos:
        if as_json:
            put_json(info.status)
    if not as_json:
        _show([info.status for info in infos])
    for address in sorted(known - {info.address for info in infos}):
        say(f"no answer from {address}")
    return DONE


def _show(statuses: list[dict[str, Any]]) -> None:
    table = Table("node", "role", "epoch", "writable", box=None, pad_edge=False)
    for name in _OFFSETS:
        table.add_column(name.removesuffix("_offset"), justify="right", no_wrap=True)
    for status in statuses:
        numbers = [f"{status[name]:,}" for name in _OFFSETS]
        writable = "[green]yes[/green]" if status["writable"] else "no"
        epoch = str(status["epoch"])
        table.add_row(str(status["node"]), status["role"], epoch, writable, *numbers)
    stdout.print(table)
    for status in statuses:
        for slave in status["slaves"]:
            _show_slave(status["node"], slave)
        if status["unclean"]:
            stdout.print(f"node {status['node']} is unclean: it may lack bytes it acknowledged")
        if status["reason"] and status["role"] != "SLAVE":
            stdout.print(f"node {status['node']}: {escape(status['reason'])}", highlight=False)


def _show_slave(node: int, slave: dict[str, Any]) -> None:
    who = "a RocketMQ slave" if slave["classic"] else f"slave {slave['node']}"
    sync = "[green]in sync[/green]" if slave["in_sync"] else "[yellow]not in sync[/yellow]"
    ack = "no report yet" if slave["ack_offset"] is None else f"at {slave['ack_offset']:,}"
    lag = "" if not slave["lag_bytes"] else f", {slave['lag_bytes']:,} bytes behind"
    text = f"node {node} <- {who} ({escape(str(slave['address']))}): {sync}, {ack}{lag}"
    stdout.print(text, highlight=False)
