"""`hastore consume`: print a topic's messages, up to its end or for ever."""

import datetime
import sys
from collections.abc import Iterator

import click

from hastore.cli.asking import wait_replayed
from hastore.cli.common import (
    bootstrap_addresses,
    print_json,
    print_note,
    with_bootstrap,
    with_json,
)
from hastore.cli.query import describe_message
from hastore.client.admin import Admin
from hastore.client.consumer.consumer import Consumer
from hastore.client.consumer.consumer_core import Start
from hastore.client.results import Message
from hastore.errors import ClientError, UsageError

POLL_S = 1.0
PATIENCE_S = 10.0  # the longest wait for messages; a slave that lags receives them late


def read_topic(addresses: list[str], topic: str, wait_s: float) -> Iterator[list[Message]]:
    """Yield batches from the topic's start, until no batch has come for `wait_s` seconds."""
    with Consumer(topic, addresses) as consumer:
        while batch := consumer.poll(max_messages=5_000, timeout_s=wait_s):
            yield batch


def seek(consumer: Consumer, queue_id: int | None, start: str) -> None:
    """Go to `start`: a queue offset, or an ISO 8601 time (in UTC unless it has a UTC offset)."""
    queues = [queue_id] if queue_id is not None else list(consumer.positions())
    if start.isascii() and start.isdigit() and len(start) <= 18:
        for queue in queues:
            consumer.seek(queue, int(start))
        return
    try:
        moment = datetime.datetime.fromisoformat(start)
    except ValueError:
        forms = "earliest, latest, a queue offset or a time like 2026-01-31T12:00:00Z"
        raise UsageError(f"--from {start}: is not {forms}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    consumer.seek_to_time(int(moment.timestamp() * 1000))


def _to_the_end(consumer: Consumer, ends: dict[int, int], follow: bool) -> Iterator[list[Message]]:
    """Yield batches up to `ends` (queue -> queue offset); with `follow`, for ever."""
    waited_s = 0.0
    while follow or any(
        position.queue_offset < ends.get(queue, 0)
        for queue, position in consumer.positions().items()
    ):
        batch = consumer.poll(timeout_s=POLL_S)
        if follow:
            yield batch
        else:
            yield [one for one in batch if one.queue_offset < ends.get(one.queue_id, 0)]
        waited_s = 0.0 if batch else waited_s + POLL_S
        if not follow and waited_s >= PATIENCE_S:
            raise ClientError(
                f"no message came for {PATIENCE_S:.0f} s before the topic's end; try again"
            )


@click.command("consume", short_help="Print the messages of a topic.")
@click.argument("topic")
@click.option(
    "--queue", "queue_id", type=click.IntRange(0), metavar="N", help="Read only this queue."
)
@click.option(
    "--from",
    "start",
    default="earliest",
    show_default=True,
    metavar="earliest|latest|QUEUE_OFFSET|TIME",
    help="Where to start; TIME as in 2026-01-31T12:00:00Z.",
)
@click.option("--max", "most", type=click.IntRange(1), metavar="N", help="Stop after N messages.")
@click.option("--follow", is_flag=True, help="At the end, wait for new messages.")
@with_bootstrap
@with_json
def consume_command(
    topic: str,
    queue_id: int | None,
    start: str,
    most: int | None,
    follow: bool,
    bootstrap: str | None,
    as_json: bool,
) -> None:
    """Print the messages of TOPIC, one body per line, up to its present end."""
    addresses = bootstrap_addresses(bootstrap)
    wait_replayed(addresses)
    with Admin(addresses) as admin:
        ranges = admin.topics().get(topic, {})
    if not ranges and not follow:
        with Consumer(topic, addresses) as consumer:
            consumer.positions()  # raises ForbiddenError: topics without a right are not listed
        print_note(f"topic {topic} has no messages yet")
        return
    if queue_id is not None and queue_id not in ranges and not follow:
        held = ", ".join(map(str, sorted(ranges)))
        print_note(
            f"queue {queue_id} of topic {topic} has no messages; the topic has the queues {held}"
        )
        return
    queues = None if queue_id is None else [queue_id]
    ends = {queue: end for queue, (_, end) in ranges.items()}
    printed = 0
    place: Start = "latest" if start == "latest" else "earliest"
    with Consumer(topic, addresses, queues=queues, start=place) as consumer:
        if start not in ("earliest", "latest"):
            seek(consumer, queue_id, start)
        for batch in _to_the_end(consumer, ends, follow):
            wanted = batch if most is None else batch[: most - printed]
            if as_json:
                for message in wanted:
                    print_json(describe_message(message))
            else:
                sys.stdout.buffer.writelines([message.body + b"\n" for message in wanted])
                if follow:
                    sys.stdout.buffer.flush()
            printed += len(wanted)
            if printed == most:
                return
