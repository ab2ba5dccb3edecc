"""The command `hastore`. Subcommands are imported when they are used, so that it starts fast."""

import difflib
import importlib
from typing import NoReturn

import click

import hastore
from hastore.cli.common import run

_COMMANDS = {
    "init": "init:init_command",
    "status": "status:status_command",
    "produce": "produce:produce_command",
    "consume": "consume:consume_command",
    "query": "query:query_command",
    "promote": "flip:promote_command",
    "demote": "flip:demote_command",
    "serve": "nodes:serve_command",
    "log": "log:log_group",
    "positions": "positions:positions_group",
    "perf": "perf:perf_group",
    "doctor": "doctor:doctor_command",
    "demo": "demo:demo_command",
}


class _Lazy(click.Group):
    """Import a command's module only when the command is used or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which a new user needs them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command; None for an unknown name."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(f"hastore.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command; the error for an unknown name suggests the nearest one."""
        name = args[0]
        near = [] if name in _COMMANDS else difflib.get_close_matches(name, _COMMANDS, 1)
        if near:
            ctx.fail(f"No such command {name!r}, did you mean {near[0]}?")
        return super().resolve_command(ctx, args)


@click.group("hastore", cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hastore.__version__, prog_name="hastore")
def cli() -> None:
    """A replicated, append-only commit log: one master and its slaves."""


def main() -> NoReturn:
    """Run `hastore`."""
    run(cli, "hastore")


if __name__ == "__main__":
    main()
