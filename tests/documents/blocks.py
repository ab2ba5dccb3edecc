"""The blocks of code in README, CONTRIBUTING and docs, and which of them a test runs.

A test takes what it runs from the page when its module is imported:

    TOPICS = take("docs/operations.md", "hastore topics create orders")

test_every_block.py imports these modules, and fails for a block that nobody has taken.
"""

from __future__ import annotations

import functools
import pathlib
import re
from dataclasses import dataclass
from types import TracebackType
from typing import Self

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
)
RUNBOOK = "docs/runbook.md"
_INLINE = re.compile(r"`((?:hastore|systemctl|echo|export) [^`]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page. `kind`: the word after the fence, or "indented"; "" for a drawing."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def begins(self) -> str:
        """Its first line, by which it is known."""
        return self.text.strip().partition("\n")[0].strip()

    def __str__(self) -> str:
        """Name its place."""
        return f"{self.page}:{self.line}: {self.begins}"


TAKEN: set[Block] = set()  # by the modules that are imported
SECTIONS: set[str] = set()  # of the runbook, the same


@functools.cache
def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page in their order."""
    lines = (ROOT / page).read_text().splitlines()
    found, at = [], 0
    while at < len(lines):
        begin = at
        fence = re.match(r"( *)```(\w*)$", lines[at])
        if fence:
            at += 1
            while lines[at].strip() != "```":
                at += 1
            text = "\n".join(line.removeprefix(fence[1]) for line in lines[begin + 1 : at])
            found.append(Block(page, begin + 1, fence[2], text + "\n"))
        elif lines[at].startswith("    ") and not lines[at - 1].strip():
            while at + 1 < len(lines) and (lines[at + 1][:4] == "    " or not lines[at + 1]):
                at += 1
            text = "\n".join(line[4:] for line in lines[begin : at + 1]).rstrip()
            found.append(Block(page, begin + 1, "indented", text + "\n"))
        at += 1
    return found


def take(page: str, begins: str) -> Block:
    """Return the one block of a page that begins so, which the caller's test runs."""
    found = [block for block in blocks_of(page) if block.text.strip().startswith(begins)]
    assert len(found) == 1, f"{page} has {len(found)} blocks that begin with {begins!r}"
    TAKEN.add(found[0])
    return found[0]


def take_all(page: str, kind: str) -> list[Block]:
    """Return all blocks of a kind, which the caller's test runs."""
    found = [block for block in blocks_of(page) if block.kind == kind]
    TAKEN.update(found)
    return found


def fields(page: str, heading: str) -> set[str]:
    """Return the names in the first column of the first table of fields after a heading."""
    text = (ROOT / page).read_text().partition(heading)[2]
    table = re.search(r"^\| (?:field|key) .*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.M)
    assert table, f"{page} has no table of fields after {heading!r}"
    cells = [line.split("|")[1] for line in table[1].splitlines()]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def sections_of_runbook() -> dict[str, list[str]]:
    """Return the commands in the sentences of each section of the runbook, in their order.

    Those with --remote are left out: tests/cli/test_node_remote.py and its neighbours run them.
    """
    found = {}
    for part in (ROOT / RUNBOOK).read_text().split("\n## "):
        heading, _, text = part.partition("\n")
        text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        commands = [" ".join(one.split()) for one in _INLINE.findall(text)]
        commands = [one for one in commands if "--remote" not in one]
        if commands:
            found[heading.removeprefix("# ")] = commands
    return found


class Section:
    """The commands in the sentences of a section of the runbook, which a test runs in order.

    As a context manager it fails if a command is left at its end.
    """

    def __init__(self, heading: str) -> None:
        """Take the section."""
        SECTIONS.add(heading)
        self.heading = heading

    def __enter__(self) -> Self:
        """Begin with its first command."""
        self._left = sections_of_runbook()[self.heading]
        return self

    def says(self, begins: str) -> str:
        """Return its next command, as it is printed, which begins so."""
        assert self._left, f"{self.heading!r} of the runbook has no further command {begins!r}"
        command = self._left.pop(0)
        assert command.startswith(begins), f"{self.heading!r}: {command!r} comes before {begins!r}"
        return command

    def __exit__(
        self, _kind: object, failure: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Fail for what was not run."""
        assert failure or not self._left, f"{self.heading!r} of the runbook: not run: {self._left}"
