"""A group of commands whose modules are imported when they are used, so that it starts fast."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Import a command's module only when the command is used or listed.

    `places` maps each command to "module:object", in the order in which the help lists them.
    """

    def __init__(self, *args: Any, places: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they were given."""
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command; None for an unknown name."""
        if cmd_name not in self._places:
            return None
        module, _, name = self._places[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command; the error for an unknown name suggests the nearest one."""
        name = args[0]
        near = [] if name in self._places else difflib.get_close_matches(name, self._places, 1)
        if near:
            ctx.fail(f"No such command {name!r}, did you mean {near[0]}?")
        return super().resolve_command(ctx, args)
