"""`hastore doctor`: check a node, or with `--all` all nodes of its group, and name the remedies.

Of a node whose file is on this machine all is checked, as `hastore doctor` does for one node. Of
another what it says itself counts: its problems, its notes, and what is pending.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

from hastore.cli.common import (
    DONE,
    FAILED,
    print_json,
    print_text,
    with_config,
    with_json,
    with_overrides,
    with_security,
)
from hastore.cli.doctor import Finding, Severity, check_node
from hastore.cli.group_files import GroupFiles, Status
from hastore.cli.own_node import of_each, pending_texts
from hastore.cli.status import GroupAnswers, refusal_text
from hastore.config.file import load_config
from hastore.config.model import Config
from hastore.errors import HastoreError

Found = tuple[int | None, Finding]  # of a node; None: of the group

_COLOURS = {Severity.GOOD: None, Severity.NOTE: "yellow", Severity.BAD: "bold red"}


def check_group(path: str, config: Config) -> Iterator[Found]:
    """Check all nodes of the file's group; `config` is the content of the file at `path`."""
    group = GroupFiles(path)
    problems: dict[int, str] = {}

    def ask(number: int) -> Status | None:
        try:
            return group.ask(number)
        except HastoreError as wrong:
            problems[number] = str(wrong)
            return None

    told = of_each(config.nodes, ask)
    group.seen |= {number: status for number, status in told.items() if status is not None}
    yield from _group(group.seen, refused=bool(problems))
    for number in config.nodes:
        file = group.file_of(number)
        if file is not None:
            found = _file_and_node(file, config if file == path else load_config(file))
        elif number in problems:
            found = iter([Finding("node", Severity.BAD, problems[number])])
        else:
            found = _remote(group, number)
        for one in found:
            yield number, one
        if file is not None and number not in group.seen and number not in problems:
            yield number, _silent(group, number)


def _group(seen: dict[int, Status], *, refused: bool) -> Iterator[Found]:
    """Say whether puts that do not set acks are taken; `refused`: a node runs and says nothing."""
    answers = [{**one, "answers": True} for one in seen.values()]
    if not answers:
        text = "no node answers: start the nodes"
        if refused:
            text = "no node answers this command: see the reason of each node"
        yield None, Finding("group", Severity.BAD, text)
        return
    problem = refusal_text(GroupAnswers(answers, []))
    if problem is not None:
        yield None, Finding("group", Severity.BAD, problem)
        return
    takers = [number for number, one in seen.items() if one["writable"]]
    if len(takers) > 1:
        named = ", ".join(map(str, takers))
        text = f"node {named} take puts at the same time; only a flip does that, for a moment"
        yield None, Finding("group", Severity.BAD, f"{text}: look again, then at their reasons")
        return
    yield None, Finding("group", Severity.GOOD, f"node {takers[0]} takes puts")


def _file_and_node(path: str, config: Config) -> Iterator[Finding]:
    yield Finding("file", Severity.GOOD, f"{path} is valid")
    yield from check_node(path, config)


def _silent(group: GroupFiles, number: int) -> Finding:
    text = f"{group.name(number)} does not answer: start it, or look at the way to it"
    return Finding("node", Severity.BAD, text)


def _remote(group: GroupFiles, number: int) -> Iterator[Finding]:
    """Check a node whose file is on another machine, by what it says."""
    status = group.seen.get(number)
    if status is None:
        yield _silent(group, number)
        return
    epoch = f"{'term' if 'term' in status else 'epoch'} {status['epoch']}"
    text = f"node {number} runs as {status['role']}, {epoch}"
    file = status.get("config")
    if file:
        text += f"; `hastore doctor -c {file}` on its machine checks store, disk and ports too"
    yield Finding("node", Severity.GOOD, text)
    for problem in status.get("problems") or []:
        yield Finding("problem", Severity.BAD, problem)
    for note in status.get("notes") or []:
        yield Finding("note", Severity.NOTE, note)
    for pending in pending_texts(file, status):
        yield Finding("pending", Severity.NOTE, pending)


def _print(found: Iterable[Found], *, every: bool, as_json: bool) -> bool:
    """Print the findings; return whether one is bad."""
    lines = list(found)
    width = max(len(one.check) for _, one in lines)
    for number, one in lines:
        if as_json:
            about = {"node": number} if every else {}
            print_json({**about, "check": one.check, "verdict": one.verdict.value,
                        "text": one.text})  # fmt: skip
            continue
        text = f"{one.check.ljust(width)}  {one.verdict.value.ljust(4)}  {one.text}"
        if every:
            text = f"{('group' if number is None else f'node {number}').ljust(8)}  {text}"
        print_text(text, _COLOURS[one.verdict])
    return any(one.verdict is Severity.BAD for _, one in lines)


@click.command("doctor", short_help="Check a node's file, ports, disk and peers.")
@with_config
@click.option(
    "--all", "every", is_flag=True,
    help="Check all nodes of the file: all of those whose files are here, of others what they say.",
)  # fmt: skip
@with_security
@with_overrides
@with_json
def doctor_command(path: str, every: bool, overrides: dict[str, str], as_json: bool) -> int:
    """Check a node's file, ports, disk and peers; exit code 1 when a check is bad."""
    config = load_config(path, overrides)
    if every:
        found = check_group(path, config)
    else:
        found = ((config.node, one) for one in _file_and_node(path, config))
    return FAILED if _print(found, every=every, as_json=as_json) else DONE
