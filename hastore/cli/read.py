"""`hastore consume` and `hastore query`: print the messages of a topic, or find single ones."""

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import click

from hastore.cli.common import (
    DONE,
    FAILED,
    STORE,
    bootstrap_addresses,
    counted,
    print_error,
    print_json,
    print_note,
    with_bootstrap,
    with_json,
)
from hastore.cli.completion import complete_groups, complete_topics
from hastore.cli.message_text import FORMAT_HELP, Template, has_key
from hastore.cli.own_node import wait_replayed, warn_unreplayed
from hastore.client.consumer.admin import Admin, QueueRanges
from hastore.client.consumer.consumer import Consumer
from hastore.client.consumer.consumer_core import OnLost, Start
from hastore.client.messages import FoundMessages, Message, Position
from hastore.errors import ClientError, CorruptRecordError, PositionLostError, UsageError
from hastore.record.message_filter import make_filter
from hastore.store.offline.inspect import body_field

_NO_END = 2**63 - 1


with_raw = click.option(
    "--raw", is_flag=True, help="Print bodies as they are stored: some may be compressed."
)


def describe_message(message: Message, raw: bool = False) -> dict[str, Any]:
    """Return the object for `--json`; a body that is not UTF-8 becomes `body_base64`.

    A body that does not decompress is returned as it is stored, with `body_error`.
    """
    body, problem = _body(message, raw)
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
    } | body_field(body) | ({} if problem is None else {"body_error": problem})


def _body(message: Message, raw: bool) -> tuple[bytes, str | None]:
    """Return the body, or the one that is stored and why it does not decompress."""
    try:
        return message.raw_body if raw else message.body, None
    except CorruptRecordError as failure:
        return message.raw_body, f"{failure} (--raw)"


def _print(
    messages: Iterable[Message], as_json: bool, raw: bool, template: Template | None = None
) -> bool:
    """Print messages; return False if a body does not decompress, which is an error for each."""
    whole = True
    for message in messages:
        if as_json:
            fields = describe_message(message, raw)
            whole &= "body_error" not in fields
            print_json(fields)
            continue
        body, problem = _body(message, raw)
        whole &= problem is None
        if problem is not None:
            print_error(problem)
        elif template is not None:
            sys.stdout.buffer.write(template.fill(message, body))
        else:
            sys.stdout.buffer.write(body + b"\n")
    return whole


