"""`hastore topics`: list, create, change and delete topics."""

from typing import Any

import click

from hastore.cli.common import (
    DONE,
    bootstrap_addresses,
    print_json,
    print_note,
    with_bootstrap,
    with_json,
)
from hastore.cli.completion import complete_topics
from hastore.cli.own_node import wait_replayed, warn_unreplayed
from hastore.client.consumer.admin import Admin
from hastore.record.topic_records import PERM_READ, PERM_WRITE, READ_WRITE, TopicConfig

_PERMS = {"rw": READ_WRITE, "r": PERM_READ, "w": PERM_WRITE, "none": 0}

_queues = click.option(
    "--queues", type=click.IntRange(1), metavar="N", help="Its number of queues."
)
_read_queues = click.option(
    "--read-queues", type=click.IntRange(0), metavar="N",
    help="How many of them consumers read, if not all.",
)  # fmt: skip
_write_queues = click.option(
    "--write-queues", type=click.IntRange(0), metavar="N",
    help="How many of them producers put to, if not all.",
)  # fmt: skip


def describe_topic(config: TopicConfig) -> dict[str, Any]:
    """Return the object for `--json`."""
    return {
        "topic": config.name,
        "read_queues": config.read_queues,
        "write_queues": config.write_queues,
        "perm": perm_text(config.perm),
        "order": config.order,
        "attributes": config.attributes,
    }


def perm_text(perm: int) -> str:
    """Return a permission as options name it."""
    letters = ("r" if perm & PERM_READ else "") + ("w" if perm & PERM_WRITE else "")
    return letters or "none"


@click.group("topics", short_help="List, create, change and delete topics.")
def topics_group() -> None:
    """List, create, change and delete topics: their queues, and who may use them.

    A topic need not be created: a producer begins one by putting to it, with store.default_queues
    queues.
    """


@topics_group.command("list", short_help="Show all topics.")
@with_bootstrap
@with_json
def list_command(bootstrap: str | None, as_json: bool) -> int:
    """Show all topics, with their numbers of queues, their permission and their messages."""
    addresses = bootstrap_addresses(bootstrap)
    code = warn_unreplayed(wait_replayed(addresses))
    with Admin(addresses) as admin:
        configs, ranges = admin.topic_configs(), admin.topics()
    rows = []
    for name, config in sorted(configs.items()):
        messages = sum(end - first for first, end in ranges.get(name, {}).values())
        if as_json:
            print_json(describe_topic(config) | {"messages": messages})
        rows.append(
            [name, str(config.read_queues), str(config.write_queues), perm_text(config.perm),
             f"{messages:,}"]
        )  # fmt: skip
    if not as_json and rows:
        _print_table(rows)
    if not rows and code == DONE:
        print_note("there are no topics")
    return code


def _print_table(rows: list[list[str]]) -> None:
    table = [["topic", "read queues", "write queues", "permission", "messages"], *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())


@topics_group.command("create", short_help="Create a topic.")
@click.argument("topic")
@_queues
@_read_queues
@_write_queues
@click.option(
    "--perm", type=click.Choice(list(_PERMS)), default="rw", show_default=True,
    help="Who may use it: readers, writers, both or nobody.",
)  # fmt: skip
@with_bootstrap
@with_json
def create_command(
    topic: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: str,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Create TOPIC; without --queues it has store.default_queues of them."""
    with Admin(bootstrap_addresses(bootstrap)) as admin:
        made = admin.create_topic(
            topic, queues=queues, read_queues=read_queues, write_queues=write_queues,
            perm=_PERMS[perm],
        )  # fmt: skip
    _show("created", made, as_json)
    return DONE


@topics_group.command("set", short_help="Change a topic.")
@click.argument("topic", shell_complete=complete_topics)
@_queues
@_read_queues
@_write_queues
@click.option("--perm", type=click.Choice(list(_PERMS)), help="Who may use it.")
@with_bootstrap
@with_json
def set_command(
    topic: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: str | None,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Change TOPIC; what is not named stays as it is.

    To take queues away without a loss, lower --write-queues first, and --read-queues once all
    consumers have read the queues that are to go.
    """
    addresses = bootstrap_addresses(bootstrap)
    missing = wait_replayed(addresses)
    with Admin(addresses) as admin:
        ranges = admin.topics().get(topic, {})
        made = admin.set_topic(
            topic, queues=queues, read_queues=read_queues, write_queues=write_queues,
            perm=None if perm is None else _PERMS[perm],
        )  # fmt: skip
    _show("changed", made, as_json)
    left = {n: end - first for n, (first, end) in ranges.items() if n >= made.read_queues}
    if any(left.values()):
        print_note(
            f"{sum(left.values()):,} messages are in queues {min(left)} to {max(left)}, which"
            f" consumers do not read any more: `hastore topics set {topic} --read-queues"
            f" {max(left) + 1}` lets them"
        )
    warn_unreplayed(missing)  # it may be more messages; the change itself is made
    return DONE


@topics_group.command("delete", short_help="Delete a topic.")
@click.argument("topic", shell_complete=complete_topics)
@with_bootstrap
def delete_command(topic: str, bootstrap: str | None) -> int:
    """Delete TOPIC: no consumer sees its messages any more.

    They stay in the log until retention removes them. A producer that puts to the topic begins it
    anew.
    """
    addresses = bootstrap_addresses(bootstrap)
    missing = wait_replayed(addresses)
    with Admin(addresses) as admin:
        was_there = topic in admin.topic_configs() or missing is not None
        admin.delete_topic(topic)  # also for a name that is not there: it may be another's to see
    if was_there:
        print_note(f"topic {topic} is deleted")
    else:
        print_note(f"there was no topic {topic}, so nothing was deleted; see `hastore topics list`")
    return DONE


def _show(what: str, config: TopicConfig, as_json: bool) -> None:
    if as_json:
        print_json(describe_topic(config))
        return
    queues = f"{config.write_queues} queues"
    if config.read_queues != config.write_queues:
        queues += f" for producers, {config.read_queues} for consumers"
    print_note(f"{what} topic {config.name}: {queues}, permission {perm_text(config.perm)}")
