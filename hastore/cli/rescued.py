"""`hastore rescued`: what was cut off a node's log: show it, send it again, dismiss it.

The node takes a dismissal from a file in its store (store/cuts.py), so these commands run on the
node's machine, with its configuration file. The node need not run.
"""

from __future__ import annotations

import getpass
import os
import time
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import click
import msgspec

from hastore.cli.common import (
    DONE,
    FAILED,
    Folder,
    Seconds,
    complete_files,
    counted,
    print_error,
    print_json,
    print_note,
    print_text,
    with_config,
    with_json,
    with_patience,
    with_security,
)
from hastore.cli.own_node import ask_node, need_replayed, node_name, refuse_other_file, security_of
from hastore.cli.produce import describe
from hastore.cli.resending import Rescued, TopicName, names_in_log, read_archive
from hastore.client.consumer.admin import Admin
from hastore.client.messages import SendResult
from hastore.client.producer.producer import Producer
from hastore.config.file import load_config
from hastore.config.model import Config, StoreKind
from hastore.errors import UNREADABLE, HastoreError, StoreError, UsageError
from hastore.fs.filesystem import REAL
from hastore.fs.private_files import folder_locked
from hastore.store.cuts import CutList, Dismissal, cuts_path, dismissal_path, messages_text

PATIENCE_S = 10.0
_POLL_S = 0.05
Found = list[dict[str, Any]]
LEFT_OUT, KEPT, LACKS, SENT, NOT_SENT = "left out", "in the log", "lacking", "sent", "failed"
_ERRORS_SHOWN = 10


@click.group("rescued", short_help="Show, send again and dismiss what was cut off a node's log.")
def rescued_group() -> None:
    """Show what was cut off a node's log, and dismiss it once you have looked at it.

    FILE is the node's configuration file; the commands run on its machine. The messages themselves
    are in the folders that `list` names: `hastore log dump --store FOLDER --body` shows them, and
    `resend` sends those that the log does not have.
    """


