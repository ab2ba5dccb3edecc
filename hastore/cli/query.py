"""`hastore query`: find messages by key, or one message by its id."""

from typing import Any

import click

from hastore.cli.asking import wait_replayed
from hastore.cli.common import (
    DONE,
    FAILED,
    bootstrap_addresses,
    print_json,
    print_note,
    with_bootstrap,
    with_json,
)
from hastore.client.admin import Admin
from hastore.client.results import Message
from hastore.errors import UsageError
from hastore.store.offline.inspect import body_field


def describe_message(message: Message) -> dict[str, Any]:
    """Return the object for `--json`; a body that is not UTF-8 becomes `body_base64`."""
    return {
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "offset": message.offset,
        "msg_id": message.message_id,
        "key": message.key,
        "tags": message.tags,
        "store_ms": message.store_timestamp_ms,
        "born_ms": message.born_timestamp_ms,
        "properties": message.properties,
    } | body_field(message.body)


@click.command("query", short_help="Find messages by key or by id.")
@click.option("--topic", metavar="T", help="The topic of the key.")
@click.option("--key", metavar="K", help="Find messages with this key.")
@click.option("--msg-id", metavar="ID", help="Find the message with this id.")
@click.option(
    "--max", "most", default=32, show_default=True, type=click.IntRange(1, 1_000), metavar="N",
    help="Find at most N messages.",
)  # fmt: skip
@with_bootstrap
@with_json
def query_command(
    topic: str | None,
    key: str | None,
    msg_id: str | None,
    most: int,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Find messages by key, newest first, or one by its id; exit code 1 when there is none."""
    if (msg_id is None) == (key is None) or (key is None) != (topic is None):
        raise UsageError("hastore query: give --topic and --key, or --msg-id")
    addresses = bootstrap_addresses(bootstrap)
    if msg_id is None:
        wait_replayed(addresses)
    with Admin(addresses) as admin:
        if msg_id is not None:
            one = admin.query_message_id(msg_id)
            found = [] if one is None else [one]
        else:
            found = admin.query_key(str(topic), str(key), max_messages=most)
    for message in found:
        if as_json:
            print_json(describe_message(message))
        else:
            click.echo(message.body)
    if not found:
        print_note("no such message")
    return DONE if found else FAILED
