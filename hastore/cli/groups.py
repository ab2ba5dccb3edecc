"""`hastore groups`: where consumer groups are, how far behind they are, and how to move them.

What a group has given up is in dead_letters.py.
`hastore groups delete` does what `mqadmin deleteSubGroup` does (code 207), with a look at the
members before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import click

from hastore.cli.common import (
    DIFFER,
    DONE,
    Seconds,
    bootstrap_addresses,
    counted,
    fitting_table,
    print_json,
    print_note,
    print_text,
    terminal_columns,
    with_bootstrap,
    with_json,
)
from hastore.cli.completion import complete_groups, complete_topics
from hastore.cli.dead_letters import dead_letters_command, resend_command
from hastore.cli.own_node import need_replayed, wait_replayed, warn_unreplayed
from hastore.cli.read import parse_moment
from hastore.cli.remoting_link import RemotingLink
from hastore.cli.status import no_master_text
from hastore.client.consumer.admin import Admin, QueueRanges
from hastore.client.consumer.consumer import Consumer
from hastore.client.consumer.positions_client import Offsets, Positions
from hastore.client.messages import GroupMembers, NodeInfo
from hastore.client.security import as_security
from hastore.errors import ClientError, HastoreError, UnreachableError, UsageError
from hastore.protocol.remoting import Code
from hastore.record.delays import RETRY_PREFIX

EARLIEST, LATEST = "earliest", "latest"
MEMBERS_S = 5.0  # for each node's answer who is online
_SHOWN = 5  # members that an error names


@dataclass(frozen=True, slots=True)
class Place:
    """A group's position in a queue, and the first and the next offset of the queue."""

    topic: str
    queue: int
    position: int
    first: int
    end: int

    @property
    def lag(self) -> int:
        """How many messages of the queue the group has still to read.

        What retention has removed does not count: nobody can read it any more.
        """
        return max(0, self.end - max(self.first, self.position))


Ranges = Mapping[str, QueueRanges]  # by topic


def read_places(addresses: list[str]) -> tuple[dict[str, list[Place]], Ranges, int]:
    """Return all groups with their positions, in the order of topics and queues, and all queues.

    Positions in queues that the log does not have any more are left out. The last is the exit code:
    not DONE, after a warning, if messages or commits are missing.
    """
    code = warn_unreplayed(wait_replayed(addresses))
    with Positions(addresses) as positions:
        committed = positions.all()
    with Admin(addresses) as admin:  # after the positions: no position is beyond its queue's end
        ranges = admin.topics()
    found: dict[str, list[Place]] = {}
    for (group, topic), offsets in sorted(committed.items()):
        places = found.setdefault(group, [])
        places += [
            Place(topic, queue, offset, *ranges[topic][queue])
            for queue, offset in offsets.items()
            if queue in ranges.get(topic, {})
        ]
    return found, ranges, code


def _tell_unread(group: str, places: list[Place], ranges: Ranges) -> None:
    """Say which queues with messages count as no lag, since the group has no position there.

    The group's retries are among them, though it may have no position in that topic at all: its
    members have ended before the first of them came.
    """
    retries = {RETRY_PREFIX + group}.intersection(ranges)
    for topic in sorted({one.topic for one in places} | retries):
        known = {one.queue for one in places if one.topic == topic}
        left = {
            queue: end - first
            for queue, (first, end) in ranges[topic].items()
            if queue not in known and end > first
        }
        if left:
            print_note(
                f"not counted as lag: {counted(sum(left.values()), 'message')} in queue"
                f" {_runs_text(sorted(left))} of topic {topic}, where group {group} has no position"
            )


def _only_retries(found: Mapping[str, list[Place]], ranges: Ranges) -> list[str]:
    """Return the groups that have a topic of retries, and no position."""
    names = sorted(topic for topic in ranges if topic.startswith(RETRY_PREFIX))
    groups = [name.removeprefix(RETRY_PREFIX) for name in names]
    return [group for group in groups if group not in found]