@rescued_group.command("list", short_help="Show the cuts that nobody has dismissed.")
@with_config
@with_security
@with_json
def list_command(path: str, as_json: bool) -> None:
    """Show the cuts that nobody has dismissed: number, messages, time, folder."""
    config = load_config(path)
    cuts, _ = find_cuts(config, path, "rescued list")
    if as_json:
        for one in cuts:
            print_json(one)
        return
    for one in cuts:
        at = datetime.fromtimestamp(one["wall_ms"] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        count = messages_text(one["messages"], all_counted=one["all_counted"])
        where = f"bytes {one['start_offset']} to {one['end_offset']}, in {one['folder']}"
        if one["folder"] is None:
            where = f"in older archives of {config.store.root}/rescued"
        elif is_removed(one["folder"]):
            where += " (removed)"
        print_text(f"cut {one['id']}: {count}, {at}, {where}")
    if not cuts:
        print_text("nothing that was cut waits for you")


def is_removed(folder: str) -> bool:
    """Whether an archive is gone, and not only hidden from this user."""
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


@rescued_group.command("dismiss", short_help="Say that you have looked at cuts.")
@with_config
@with_security
@click.option(
    "--cut",
    "numbers",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="The number of a cut, as `hastore status` and `hastore rescued list` show it.",
)
@click.option("--all", "every", is_flag=True, help="All cuts that are there now.")
@with_patience(PATIENCE_S, "How long to wait for the node.")
@with_json
def dismiss_command(
    path: str, numbers: tuple[int, ...], every: bool, patience_s: float, as_json: bool
) -> None:
    """Say that you have looked at cuts: the node tells them no more.

    The archives stay; remove them yourself. But while rescued/ is large, the node removes those
    that lie wholly before its log: move away first what you still need. The node's audit log says
    who has dismissed what.
    """
    if bool(numbers) == every:
        raise UsageError("give --cut N, once for each cut, or --all")
    config = load_config(path)
    cuts, runs = find_cuts(config, path, "rescued dismiss")
    there = {one["id"] for one in cuts}
    wanted = there if every else set(numbers)
    unknown = sorted(wanted - there)
    if unknown:
        named = ", ".join(map(str, unknown))
        raise HastoreError(f"{node_name(config)} has no cut {named}; see `hastore rescued list`")
    if wanted:
        _ask(config, wanted)
        if runs:
            _wait(config, wanted, patience_s)
    if as_json:
        print_json({"node": config.node, "dismissed": sorted(wanted), "done": runs})
    else:
        later = "" if runs else "; the node does not answer, and takes this once it runs"
        print_text(f"{counted(len(wanted), 'cut')} dismissed{later}")


def _ask(config: Config, wanted: set[int]) -> None:
    """Write the request for the node, with what is there of an earlier one."""
    root = config.store.root
    if config.store.kind is StoreKind.MEMORY:
        raise HastoreError("the node's log is in memory: a restart of the node forgets the cuts")
    if not REAL.is_dir(f"{root}/hastore"):
        raise HastoreError(
            f"{root}/hastore does not exist, so store.root is another folder here; run the command "
            "on the node's machine, in the directory where the node was started"
        )
    path = dismissal_path(root)
    with folder_locked(path):  # against another such command
        if REAL.exists(path):
            try:
                earlier = msgspec.json.decode(REAL.read_bytes(path), type=Dismissal)
                wanted = wanted | set(earlier.ids)
            except FileNotFoundError:
                pass  # the node has just taken it
            except UNREADABLE as error:
                raise StoreError(f"{path} is no request of hastore: {error}; remove it") from error
        request = Dismissal(ids=tuple(sorted(wanted)), by=f"{_user()} (uid {os.getuid()})")
        REAL.replace_bytes(path, msgspec.json.encode(request))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        return "unknown"


def _wait(config: Config, wanted: set[int], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        status = ask_node(config)
        left = wanted if status is None else wanted & {one["id"] for one in status["cuts"]}
        if not left:
            return
        if not REAL.exists(dismissal_path(config.store.root)):
            _ask(config, left)  # the node removed it with an earlier one, which it had just read
        if time.monotonic() > deadline:
            raise HastoreError(
                f"{node_name(config)} has not done it within {patience_s:g} s; it does so as soon "
                "as it can write to its store: see `hastore status`"
            )
        time.sleep(_POLL_S)


def find_cuts(config: Config, path: str, command: str) -> tuple[Found, bool]:
    """Return the cuts of the file's node, and whether it runs.

    Raises UsageError if the node runs with another file, or if there is no store, StoreError if the
    list cannot be read.
    """
    status = ask_node(config)
    refuse_other_file(command, path, config, status)
    if status is not None:
        return list(status.get("cuts") or []), True
    if config.store.kind is StoreKind.MEMORY:
        return [], False
    file = cuts_path(config.store.root)
    try:
        found = msgspec.json.decode(REAL.read_bytes(file), type=CutList)
    except FileNotFoundError:
        # No store must not look like a store of which nothing was cut.
        if not REAL.exists(f"{config.store.root}/hastore/node.json"):
            raise UsageError(
                f"{config.store.root} is no store of a node that has run; give the node's file, on"
                " its machine, in the directory where the node was started"
            ) from None
        return [], False
    except (OSError, *UNREADABLE) as failure:
        raise StoreError(
            f"{file} cannot be read: {failure}; read it as the node's user, or, if it is damaged, "
            "restart the node, which puts it aside"
        ) from failure
    folder = f"{config.store.root}/rescued"
    return [
        {**msgspec.structs.asdict(one), "folder": f"{folder}/{one.folder}" if one.folder else None}
        for one in found.cuts
        if one.made
    ], False


class Archive(NamedTuple):
    """A folder under `rescued/`, and what of it was cut."""

    folder: str
    start: int | None = None
    end: int | None = None


@rescued_group.command("resend", short_help="Send messages again that the log does not have.")
@with_config
@with_security
@click.option(
    "--cut", "numbers", type=click.IntRange(min=1), multiple=True, metavar="N",
    help="The number of a cut, as `hastore rescued list` shows it.",
)  # fmt: skip
@click.option("--all", "every", is_flag=True, help="All cuts that are there now.")
@click.option(
    "--folder", "folders", multiple=True, type=Folder(), metavar="DIR",
    shell_complete=complete_files,
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
