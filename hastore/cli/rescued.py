"""`hastore rescued`: what was cut off a node's log, and that an operator has looked at it.

The node takes a dismissal from a file in its store (store/cuts.py), so these commands run on the
node's machine, with its configuration file. The node need not run.
"""

import getpass
import os
import time
from datetime import UTC, datetime

import click
import msgspec

from hastore.cli.common import (
    counted,
    print_json,
    print_text,
    with_config,
    with_json,
    with_patience,
    with_security,
)
from hastore.cli.cut_list import find_cuts
from hastore.cli.own_node import ask_node, node_name
from hastore.cli.rescued_resend import resend_command
from hastore.config.file import load_config
from hastore.config.model import Config, StoreKind
from hastore.errors import UNREADABLE, HastoreError, StoreError, UsageError
from hastore.fs.filesystem import REAL
from hastore.fs.private_files import folder_locked
from hastore.store.cuts import Dismissal, dismissal_path, messages_text

PATIENCE_S = 10.0
_POLL_S = 0.05


@click.group("rescued", short_help="Show, send again and dismiss what was cut off a node's log.")
def rescued_group() -> None:
    """Show what was cut off a node's log, and dismiss it once you have looked at it.

    FILE is the node's configuration file; the commands run on its machine. The messages themselves
    are in the folders that `list` names: `hastore log dump --store FOLDER --body` shows them, and
    `resend` sends those that the log does not have.
    """


rescued_group.add_command(resend_command)


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
        later = "" if runs else "; the node does not run, and takes this when it starts"
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