@click.command("query", short_help="Find messages by key or by id.")
@click.option("--topic", metavar="T", shell_complete=complete_topics, help="The topic of the key.")
@click.option("--key", metavar="K", help="Find messages with this key.")
@click.option("--msg-id", metavar="ID", help="Find the message with this id.")
@click.option(
    "--max", "most", default=32, show_default=True, type=click.IntRange(1, 1_000), metavar="N",
    help="Find at most N messages.",
)  # fmt: skip
@click.option("--since", metavar="TIME", help="By key: only messages stored at TIME or later.")
@click.option(
    "--until", metavar="TIME",
    help="By key: only messages stored at TIME or earlier; TIME as in 2026-01-31T12:00:00Z.",
)  # fmt: skip
@click.option(
    "--before", type=click.IntRange(0, _NO_END), default=_NO_END, metavar="OFFSET",
    help="By key: only messages below this offset of the log.",
)  # fmt: skip
@with_raw
@with_bootstrap
@with_json
def query_command(
    topic: str | None,
    key: str | None,
    msg_id: str | None,
    most: int,
    since: str | None,
    until: str | None,
    before: int,
    raw: bool,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Find messages by key, newest first, or one by its id; exit code 1 when there is none.

    Exit code 3: a message that may be meant is damaged, and no node that answers has it whole.
    """
    if (msg_id is None) == (key is None) or (key is None) != (topic is None):
        raise UsageError("hastore query: give --topic and --key, or --msg-id")
    begin = 0 if since is None else parse_moment("--since", since)
    end = _NO_END if until is None else parse_moment("--until", until)
    addresses = bootstrap_addresses(bootstrap)
    if msg_id is None:
        warn_unreplayed(wait_replayed(addresses))
    with Admin(addresses) as admin:
        if msg_id is not None:
            one = admin.query_message_id(msg_id)
            found = FoundMessages([] if one is None else [one])
        else:
            found = admin.query_key(
                str(topic), str(key), max_messages=most, begin_ms=begin, end_ms=end, before=before
            )
    whole = _print(found, as_json, raw)
    if found.cut_ms is not None:
        moment = datetime.datetime.fromtimestamp(found.cut_ms / 1000, datetime.UTC)
        again = f"--until {moment.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
        if found.cut_offset is not None:
            again = f"--before {found.cut_offset}"
        print_note(
            "the node has cut the search short: older messages may be missing; to find them, search"
            f" again with {again}"
        )
    elif not found and not found.damaged:
        print_note("no such message")
    if found.damaged:
        count = counted(len(found.damaged), "message")
        print_error(
            f"{count} that may have the key cannot be read: damaged at offset {found.damaged[0]};"
            " see `hastore log verify`"
        )
        return STORE
    return DONE if found and whole else FAILED


POLL_S = 1.0
POLL_MESSAGES = 500
PATIENCE_S = 10.0  # the longest wait for messages; a slave that lags receives them late


def read_topic(addresses: list[str], topic: str, wait_s: float) -> Iterator[list[Message]]:
    """Yield batches from the topic's start, until no batch has come for `wait_s` seconds."""
    with Consumer(topic, addresses) as consumer:
        while batch := consumer.poll(max_messages=5_000, timeout_s=wait_s):
            yield batch


def _offset(start: str) -> int | None:
    """Return the queue offset that a place is; None if it is another place."""
    return int(start) if start.isascii() and start.isdigit() and len(start) <= 18 else None


def seek(consumer: Consumer, queue_id: int | None, start: str, ends: Mapping[int, int]) -> None:
    """Go to `start`: a queue offset, or an ISO 8601 time (in UTC unless it has a UTC offset).

    `ends` are those of the queues. Of all queues, those that end before the offset have nothing.
    """
    offset = _offset(start)
    if offset is not None:
        if queue_id is not None:
            consumer.seek(queue_id, offset)
            return
        for queue in list(consumer.positions()):
            consumer.seek(queue, min(offset, ends.get(queue, 0)))
        return
    forms = "earliest, latest, a queue offset or a time like 2026-01-31T12:00:00Z"
    consumer.seek_to_time(parse_moment("--from", start, forms))


def parse_moment(
    option: str, text: str, forms: str = "a time like 2026-01-31T12:00:00Z"
) -> datetime.datetime:
    """Return an ISO 8601 time, in UTC unless it has a UTC offset; raises UsageError."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{option} {text}: is not {forms}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment


def _poll(consumer: Consumer, most: int, begin: int | None) -> list[Message]:
    """Poll; what retention has removed from `begin` on, which was asked for, is left out."""
    try:
        return consumer.poll(most, timeout_s=POLL_S)
    except PositionLostError as lost:
        queue, first = lost.queue_id, lost.common
        if begin is None or queue is None or not isinstance(first, Position):
            raise
        if consumer.position(queue).queue_offset != begin or first.queue_offset <= begin:
            raise  # it has read there, or there is nothing yet
        consumer.seek(queue, first)
        print_note(
            f"queue {queue} has no message before queue offset {first.queue_offset:,}: it is read"
            " from there"
        )
        return []


@contextlib.contextmanager
def _naming_a_remedy(topic: str, group: str | None) -> Iterator[None]:
    """Say what can be done about a lost position."""
    try:
        yield
    except PositionLostError as lost:
        text = f"{lost}; to go on at the first message that is left, add --on-lost earliest"
        if group is not None:
            move = f"hastore groups reset {group} --topic {topic} --to earliest"
            text += f", or move the group with `{move}`"
        raise ClientError(text) from lost


def _to_the_end(
    consumer: Consumer, ends: dict[int, int], follow: bool, most: Callable[[], int], whole: bool,
    begin: int | None,
) -> Iterator[list[Message]]:  # fmt: skip
    """Yield batches up to `ends` (queue -> queue offset); with `follow`, for ever.

    A batch has at most `most()` messages. With `whole` what a poll returns beyond the ends is
    yielded too: its position is committed afterwards. `begin`: the queue offset to begin at that
    was asked for, if one was.
    """
    waited_s = 0.0
    before = places = consumer.positions()
    while follow or any(place.queue_offset < ends.get(queue, 0) for queue, place in places.items()):
        batch = _poll(consumer, min(POLL_MESSAGES, most()), begin)
        if follow or whole:
            yield batch
        else:
            yield [one for one in batch if one.queue_offset < ends.get(one.queue_id, 0)]
        before, places = places, consumer.positions()
        moved = bool(batch) or places != before  # with a filter many messages may come before one
        waited_s = 0.0 if moved else waited_s + POLL_S
        if not follow and waited_s >= PATIENCE_S:
            raise ClientError(
                f"no message came for {PATIENCE_S:.0f} s before the topic's end; try again"
            )


class _Commits:
    """What a command commits for the group that it was given, if it was."""

    def __init__(self, consumer: Consumer, group: str | None, start: str) -> None:
        """Commit where the group begins, if that is the end: the next run must not begin later."""
        self._consumer = consumer if group is not None else None
        self._done: dict[int, Position] | None = None
        if start != "latest" and group is not None:
            self._done = consumer.positions()
        self.commit()

    def commit(self) -> None:
        """Commit if the positions have moved, also past messages that a filter does not want."""
        if self._consumer is None:
            return
        places = self._consumer.positions()
        if places != self._done:
            self._consumer.commit()
            self._done = places


def _tell_of_nothing(
    make: Callable[..., Consumer], topic: str, group: str | None, queue_id: int | None,
    start: str, ranges: QueueRanges,
) -> bool:  # fmt: skip
    """Say it if there is nothing to read; a group begins all the same.

    Raises ForbiddenError for a topic without a right.
    """
    if ranges and (queue_id is None or queue_id in ranges):
        return False
    with make() as consumer:
        consumer.positions()  # topics without a right are not listed
        _Commits(consumer, group, start)
    if not ranges:
        print_note(f"topic {topic} has no messages yet")
        return True
    held = ", ".join(map(str, sorted(ranges)))
    print_note(
        f"queue {queue_id} of topic {topic} has no messages; the topic has the queues {held}"
    )
    return True


def _tell_members(admin: Admin, group: str | None) -> None:
    """Say it if members of the group are online."""
    if group is None:
        return
    with contextlib.suppress(ClientError):  # it is only a hint
        members = admin.group_members(group).members
        if members:
            print_note(
                f"group {group} has {counted(len(members), 'member')} online, who share its queues;"
                " what is printed here is committed for them, too"
            )


@click.command("consume", short_help="Print the messages of a topic.")
@click.argument("topic", shell_complete=complete_topics)
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
@click.option("--tags", metavar="TAGS", help="Only messages with one of these: 'red || green'.")
@click.option(
    "--sql", metavar="SQL", help="Only messages whose properties match: \"price > 10\"."
)
@click.option("--key", metavar="K", help="Only messages with this key; `hastore query` is faster.")
@click.option(
    "--group", metavar="G", shell_complete=complete_groups,
    help="Go on where this consumer group is, and commit what was printed under its name.",
)  # fmt: skip
@click.option(
    "--on-lost", type=click.Choice(["earliest", "latest", "common"]),
    help="Where to go on if retention or a failover has removed the group's place: at the first "
    "message, at the end, or at the last place that is still valid.  [default: an error]",
)  # fmt: skip
@click.option("--format", "form", metavar="TEXT", help=FORMAT_HELP)
@with_raw
@with_bootstrap
@with_json
def consume_command(
    topic: str,
    queue_id: int | None,
    start: str,
    most: int | None,
    follow: bool,
    tags: str | None,
    sql: str | None,
    key: str | None,
    group: str | None,
    on_lost: OnLost | None,
    form: str | None,
    raw: bool,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Print the messages of TOPIC, one body per line, up to its present end.

    With --group the messages of a queue in which the group has a position begin there, and each
    batch is committed after it was printed; where `--from latest` begins is committed at once. Exit
    code 1: a body does not decompress, or the master's replay has not come to the topic's end, as a
    warning says. The other messages are printed all the same.
    """
    template = None if form is None else Template(form)
    if template is not None and as_json:
        raise UsageError("give --format or --json, not both")
    if group is not None and start not in ("earliest", "latest"):
        raise UsageError(
            "--from: with --group only earliest or latest; `hastore groups reset` moves the group"
        )
    addresses = bootstrap_addresses(bootstrap)
    make_filter(tags, sql)  # a wrong one is refused first
    code = warn_unreplayed(wait_replayed(addresses))
    with Admin(addresses) as admin:
        ranges = admin.topics().get(topic, {})
        _tell_members(admin, group)
    place: Start = "latest" if start == "latest" else "earliest"
    make = partial(
        Consumer, topic, addresses, group=group, queues=None if queue_id is None else [queue_id],
        start=place, tags=tags, sql=sql, on_lost=on_lost or "raise",
    )  # fmt: skip
    if not follow and _tell_of_nothing(make, topic, group, queue_id, start, ranges):
        return code
    ends = {queue: end for queue, (_, end) in ranges.items()}
    printed, whole = 0, True
    with _naming_a_remedy(topic, group), make() as consumer:
        if start not in ("earliest", "latest"):
            seek(consumer, queue_id, start, ends)
        commits = _Commits(consumer, group, start)

        def left() -> int:
            return POLL_MESSAGES if most is None else most - printed

        for batch in _to_the_end(consumer, ends, follow, left, group is not None, _offset(start)):
            wanted = [one for one in batch if key is None or has_key(one, key)]
            whole &= _print(wanted, as_json, raw, template)
            if (follow or group is not None) and not as_json:
                sys.stdout.buffer.flush()
            commits.commit()
            printed += len(wanted)
            if printed == most:
                break
        commits.commit()
    return code if whole else FAILED
