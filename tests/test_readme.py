"""The commands, options and files that the README names exist, and its Python code compiles."""

import importlib
import pathlib
import re
import textwrap

import click
import pytest

import hastore
from benchmarks.report import HEADLINE, HEADLINES
from hastore.cli.main import cli
from hastore.cli.nodes import master_command, slave_command

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
LINES = sorted(set(re.findall(r"^(?:.*\| )?bin/(hastore\S*[^\n]*)", TEXT, re.M)))


def find(words):
    """Return the command that a line calls, and the rest of its words."""
    program, *rest = words
    if program != "hastore":
        return {"hastore-master": master_command, "hastore-slave": slave_command}[program], rest
    command = cli
    while isinstance(command, click.Group) and rest:
        command = command.get_command(click.Context(command), rest.pop(0))
        assert command is not None, words
    return command, rest


@pytest.mark.parametrize("line", LINES)
def test_commands_and_options_exist(line):
    words = re.split(r"\s+(?:2?>|&|\|)", line)[0].split()
    command, rest = find(words)
    known = {name for parameter in command.params for name in parameter.opts}
    for word in rest:
        assert not word.startswith("-") or word in known, f"{line}: {word}"


def test_every_command_is_listed():
    for name in cli.list_commands(click.Context(cli)):
        assert f"hastore {name}" in TEXT, name


def test_every_command_of_a_group_is_in_the_table():
    table = TEXT.partition("## Commands")[2].partition("\n## ")[0].splitlines()
    for group in cli.list_commands(click.Context(cli)):
        commands = cli.get_command(click.Context(cli), group)
        rows = [row.partition(" | ")[0] for row in table if f"`hastore {group} " in row]
        for name in commands.list_commands(None) if isinstance(commands, click.Group) else ():
            assert any(re.search(rf"\b{name}\b", row) for row in rows), f"{group} {name}"


def test_the_targets_of_links_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_python_compiles():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    blocks += re.findall(r"<<'END'\n(.*?)END\n", TEXT, re.S)
    assert len(blocks) == 4
    for block in blocks:
        compile(block, "README.md", "exec")


def test_the_page_on_the_python_api_names_existing_classes_and_errors():
    text = (ROOT / "docs" / "python-api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 12
    for block in blocks:
        compile(textwrap.dedent(block), "python-api.md", "exec")  # one is in a list
        for line in re.findall(r"^from hastore.* import .*$", block, re.M):
            exec(line, {})  # noqa: S102
    errors = importlib.import_module("hastore.errors")
    for name in re.findall(r"\b\w+(?:Error|Unknown|Timeout)\b", text):
        assert hasattr(errors, name), name


def test_the_headline_has_the_figures_of_the_benchmarks():
    table = TEXT.partition(HEADLINE[0])[2].partition(HEADLINE[1])[0].strip().splitlines()[2:]
    figures = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in figures.splitlines()]
    for line, (begins, peer) in zip(table, HEADLINES, strict=True):
        name, ours, theirs, ratio = (cell.strip() for cell in line.split("|")[1:-1])
        assert name.startswith(begins) and peer in theirs, line
        value, unit = ours.split(" ")
        theirs = theirs.removesuffix(f" {unit}")
        assert any(
            row[0] == name
            and row[1].startswith(f"{value} (") and row[1].endswith(unit)
            and row[2].startswith(f"{theirs} (")
            and row[3].startswith(f"{ratio} (")
            for row in rows
            if len(row) == 6
        ), f"docs/benchmarks.md does not say so: {line}"  # fmt: skip


def test_the_public_names_exist():
    assert set(hastore.__all__) <= set(dir(hastore))
