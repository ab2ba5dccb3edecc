"""`hastore rescued resend`: send the messages of archives again that the log does not have."""

from __future__ import annotations

import os
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import click

from hastore.cli.common import (
    DONE,
    FAILED,
    Seconds,
    complete_files,
    counted,
    print_error,
    print_json,
    print_note,
    print_text,
    with_config,
    with_json,
    with_security,
)
from hastore.cli.cut_list import find_cuts
from hastore.cli.own_node import need_replayed, node_name, security_of
from hastore.cli.produce import describe
from hastore.cli.resending import Rescued, TopicName, names_in_log, read_archive
from hastore.client.consumer.admin import Admin
from hastore.client.messages import SendResult
from hastore.client.producer.producer import Producer
from hastore.config.file import load_config
from hastore.config.model import Config
from hastore.errors import HastoreError, UsageError

LEFT_OUT, KEPT, LACKS, SENT, NOT_SENT = "left out", "in the log", "lacking", "sent", "failed"
_ERRORS_SHOWN = 10


class Archive(NamedTuple):
    """A folder under `rescued/`, and what of it was cut."""

    folder: str
    start: int | None = None
    end: int | None = None


@click.command("resend", short_help="Send messages again that the log does not have.")
@with_config
@with_security
@click.option(
    "--cut", "numbers", type=click.IntRange(min=1), multiple=True, metavar="N",
    help="The number of a cut, as `hastore rescued list` shows it.",
)  # fmt: skip
@click.option("--all", "every", is_flag=True, help="All cuts that are there now.")
@click.option(
    "--folder", "folders", multiple=True, metavar="DIR", shell_complete=complete_files,
    help="An archive, also of another node, instead of cuts.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Send; without it nothing is sent.")
