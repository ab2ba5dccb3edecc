"""Every `hastore ...` command in documents, errors, help and output exists, with its options.

The commands are taken from the README, the docs, the configuration files, the templates, and from
every text in the code.
"""

import ast
import pathlib
import re
import shlex
import sys

import click

from hastore.cli.common import program
from hastore.cli.main import cli
from hastore.cli.nodes import dledger_command, master_command, slave_command
from tests.sources import nodes

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOLE = "VALUE"  # replaces each value that a text gets at run time
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "conf").glob("*.yaml")),
    *sorted((ROOT / "hastore").rglob("*.template")),
]
CODE = sorted((ROOT / "hastore").rglob("*.py"))
PROGRAMS = {
    "hastore": cli,
    "hastore-master": master_command,
    "hastore-slave": slave_command,
    "hastore-dledger": dledger_command,
}
PROGRAM = re.compile(r"^(?:bin/)?(hastore(?:-master|-slave|-dledger)?)(?:\s+(.*))?$")
TYPED = re.compile(
    r"(?:^|[|;&]|#   )\s*((?:bin/)?hastore(?:-master|-slave|-dledger)? [^|;&<>\n]*)", re.M
)
HMAC_LABELS = ("hastore caller", "hastore answerer")  # of HELLO's proofs, in docs/ha-link.md


def quoted(text: str) -> list[str]:
    """Return the commands in backquotes."""
    found = re.findall(r"`((?:bin/)?hastore(?:-master|-slave|-dledger)?(?:\s[^`]*)?)`", text)
    return [" ".join(one.split()) for one in found]


def commands_of(page: pathlib.Path) -> list[str]:
    """Return the commands of a page: those in backquotes, in blocks of code and in comments."""
    text = page.read_text()
    found = quoted(text)
    if page.suffix == ".md":
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
        blocks += re.findall(r"(?:^    .*\n)+", text, re.M)
    else:
        blocks = [text]
    for block in blocks:
        typed = re.sub(r"\s2>+", " >", block.replace("\\\n", " "))
        found += [one.split("  #")[0].strip() for one in TYPED.findall(typed)]
    return sorted({one for one in found if one not in HMAC_LABELS})


def texts_of(path: pathlib.Path) -> list[str]:
    """Return the string constants of a module; each value in an f-string becomes HOLE."""
    texts = []
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else hole(part)
                for part in node.values
            ]
            texts.append("".join(parts))
    return texts


def hole(part: ast.expr) -> str:
    """Return the name that a call of `program(...)` in an f-string returns, else HOLE."""
    called = part.value if isinstance(part, ast.FormattedValue) else None
    if isinstance(called, ast.Call) and isinstance(called.func, ast.Name):
        given = called.args[0] if called.args else None
        if called.func.id == "program" and isinstance(given, ast.Constant):
            return str(given.value)
        if called.func.id == "program":
            return "hastore-master"
    return HOLE


def commands_in_code(path: pathlib.Path) -> list[str]:
    """Return the commands in a module's texts: in backquotes, or as a text of their own."""
    found = []
    for text in texts_of(path):
        found += quoted(text)
        line = text.strip()
        told = re.match(r"hastore \w+:", line)  # the beginning of an error, not a command
        if PROGRAM.match(line) and not told and re.search(r" (-|[a-z]+ -)", line):
            found.append(line.rstrip("& "))
    return sorted(set(found))


def problem_of(line: str) -> str | None:
    """Return why the line is not a valid command of hastore; None if it is one."""
    match = PROGRAM.match(line)
    assert match, line
    command: click.Command = PROGRAMS[match[1]]
    rest = re.sub(r"[\[\]]", " ", match[2] or "").replace("...", " ")
    words = shlex.split(rest, comments=True)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        names = words.pop(0).split("|")
        if names == [HOLE]:
            return None  # the name is known only at run time; the test of that text checks it
        context = click.Context(command)
        for name in names:
            if command.get_command(context, name) is None:
                return f"there is no {name!r}"
        words = [] if words[:1] == ["|"] else words
        found = command.get_command(context, names[0])
        assert found is not None
        command = found
    options = {
        name: option
        for option in command.params
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
    }
    values = 0
    at = iter(words)
    for word in at:
        name, given, _ = word.partition("=")
        if name in ("-h", "--help", "--version"):
            continue
        if word.startswith("-"):
            if name not in options:
                return f"it has no option {name}"
            if not options[name].is_flag and not given and next(at, None) is None:
                return f"{name} has no value"
        else:
            values += 1
    taken = sum(1 for one in command.params if isinstance(one, click.Argument))
    return None if values <= taken else f"it takes {taken} arguments, not {values}"


def test_the_check_finds_wrong_commands():
    for line, why in {
        "hastore stauts": "no 'stauts'",
        "hastore log dumb --store DIR": "no 'dumb'",
        "hastore log dump|veryfy": "no 'veryfy'",
        "hastore promote -c FILE --fast": "no option --fast",
        "bin/hastore-master --config": "has no value",
        "hastore demote FILE": "takes 0 arguments",
    }.items():
        assert why in str(problem_of(line)), line
    assert problem_of("bin/hastore-slave -c FILE --check") is None
    assert problem_of("hastore init [--nodes 3] DIR") is None
    assert commands_in_code(ROOT / "hastore" / "cli" / "demo.py").count(
        f"hastore log stat --store {HOLE}"
    )


def test_the_commands_of_the_pages_exist():
    found = [(page, line) for page in PAGES for line in commands_of(page)]
    assert wrong(found) == [] and len({line for _, line in found}) > 40


def test_the_commands_in_texts_of_the_code_exist():
    found = [(path, line) for path in CODE for line in commands_in_code(path)]
    assert wrong(found) == [] and len({line for _, line in found}) > 15


def wrong(found):
    """Name each line that is not a command, with its file."""
    return [
        f"{path.relative_to(ROOT)}: {line}: {why}"
        for path, line in found
        if (why := problem_of(line))
    ]


def test_a_program_is_named_as_this_user_runs_it(tmp_path, monkeypatch):
    checkout, installed = tmp_path / "bin", tmp_path / "env"
    for folder in (checkout, installed):
        folder.mkdir()
        for name in PROGRAMS:
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "argv", ["bin/hastore"])
    assert program("hastore-slave") == "bin/hastore-slave", "from a checkout"
    monkeypatch.setattr(sys, "argv", ["/usr/lib/hastore/__main__.py"])
    assert program("hastore") == f"{sys.executable} -m hastore", "python -m hastore"
    assert program("hastore-master") == f"{sys.executable} -m hastore serve"
    monkeypatch.setenv("PATH", str(installed))
    assert program("hastore-master") == "hastore-master"
    monkeypatch.setattr(sys, "argv", [str(installed / "hastore")])
    assert program("hastore-master") == "hastore-master", "installed, on the PATH"
    monkeypatch.setattr(sys, "argv", ["bin/hastore"])
    assert program("hastore-master") == "bin/hastore-master", "not an installed one"
