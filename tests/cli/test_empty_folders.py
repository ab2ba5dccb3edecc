"""An empty place, as of a shell's variable that is not set, is not the working directory."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from hastore.cli.main import cli
from hastore.errors import UsageError
from hastore.pipeline.where import Where
from tests.cli.kit import hastore


def places(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield each parameter of a command that is a folder, after the command's words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from places(command, (*words, name))
            continue
        assert command is not None
        for one in command.params:
            assert one.name is not None
            if one.metavar in ("DIR", "TARGET") and one.name != "target":  # it has its own text
                yield (*words, name, one.name)


@pytest.mark.parametrize("place", list(places(cli)), ids=" ".join)
def test_an_empty_folder_is_refused(place: tuple[str, ...]) -> None:
    command: click.Command | None = cli
    for word in place[:-1]:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    [one] = [param for param in command.params if param.name == place[-1]]
    for empty in ("", " "):
        with pytest.raises(click.BadParameter, match="it is empty; name a folder"):
            one.type.convert(empty, one, click.Context(command))
    assert one.type.convert(".", one, click.Context(command)) == "."


@pytest.mark.parametrize(
    "words",
    [
        ("init", ""), ("backup", "verify", ""), ("log", "stat", "--store", ""),
        ("pipeline", "stats", "--path", ""), ("pipeline", "audit", "", "a"),
        ("pipeline", "index", "--path", ""),
    ],
    ids=" ".join,
)  # fmt: skip
def test_it_is_wrong_usage(words: tuple[str, ...]) -> None:
    done = hastore(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert "it is empty; name a folder (. is the working directory)" in done.stderr, done.stderr


def test_a_job_of_a_file_or_of_python_refuses_it_too() -> None:
    for empty in ("", " "):
        with pytest.raises(UsageError, match="path is empty"):
            Where(empty).parsed()
