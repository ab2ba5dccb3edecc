"""`hastore dev`: a group for a developer's machine, in one command."""

import os
import pathlib
import signal
import tempfile
import threading
from contextlib import ExitStack

import click

from hastore.cli.common import DONE, Folder, print_json, print_note, print_text, with_json
from hastore.cli.init import BASE_PORT, MAX_NODES
from hastore.config.model import Mode
from hastore.testing.groups import Group

_LOOK_S = 0.5


@click.command("dev", short_help="Run a group on this machine, to develop against.")
@click.option(
    "--mode", default=Mode.CLASSIC.value, show_default=True,
    type=click.Choice([mode.value for mode in Mode]),
    help="classic: a master and slaves; dledger: the nodes elect their leader.",
)  # fmt: skip
@click.option(
    "--nodes", type=click.IntRange(1, MAX_NODES), metavar="N",
    help="Number of nodes.  [default: those in DIR; else 2, and 3 in mode dledger]",
)  # fmt: skip
@click.option(
    "--port", default=BASE_PORT, show_default=True, type=click.IntRange(0, 65_000), metavar="P",
    help="The first node's api port. Its ha and http ports follow; the next node begins 10 higher. "
    "0: free ports, others each time.",
)  # fmt: skip
@click.option(
    "--dir", "folder", metavar="DIR", type=Folder(),
    help="Keep files and stores in DIR, and go on with them the next time: with the roles, and "
    "with what you have edited; only the addresses are set again. By default they are in a "
    "temporary folder, which is removed at the end.",
)  # fmt: skip
@with_json
def dev_command(mode: str, nodes: int | None, port: int, folder: str | None, as_json: bool) -> int:
    """Run a group of nodes on loopback until Ctrl-C or SIGTERM, and print its addresses.

    Clients need no address if HASTORE_BOOTSTRAP is set as printed. Nobody is asked who they are,
    and nothing outlives the command unless --dir is given: for development only.

    With --json one line is printed once the group serves. Exit code 1 if a node ends by itself; 2,
    and DIR is left as it is, if another group runs on it, or if its files are not of a group of
    `hastore dev` of this mode and number of nodes.
    """
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    with ExitStack() as stack:
        if folder is None:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="hastore-dev-"))
        else:
            place = os.path.abspath(folder)
            os.makedirs(place, exist_ok=True)
        group = stack.enter_context(Group(pathlib.Path(place), mode, nodes, first_port=port))
        group.start()
        if as_json:
            files = {str(node.number): str(node.config) for node in group}
            print_json({"bootstrap": group.bootstrap, "master": group.master.api, "files": files})
        else:
            _describe(group)
        while not stopped.wait(_LOOK_S):
            for node in group:
                node.check_running()
        if not as_json:
            print_note("stopping")
        group.stop()
    return DONE


def _describe(group: Group) -> None:
    """Print where the group is, and what to do with it."""
    master = group.master
    first, others = ("leader", "follower") if group.mode is Mode.DLEDGER else ("master", "slave")
    for node in group:
        role = first if node is master else others
        print_text(f"node {node.number}  {role:8}  {node.api}  http://{node.http}/status")
        print_text(f"        {node.config}  {node.log}")
    addresses = ",".join(node.api.removeprefix("tcp://") for node in group)
    print_text(f"\nexport HASTORE_BOOTSTRAP={addresses}")
    print_text("hastore produce TOPIC < FILE; hastore consume TOPIC; hastore status")
    print_text("Ctrl-C stops the group")