@click.option(
    "--timeout", "timeout_s", type=Seconds(), default=30.0, show_default=True, metavar="SECONDS",
    help="How long to try each message, and to wait for the log's messages.",
)  # fmt: skip
@with_json
def resend_command(
    path: str,
    numbers: tuple[int, ...],
    every: bool,
    folders: tuple[str, ...],
    yes: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Send the messages of cuts again that the group's log does not have; first without --yes.

    A message is known again by its producer and number, or by the id that a RocketMQ client gave
    it, also if it was sent again by this command: so the command may be repeated, after a failure
    too. A message without any of these is known only after this command has sent it. Let producers
    finish their own retries first. The copies are new messages, at the end of their topics; what
    they replace is in their property RESCUED_FROM. Exit code 1: some were not sent, or the archive
    is damaged in part; 4: some are not confirmed.
    """
    if sum(map(bool, (numbers, every, folders))) != 1:
        raise UsageError("give --cut N, once for each cut, or --all, or --folder DIR")
    config = load_config(path)
    archives = [Archive(one) for one in folders] or _archives(config, path, numbers)
    report = _Report(as_json)
    messages = _read(archives, report)
    addresses, security = [one.api for one in config.nodes.values()], security_of(config)
    sendable = [one for one in messages if one.problem is None]
    known: set[TopicName] = set()
    if sendable:
        need_replayed(addresses, security)
        with Admin(addresses, timeout_s=timeout_s, security=security) as admin:
            ranges = admin.topics()
        known = names_in_log(sendable, addresses, security, ranges, timeout_s)
    lacking = []
    for one in messages:
        if one.problem is not None:
            report.add(one, LEFT_OUT, one.problem)
        elif one.places & known:
            report.add(one, KEPT)
        elif yes:
            lacking.append(one)
            known.add((one.topic, one.own_name))  # it may be in two archives
        else:
            report.add(one, LACKS)
            known.add((one.topic, one.own_name))
    code = DONE
    if lacking:
        with Producer(addresses, delivery_timeout_s=timeout_s, security=security) as producer:
            code = _send(producer, lacking, report)
    report.end(yes)
    return max(code, FAILED) if report.damaged else code


def _archives(config: Config, path: str, numbers: tuple[int, ...]) -> list[Archive]:
    """Return the archives of cuts, of all without numbers; raises HastoreError."""
    cuts, _ = find_cuts(config, path, "rescued resend")
    unknown = sorted(set(numbers) - {one["id"] for one in cuts})
    if unknown:
        named = ", ".join(map(str, unknown))
        raise HastoreError(f"{node_name(config)} has no cut {named}; see `hastore rescued list`")
    found = []
    for one in cuts:
        if numbers and one["id"] not in numbers:
            continue
        folder = one["folder"]
        if folder is None:
            raise HastoreError(
                f"cut {one['id']} adds up older ones, in {config.store.root}/rescued: name their "
                "folders with --folder"
            )
        if not os.path.isdir(folder):
            raise HastoreError(
                f"cut {one['id']}: {folder} is not here; run the command on the node's machine. If "
                "it was removed there, ask the senders"
            )
        found.append(Archive(folder, one["start_offset"], one["end_offset"]))
    return found


def _read(archives: list[Archive], report: _Report) -> list[Rescued]:
    found: list[Rescued] = []
    for archive in archives:
        if not os.path.isdir(archive.folder):
            raise UsageError(
                f"--folder {archive.folder}: there is no such folder; see `hastore rescued list`"
            )
        found += read_archive(*archive, partial(report.gap, archive.folder))
    return found


def _send(producer: Producer, lacking: list[Rescued], report: _Report) -> int:
    """Send the messages in their order; return the exit code."""
    under_way: list[tuple[Rescued, Future[SendResult] | str]] = []
    try:
        for one in lacking:
            try:
                under_way.append((one, producer.send(one.topic, one.body, **one.options)))
            except HastoreError as refused:
                under_way.append((one, str(refused)))
    finally:
        producer.flush()
    worst = DONE
    for one, sent in under_way:
        code, problem = FAILED, None
        if isinstance(sent, str):
            problem = sent
        else:
            code, _, problem = describe(sent)
        worst = max(worst, code)
        report.add(one, SENT if code == DONE else NOT_SENT, problem)
    return worst


class _Report:
    """Counts what became of messages, and prints it: each as JSON, or a line for each outcome."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._counts: dict[tuple[str, str | None], int] = {}
        self._errors = 0
        self.damaged = False

    def gap(self, folder: str, start: int, end: int) -> None:
        """Tell bytes of an archive that hold no whole message."""
        self.damaged = True
        print_error(
            f"bytes [{start}, {end}) of {folder} are damaged, or a part of a message: what they "
            "held is not sent; another node's rescued/ may have it"
        )

    def add(self, one: Rescued, outcome: str, problem: str | None = None) -> None:
        """Note one message."""
        if self._as_json:
            key = one.properties.get("KEYS")
            print_json({
                "topic": one.topic, "offset": one.offset, "key": key, "name": one.own_name,
                "outcome": outcome, "reason": problem,
            })  # fmt: skip
        elif outcome == NOT_SENT and self._errors < _ERRORS_SHOWN:
            self._errors += 1
            print_error(f"topic {one.topic}, offset {one.offset}: {problem}")
        shown = outcome, problem if outcome == LEFT_OUT else None
        self._counts[shown] = self._counts.get(shown, 0) + 1

    def end(self, sent: bool) -> None:
        """Print the sum, and how to go on."""
        if self._as_json:
            return
        for (outcome, problem), count in sorted(self._counts.items(), key=str):
            why = "" if problem is None else f": {problem}"
            print_text(f"{outcome}: {counted(count, 'message')}{why}")
        if not self._counts:
            print_note("there is no message")
        elif not sent and (LACKS, None) in self._counts:
            print_note("nothing was sent; with --yes the command sends what is lacking")
        elif sent and not self._errors and not self.damaged:
            print_note("`hastore rescued dismiss` says that you have looked at the cuts")
