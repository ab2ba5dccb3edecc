"""`hastore groups dead-letters` and `resend`: what a group has given up, and how to send it again.

RocketMQ's dashboard has the same; mqadmin has no command for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from hastore.cli.common import (
    DIFFER,
    DONE,
    FAILED,
    Seconds,
    bootstrap_addresses,
    counted,
    print_error,
    print_json,
    print_note,
    print_text,
    with_bootstrap,
    with_json,
)
from hastore.cli.completion import complete_groups, complete_topics
from hastore.cli.message_text import Template
from hastore.cli.own_node import need_replayed, wait_replayed, warn_unreplayed
from hastore.client.consumer.positions_client import Positions
from hastore.dead_letters import (
    DeadLetter,
    Resender,
    Resent,
    To,
    dead_letter_topic,
    read_dead_letters,
)
from hastore.errors import DurabilityError, ForbiddenError, OutcomeUnknown, UsageError

WOULD, SENT, WAS_SENT, NOT_SENT, UNKNOWN = (
    "would be sent", "sent", "sent before", "not sent", "not confirmed"
)  # fmt: skip
_ERRORS_SHOWN = 10
_NAMED = 5  # other groups in a note
_TIMES = Template("born %d  given up %s")


def _chosen(
    group: str, addresses: list[str], topic: str | None, queue: int, offsets: tuple[int, ...]
) -> Iterator[DeadLetter]:
    """Yield a group's dead letters: of a topic, of these queue offsets; None and none for all."""
    wanted = set(offsets)
    for one in read_dead_letters(group, addresses):
        at = one.message.queue_offset
        if offsets and (one.message.queue_id != queue or at not in wanted):
            continue
        wanted.discard(at)
        if topic in (None, one.topic):
            yield one
    if wanted:
        listed = ", ".join(map(str, sorted(wanted)))
        raise UsageError(
            f"--offset: queue {queue} of {dead_letter_topic(group)} has no message {listed}; see "
            f"`hastore groups dead-letters {group}`"
        )


def _shown(one: DeadLetter) -> str:
    message = one.message
    return (
        f"{message.queue_id}:{message.queue_offset}  {one.topic or '-'}  key {message.key or '-'}"
    )


def _fields(one: DeadLetter) -> dict[str, Any]:
    message = one.message
    return {
        "group": one.group,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "topic": one.topic,
        "key": message.key,
        "tags": message.tags,
        "attempts": one.attempts,
        "born_ms": message.born_timestamp_ms,
        "store_ms": message.store_timestamp_ms,
        "msg_id": message.message_id,
        "origin_id": one.origin_id,
    }


@click.command("dead-letters", short_help="Show what a group has given up.")
@click.argument("group", shell_complete=complete_groups)
@click.option(
    "--topic", metavar="T", shell_complete=complete_topics, help="Only those that came from T."
)
@with_bootstrap
@with_json
def dead_letters_command(
    group: str, topic: str | None, bootstrap: str | None, as_json: bool
) -> int:
    """Show the dead letters of GROUP, the oldest first: those that its members have given up.

    Each has its queue and offset in %DLQ% and the group's name, the topic that it came from, its
    key, how often members have got it, and when it was born and given up (UTC). Why it was given up
    is not known to the nodes: the members' logs say it. `hastore consume` prints the bodies.
    """
    addresses = bootstrap_addresses(bootstrap)
    dead_letter_topic(group)
    code, count = warn_unreplayed(wait_replayed(addresses)), 0
    for one in _chosen(group, addresses, topic, 0, ()):
        count += 1
        if as_json:
            print_json(_fields(one))
            continue
        times = _TIMES.fill(one.message, b"").decode()
        print_text(f"{_shown(one)}  {counted(one.attempts, 'attempt')}  {times}")
    if not count:
        print_note(f"group {group} has no dead letters" + (f" of topic {topic}" if topic else ""))
    return code