@click.group("groups", short_help="Show and move consumer groups, send their dead letters again.")
def groups_group() -> None:
    """Show consumer groups and how far behind they are, and move their positions.

    A group is known by its committed positions, whoever committed them: hastore's consumers,
    RocketMQ's, or `hastore positions import`. The lag is counted in messages up to the readable end
    of each queue; messages that a consumer has fetched but not committed count, those that
    retention has removed do not. Queues in which the group has no position do not count either; a
    note names those that have messages.
    """


@groups_group.command("list", short_help="Show all groups and their lag.")
@with_bootstrap
@with_json
def list_command(bootstrap: str | None, as_json: bool) -> int:
    """Show all groups: how many topics and queues they read, and how many messages they lag."""
    found, ranges, code = read_places(bootstrap_addresses(bootstrap))
    rows = []
    for group, places in found.items():
        topics, lag = {one.topic for one in places}, sum(one.lag for one in places)
        if as_json:
            print_json(
                {"group": group, "topics": sorted(topics), "queues": len(places), "lag": lag}
            )
        rows.append([group, str(len(topics)), str(len(places)), f"{lag:,}"])
    if not as_json and rows:
        numbers = ("topics", "queues", "lag")
        _print_table(["group", *numbers], rows, numbers)
    for group in [*found, *_only_retries(found, ranges)]:
        _tell_unread(group, found.get(group, []), ranges)
    if not found and code == DONE:
        print_note("no group has committed a position")
    return code


@groups_group.command("describe", short_help="Show a group's position in each queue.")
@click.argument("group", shell_complete=complete_groups)
@click.option("--topic", metavar="T", shell_complete=complete_topics, help="Only this topic.")
@with_bootstrap
@with_json
def describe_command(group: str, topic: str | None, bootstrap: str | None, as_json: bool) -> int:
    """Show GROUP's position in each queue, the queue's end, and how many messages lie between.

    The member is who has the queue's lock: a consumer of hastore's that shares the group's queues,
    or one of RocketMQ's that reads in order. See `hastore groups members` for all members.
    """
    addresses = bootstrap_addresses(bootstrap)
    found, ranges, code = read_places(addresses)
    if group in _only_retries(found, ranges):
        found = {**found, group: []}
    places = [one for one in _places_of(found, group) if topic in (None, one.topic)]
    owners = _owners(addresses, group) if places else {}
    rows = []
    for one in places:
        owner = owners.get(one.topic, {}).get(one.queue)
        if as_json:
            print_json(
                {
                    "group": group,
                    "topic": one.topic,
                    "queue": one.queue,
                    "position": one.position,
                    "end": one.end,
                    "lag": one.lag,
                    "member": owner,
                }
            )
        numbers = f"{one.position:,}", f"{one.end:,}", f"{one.lag:,}"
        rows.append([one.topic, str(one.queue), *numbers, owner or "-"])
    if not as_json and rows:
        right = ("queue", "position", "end", "lag")
        _print_table(["topic", *right, "member"], rows, right)
    _tell_unread(group, places, ranges if topic is None else {topic: ranges.get(topic, {})})
    if not rows:
        print_note(f"group {group} has no position" + (f" in topic {topic}" if topic else ""))
    return code


def _ask_members(addresses: list[str], group: str) -> GroupMembers:
    with Admin(addresses, timeout_s=MEMBERS_S) as admin:
        return admin.group_members(group)


def _owners(addresses: list[str], group: str) -> dict[str, dict[int, str]]:
    """Return who has the locks of a group's queues; none if nobody says it."""
    try:
        return _ask_members(addresses, group).owners or {}
    except UnreachableError as failure:
        print_note(f"who reads which queue is not known: {failure}")
        return {}


