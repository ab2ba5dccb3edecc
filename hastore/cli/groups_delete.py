"""`hastore groups delete`: give a consumer group the default settings again.

It is what `mqadmin deleteSubGroup` does (code 207), with a look at the members before.
"""

from __future__ import annotations

import click

from hastore.cli.common import (
    DONE,
    Seconds,
    bootstrap_addresses,
    counted,
    print_json,
    print_note,
    with_bootstrap,
    with_json,
)
from hastore.cli.completing import complete_groups
from hastore.cli.own_node import need_replayed
from hastore.cli.remoting_link import RemotingLink
from hastore.cli.status import no_master_text
from hastore.client.consumer.admin import Admin
from hastore.client.consumer.positions_client import Positions
from hastore.client.messages import NodeInfo
from hastore.client.security import as_security
from hastore.errors import ClientError, HastoreError, UnreachableError, UsageError
from hastore.protocol.remoting import Code

_SHOWN = 5  # members that an error names


@click.command("delete", short_help="Delete a group's settings.")
@click.argument("group", shell_complete=complete_groups)
@click.option("--force", is_flag=True, help="Also while members of the group are online.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--timeout", "timeout_s", type=Seconds(), default=5.0, show_default=True, metavar="SECONDS",
    help="How long to wait for each answer.",
)  # fmt: skip
@with_bootstrap
@with_json
def delete_command(
    group: str, force: bool, yes: bool, timeout_s: float, bootstrap: str | None, as_json: bool
) -> int:
    """Delete the settings of GROUP: whether it may consume, how often a message is tried again.

    The group has the default settings then. Its positions and its retries stay, as with `mqadmin
    deleteSubGroup`: members that come back go on where the group was. Refused while members are
    online, unless --force is given.
    """
    addresses = bootstrap_addresses(bootstrap)
    need_replayed(addresses)
    with Admin(addresses, timeout_s=timeout_s) as admin:
        nodes = [one for one in admin.nodes() if isinstance(one, NodeInfo)]
    master = next((one for one in nodes if one.status["writable"]), None)
    if master is None:
        known = no_master_text([one.status for one in nodes])
        raise HastoreError(known or "no node is the master: see `hastore status`")
    with Positions(addresses, timeout_s=timeout_s) as positions:
        topics = sorted(topic for one, topic in positions.all() if one == group)
    online, silent = members_of(nodes, group, timeout_s)
    with RemotingLink(master.address, as_security(None), timeout_s) as link:
        if not topics and not online and not link.knows_group(group):
            raise UsageError(f"there is no group {group}; see `hastore groups list`")
    if not force:
        refuse_online(group, online)
    if silent and not force:
        raise not_known(group, silent)
    if not yes:
        _confirm(group, topics)
    with RemotingLink(master.address, as_security(None), timeout_s) as link:
        try:
            link.ask(Code.DELETE_SUBSCRIPTIONGROUP, {"groupName": group, "cleanOffset": "false"})
        except UnreachableError as failure:
            raise UnreachableError(
                f"{failure}; the settings may be deleted or not: run the command again"
            ) from failure
    if as_json:
        print_json({"group": group, "deleted": True, "online": online, "positions_in": topics})
    else:
        stay = f"; its positions in {', '.join(topics)} stay" if topics else ""
        print_note(f"the settings of group {group} are deleted{stay}")
    return DONE


def refuse_online(group: str, online: list[str]) -> None:
    """Raise HastoreError if members of a group are online."""
    if not online:
        return
    listed = ", ".join(online[:_SHOWN]) + (", ..." if len(online) > _SHOWN else "")
    verb = "is" if len(online) == 1 else "are"
    raise HastoreError(
        f"{counted(len(online), 'member')} of group {group} {verb} online ({listed}); nothing was "
        "changed: stop them first, or give --force"
    )


def not_known(group: str, why: str) -> HastoreError:
    """Return the error if no node says whether members of a group are online."""
    return HastoreError(
        f"nobody knows whether members of group {group} are online: {why}; nothing was changed: try"
        " again, or give --force"
    )


def members_of(
    nodes: list[NodeInfo], group: str, timeout_s: float
) -> tuple[list[str], str | None]:
    """Return who is in the group, as all nodes know it; and why one of them does not say it."""
    found: set[str] = set()
    problem: str | None = None
    for one in nodes:
        try:
            with RemotingLink(one.address, as_security(None), timeout_s) as link:
                found.update(link.members(group))
        except ClientError as failure:
            problem = str(failure)
    return sorted(found), problem


def _confirm(group: str, topics: list[str]) -> None:
    stay = f" Its positions in {', '.join(topics)} stay." if topics else ""
    try:
        sure = click.confirm(f"Delete the settings of group {group}?{stay}", err=True)
    except click.Abort as end:
        print_note("")  # the question's line ends
        raise UsageError("no answer; nothing was changed: give --yes") from end
    if not sure:
        raise HastoreError("nothing was changed")