@click.command("resend", short_help="Send again what a group has given up.")
@click.argument("group", shell_complete=complete_groups)
@click.option("--all", "every", is_flag=True, help="All dead letters that are there now.")
@click.option(
    "--offset", "offsets", type=click.IntRange(0), multiple=True, metavar="N",
    help="The queue offset of a dead letter, as `hastore groups dead-letters` shows it.",
)  # fmt: skip
@click.option(
    "--queue", type=click.IntRange(0), default=0, show_default=True, metavar="N",
    help="The queue of --offset.",
)  # fmt: skip
@click.option(
    "--topic", metavar="T", shell_complete=complete_topics,
    help="With --all: only those that came from T.",
)  # fmt: skip
@click.option(
    "--to", type=click.Choice(["topic", "group"]), default="topic", show_default=True,
    help="topic: to the topic that each came from, for all groups that read it. group: for this "
    "group alone, as a retry, which only members that share its queues get.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only show what would be sent.")
@click.option(
    "--timeout", "timeout_s", type=Seconds(), default=30.0, show_default=True, metavar="SECONDS",
    help="How long to wait for each message.",
)  # fmt: skip
@with_bootstrap
@with_json
def resend_command(
    group: str,
    every: bool,
    offsets: tuple[int, ...],
    queue: int,
    topic: str | None,
    to: To,
    dry_run: bool,
    timeout_s: float,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Send dead letters of GROUP again, once its members can handle them.

    The copies are new messages, with the body, the key, the tags and the properties; RESENT_FROM
    names the dead letter, which stays where it is. One of which there is a copy already is not sent
    again: so the command may be repeated, after a failure too. Exit code 1: some were not sent; 4:
    some are not confirmed.
    """
    if every == bool(offsets) or (topic is not None and not every):
        raise UsageError("give --all, with --topic T for those of one topic, or --offset N each")
    dead_letter_topic(group)
    addresses = bootstrap_addresses(bootstrap)
    need_replayed(addresses)
    if to == "topic":
        _tell_other_groups(addresses, group)
    report = _Report(as_json)
    with Resender(addresses, to=to, dry_run=dry_run, timeout_s=timeout_s) as resender:
        letters = _chosen(group, addresses, topic, queue, offsets)
        if offsets:
            letters = iter(list(letters))  # before anything is sent: one of them may be missing
        for one in resender.send(letters):
            report.add(one)
    return report.end(group)


def _tell_other_groups(addresses: list[str], group: str) -> None:
    """Say which other groups read topics that this one reads: they get the copies, too."""
    try:
        with Positions(addresses) as positions:
            known = list(positions.all())
    except ForbiddenError:  # the positions of all groups are for administrators
        return
    topics = {topic for one, topic in known if one == group}
    others = sorted({one for one, topic in known if topic in topics and one != group})
    if others:
        named = ", ".join(others[:_NAMED]) + (", ..." if len(others) > _NAMED else "")
        print_note(
            f"{named} read{'s' if len(others) == 1 else ''} topics of group {group}, too, and get"
            f"{'s' if len(others) == 1 else ''} these messages once more; with `--to group` only"
            f" {group} gets them"
        )


class _Report:
    """Counts what became of dead letters, and prints it."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._counts: dict[str, int] = {}
        self._errors = 0

    def add(self, done: Resent) -> None:
        """Note one."""
        outcome, result = _outcome(done), done.result
        self._counts[outcome] = self._counts.get(outcome, 0) + 1
        if self._as_json:
            print_json({
                **_fields(done.letter), "outcome": outcome,
                "sent_id": None if result is None else result.msg_id,
                "reason": None if done.error is None else str(done.error),
            })  # fmt: skip
        elif done.error is None:
            print_text(f"{outcome}: {_shown(done.letter)}")
        if done.error is not None and self._errors < _ERRORS_SHOWN:
            self._errors += 1
            print_error(f"{outcome}: {_shown(done.letter)}: {done.error}")

    def end(self, group: str) -> int:
        """Print the sum; return the exit code."""
        if not self._counts:
            print_note(f"group {group} has no such dead letters")
        elif not self._as_json:
            sums = (f"{outcome}: {count:,}" for outcome, count in sorted(self._counts.items()))
            print_note("; ".join(sums))
        if NOT_SENT in self._counts:
            return FAILED
        return DIFFER if UNKNOWN in self._counts else DONE


def _outcome(done: Resent) -> str:
    if isinstance(done.error, OutcomeUnknown | DurabilityError):
        return UNKNOWN
    if done.error is not None:
        return NOT_SENT
    if done.copy is not None:
        return WAS_SENT
    return WOULD if done.result is None else SENT