@groups_group.command("members", short_help="Show who is online in a group.")
@click.argument("group", shell_complete=complete_groups)
@with_bootstrap
@with_json
def members_command(group: str, bootstrap: str | None, as_json: bool) -> int:
    """Show the members of GROUP that are online, and the queues that each of them reads.

    Members are hastore's consumers that share the group's queues (`share=True`), and RocketMQ's. Of
    RocketMQ's members only those that read in order lock their queues; of the others no node knows
    who reads which. A consumer that reads all queues by itself is no member.
    """
    found = _ask_members(bootstrap_addresses(bootstrap), group)
    rows = []
    for one in found.members:
        queues = _queues_of(found, one.member)
        if as_json:
            print_json(
                {
                    "group": group,
                    "member": one.member,
                    "address": one.address,
                    "client": one.client,
                    "queues": queues,
                }
            )
        rows.append([one.member, one.address, one.client, _ranges_text(queues)])
    if not as_json and rows:
        _print_table(["member", "address", "client", "queues"], rows, ())
    gone = _holders(found) - {one.member for one in found.members}
    if gone:
        print_note(
            f"not online, but its locks hold queues for up to a minute: {', '.join(sorted(gone))}"
        )
    if found.cut:
        print_note("there are too many members or queues: only a part is shown")
    if not rows:
        print_note(f"no member of group {group} is online")
    return DONE


def _queues_of(found: GroupMembers, member: str) -> dict[str, list[int]] | None:
    """Return a member's queues by topic; None if no node knows the owners of queues."""
    if found.owners is None:
        return None
    mine = {
        topic: sorted(queue for queue, owner in owners.items() if owner == member)
        for topic, owners in sorted(found.owners.items())
    }
    return {topic: queues for topic, queues in mine.items() if queues}


def _holders(found: GroupMembers) -> set[str]:
    return {owner for owners in (found.owners or {}).values() for owner in owners.values()}


def _ranges_text(queues: dict[str, list[int]] | None) -> str:
    """Return queues as a text, such as "orders 0-3, 7; refunds 0"."""
    parts = []
    for topic, ids in (queues or {}).items():
        parts.append(f"{topic} {_runs_text(ids)}")
    return "; ".join(parts) or "-"


def _runs_text(ids: list[int]) -> str:
    """Return sorted numbers as a text, such as "0-3, 7"."""
    runs: list[list[int]] = []
    for one in ids:
        if runs and runs[-1][1] == one - 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@groups_group.command("lag", short_help="Show how many messages groups lag, by topic.")
@click.option(
    "--group", "only", metavar="G", shell_complete=complete_groups, help="Only this group."
)
@click.option(
    "--max", "limit", type=click.IntRange(0), metavar="N",
    help="Exit code 4 if a group lags more than N messages in a topic.",
)  # fmt: skip
@with_bootstrap
@with_json
def lag_command(only: str | None, limit: int | None, bootstrap: str | None, as_json: bool) -> int:
    """Show how many messages each group lags in each topic."""
    found, ranges, code = read_places(bootstrap_addresses(bootstrap))
    lags: dict[tuple[str, str], int] = {}
    unplaced = _only_retries(found, ranges)
    for group in [*found, *unplaced] if only is None else [only]:
        places = found.get(group, []) if group in unplaced else _places_of(found, group)
        _tell_unread(group, places, ranges)
        for one in places:
            key = group, one.topic
            lags[key] = lags.get(key, 0) + one.lag
    for (group, topic), lag in lags.items() if as_json else ():
        print_json({"group": group, "topic": topic, "lag": lag})
    if not as_json and lags:
        rows = [[group, topic, f"{lag:,}"] for (group, topic), lag in lags.items()]
        _print_table(["group", "topic", "lag"], rows, ("lag",))
    if not lags and code == DONE:
        print_note("no group has committed a position")
    return DIFFER if limit is not None and any(lag > limit for lag in lags.values()) else code


