"""Start a node in the foreground: `hastore-master`, `hastore-slave`, `hastore-dledger` and
`hastore serve`.
"""

from typing import NoReturn

import click

from hastore.cli.common import DONE, print_note, run, with_config, with_overrides
from hastore.config.checks import config_notes
from hastore.config.file import config_error, load_config
from hastore.config.model import Config, Mode, Role
from hastore.security.identities import Identities
from hastore.security.tls_contexts import NodeTls

MASTER = "master"
SLAVE = "slave"
DLEDGER = "dledger"


def load_for(path: str, overrides: dict[str, str], kind: str | None) -> Config:
    """Return the configuration in the file at `path`.

    Raises ConfigError when the configuration is wrong, or has a role that `kind` does not start.
    """
    config = load_config(path, overrides)
    if kind is None:
        return config
    if (kind == DLEDGER) != (config.mode is Mode.DLEDGER):
        if config.mode is Mode.DLEDGER:
            problem = f"is dledger, but hastore-{kind} starts a node of mode classic"
            raise config_error(path, "mode", problem, "start it with hastore-dledger")
        problem = "is classic, but hastore-dledger starts a node of mode dledger"
        remedy = "set mode: dledger and remove role and acks, or use hastore-master, hastore-slave"
        raise config_error(path, "mode", problem, remedy)
    if config.registry is not None:
        problem = f"has the node's role, so hastore-{kind} cannot know it"
        raise config_error(path, "registry", problem, "start the node with hastore serve")
    if kind != DLEDGER and config.assigned_role.is_master != (kind == MASTER):
        other = SLAVE if kind == MASTER else MASTER
        wanted = f"{Role.SYNC_MASTER.value} or {Role.ASYNC_MASTER.value}"
        wanted = wanted if kind == MASTER else Role.SLAVE.value
        problem = f"is {config.assigned_role.value}, but hastore-{kind} starts {wanted}"
        remedy = f"start it with hastore-{other}, or edit the role"
        raise config_error(path, "role", problem, remedy)
    return config


def start_node(path: str, overrides: dict[str, str], kind: str | None, *, only_check: bool) -> int:
    """Check the configuration; unless `only_check`, run the node until it is told to stop."""
    config = load_for(path, overrides, kind)
    if only_check:
        # These raise ConfigError for files with which the node would not start.
        NodeTls(config)
        if config.security.identities is not None:
            Identities(config.security.identities)
        nodes = len(config.nodes)
        print_note(
            f"{path} is valid: node {config.node} of {nodes} in {config.cluster}/{config.group}"
        )
        for note in config_notes(config):
            print_note(f"note: {note}")
        return DONE
    from hastore.server.run import run_node  # imported late: --check does not need it

    return run_node(path, overrides, kind)


def _command(name: str, kind: str | None, help_text: str) -> click.Command:
    @click.command(name, help=help_text, context_settings={"help_option_names": ["-h", "--help"]})
    @with_config
    @with_overrides
    @click.option("--check", "only_check", is_flag=True, help="Validate the file and exit.")
    @click.version_option(package_name=None, version=_version(), prog_name=name)
    def command(path: str, overrides: dict[str, str], only_check: bool) -> int:
        return start_node(path, overrides, kind, only_check=only_check)

    return command


def _version() -> str:
    from hastore import __version__

    return __version__


_FOREGROUND = "It runs in the foreground and prints one `ready` line to stdout once it serves."
master_command = _command("hastore-master", MASTER, f"Start a master. {_FOREGROUND}")
slave_command = _command("hastore-slave", SLAVE, f"Start a slave. {_FOREGROUND}")
dledger_command = _command(
    "hastore-dledger", DLEDGER, f"Start a node of a group that elects its leader. {_FOREGROUND}"
)
serve_command = _command(
    "serve", None, f"Start a node in the mode and role that its file says. {_FOREGROUND}"
)


def master() -> NoReturn:
    """Run `hastore-master`."""
    run(master_command, "hastore-master")


def slave() -> NoReturn:
    """Run `hastore-slave`."""
    run(slave_command, "hastore-slave")


def dledger() -> NoReturn:
    """Run `hastore-dledger`."""
    run(dledger_command, "hastore-dledger")


# Without an installation: python -m hastore.cli.nodes master|slave|dledger|serve
if __name__ == "__main__":
    import sys

    _KINDS = {
        MASTER: master_command,
        SLAVE: slave_command,
        DLEDGER: dledger_command,
        "serve": serve_command,
    }
    _kind = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if _kind not in _KINDS:
        raise SystemExit("error: the first argument must be master, slave, dledger or serve")
    run(_KINDS[_kind], "hastore serve" if _kind == "serve" else f"hastore-{_kind}")