@groups_group.command("reset", short_help="Move a group's positions in a topic.")
@click.argument("group", shell_complete=complete_groups)
@click.option(
    "--topic", required=True, metavar="T", shell_complete=complete_topics, help="The topic."
)
@click.option(
    "--to", "to", required=True, metavar="PLACE",
    help="earliest, latest, a time (ISO 8601, UTC without a zone: the first message stored then or "
    "later), or the offset in one queue, with --queue.",
)  # fmt: skip
@click.option("--queue", type=click.IntRange(0), metavar="N", help="Only this queue.")
@click.option("--dry-run", is_flag=True, help="Only show what would be moved.")
@click.option("--force", is_flag=True, help="Also while members of the group are online.")
@with_bootstrap
@with_json
def reset_command(
    group: str,
    topic: str,
    to: str,
    queue: int | None,
    dry_run: bool,
    force: bool,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Move GROUP's positions in a topic; a group without positions there gets some.

    Stop the group's consumers first: one that runs goes on from its own place, and commits it. It
    is refused while nodes know of members that are online, unless --force is given; a consumer that
    does not share the group's queues is not known to them. RocketMQ's consumers that run are moved
    with `mqadmin resetOffsetByTime`.
    """
    addresses = bootstrap_addresses(bootstrap)
    need_replayed(addresses)
    with Admin(addresses) as admin:
        ranges = admin.topics().get(topic, {})
    if not ranges:
        raise UsageError(f"--topic {topic}: there is no such topic; see `hastore topics list`")
    if queue is not None and queue not in ranges:
        known = counted(len(ranges), "queue")
        raise UsageError(f"--queue {queue}: topic {topic} has {known}; give one from 0 on")
    target = _target(addresses, topic, to, queue, ranges)
    wanted = {one: target(one) for one in sorted(ranges) if queue in (None, one)}
    with Positions(addresses) as positions:
        before = {
            one: place.queue_offset for one, place in positions.committed(group, topic).items()
        }
        if not dry_run:
            if not force:
                refuse_online(group, _online(addresses, group))
            positions.commit(group, topic, wanted, allow_back=True)
    for one, offset in wanted.items():
        if as_json:
            print_json(
                {
                    "group": group,
                    "topic": topic,
                    "queue": one,
                    "from": before.get(one),
                    "to": offset,
                    "done": not dry_run,
                }
            )
        else:
            was = f"{before[one]:,}" if one in before else "none"
            click.echo(f"{'would move' if dry_run else 'moved'}  queue {one}  {was} -> {offset:,}")
    if not before:
        print_note(f"group {group} had no position in topic {topic} before; is its name right?")
    return DONE


def _online(addresses: list[str], group: str) -> list[str]:
    """Return who is in the group; raises HastoreError if the master does not say it.

    Asked in hastore's own protocol: nodes that do not serve RocketMQ's clients have members, too.
    Members are at the master; another node, cut off from it or from them, may know none.
    """
    try:
        found = _ask_members(addresses, group)
    except UnreachableError as failure:
        raise not_known(group, str(failure)) from failure
    if found.owners is None and not found.members:  # only a master names the owners of queues
        raise not_known(group, "no master has answered that knows its members")
    return [one.member for one in found.members]


def _places_of(found: Mapping[str, list[Place]], group: str) -> list[Place]:
    if group not in found:
        raise UsageError(
            f"group {group} has not committed a position here; see `hastore groups list`"
        )
    return found[group]


def _target(
    addresses: list[str], topic: str, to: str, queue: int | None, ranges: QueueRanges
) -> Callable[[int], int]:
    """Return what gives each queue the offset to which it is moved; raises UsageError."""
    if to in (EARLIEST, LATEST):
        end = to == LATEST
        return lambda one: ranges[one][end]
    if to.isdecimal():
        if queue is None:
            raise UsageError(f"--to {to}: an offset counts in one queue only; name it with --queue")
        first, end_offset = ranges[queue]
        if not first <= int(to) <= end_offset:
            raise UsageError(
                f"--to {to}: queue {queue} of topic {topic} goes from {first:,} to "
                f"{end_offset:,}; give an offset between them"
            )
        return lambda _one: int(to)
    moment = parse_moment("--to", to)
    found: Offsets = {}
    with Consumer(topic, addresses, read_from="master") as consumer:
        consumer.seek_to_time(moment)
        found = {one: place.queue_offset for one, place in consumer.positions().items()}
    return lambda one: min(max(found.get(one, 0), ranges[one][0]), ranges[one][1])


def _print_table(head: list[str], rows: list[list[str]], right: tuple[str, ...]) -> None:
    for line in fitting_table(head, rows, right=right, width=terminal_columns()):
        print_text(line)


@groups_group.command("delete", short_help="Delete a group's settings.")
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
    deleteSubGroup -b`: members that come back go on where the group was. Refused while members are
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


groups_group.add_command(dead_letters_command)
groups_group.add_command(resend_command)
