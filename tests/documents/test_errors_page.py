"""docs/errors.md has every text that a node logs or shows in /status, and every exception."""

from __future__ import annotations

import inspect
import re

import click
import pytest

from hastore import errors
from hastore.cli.common import run_code
from hastore.errors import HastoreError, Status
from tests.documents import error_texts
from tests.documents.blocks import ROOT
from tests.documents.error_texts import CLIENT, HOLE, NODE, Text

PAGE = ROOT / "docs" / "errors.md"
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("|") and not re.match(r"\|[-| ]+$", line)
]
BY_CLASS = [row for row in ROWS if len(row) == 4]
BY_TEXT = [row for row in ROWS if len(row) == 3]
# Parts of other texts, which are on the page.
PARTS = (
    "node ... is the leader", ", committed up to ...", "node ... prefers node ...",
    "it keeps its link", "its address is not known", ", and asks for the role ...",
    "node ... at ...: ...",
    "expires in ... hours", ", with the CA that has signed it", "without one name",
    "be in the group",
    "... (api.max_pending_puts, api.max_pending_bytes)", "`hastore topics set TOPIC --queues N`",
    "puts with acks=1 may have been acknowledged",
    "as far as this node knows no majority had them, so no put was acknowledged",
    "look at them (`hastore log dump --store ... --body`)", "look at them there",
    "that folder is gone: find out from the senders what they were",
    "node ... leads", "entries ... to ...", "no entries", "no member", "has expired",
    "`hastore rescued resend -c FILE --cut ...`", "`hastore rescued resend -c FILE --folder DIR`",
    "it ends the connection", "the checkpoint says that entry ... is committed",
    "the index was synced up to entry ...",
    ", and ... other ranges", "; no other node can repair it now (...)",
)  # fmt: skip
# What tells a user of a command what to do, or what is right.
REMEDY = re.compile(
    r"(?:^|(?:[;:,.(]|\b(?:or|and|first|then|once)) )(?:then |first |also |else |it |or )?"
    r"(?:add|ask|back up|check|choose|copy|correct|delete|edit|free|give|install|leave|let|look|"
    r"make|move|name|promote|put|raise|read|remove|rename|repair|restart|run|see|send|set|start|"
    r"stop|take|try|upgrade|use|wait|write)\b|`hastore |must be|needs? |\bonly\b|"
    r"(?:there|known|nodes|members) are|docs/",
    re.I,
)
# Of these the remedy is in a value, or there is nothing to do.
NO_REMEDY = (
    "\0 (nothing was changed)", "\0\0 (nothing was changed)", "\0 has no backup",
    "the demo was stopped by \0", "nothing was changed",
    "\0 does not answer; \0, which the node takes when it \0", "\0 has not become \0: \0; \0",
    "\0 does not exist, so store.root is another folder here; \0",
    "\0; nothing was changed: \0", "node \0 \0 after \0 s; \0: node \0 goes on as the leader",
    "node \0 does not lead yet; \0",
    "the node's log is in memory: a restart of the node forgets the cuts",
)  # fmt: skip


def spans(cell: str) -> list[str]:
    """Return the code in a cell."""
    return [found.strip() for _, found in re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", cell)]


def pattern(shown: str) -> re.Pattern[str]:
    """Return what a text on the page stands for: `...` for a value, and at its end for the rest."""
    body, rest = (shown[:-3], ".*") if shown.endswith("...") else (shown, "")
    holes = [re.escape(part) for part in re.split(r"\.\.\.(?!\.\S|\.$)", body)]
    return re.compile(HOLE.join(holes) + rest, re.S)


SHOWN = sorted(
    {span for row in BY_TEXT[1:] for span in spans(row[0]) if span not in list(Status)} - {"text"}
)
PATTERNS = {shown: pattern(shown) for shown in SHOWN}


@pytest.fixture(scope="module")
def found() -> list[Text]:
    """What the code says; not at import, which each worker does."""
    texts = {
        *error_texts.logged(NODE), *error_texts.logged(CLIENT),
        *error_texts.problems(), *error_texts.refusals(), *error_texts.between_nodes(),
    }  # fmt: skip
    return sorted(texts)


def test_every_text_of_the_code_is_on_the_page(found: list[Text]) -> None:
    missing = [
        str(one)
        for one in found
        if one.text.replace(HOLE, "...") not in PARTS
        and not any(p.fullmatch(one.text) for p in PATTERNS.values())
    ]
    assert missing == [], "\n".join(missing)


def test_every_text_on_the_page_is_in_the_code(found: list[Text]) -> None:
    gone = [shown for shown, p in PATTERNS.items() if not any(p.fullmatch(o.text) for o in found)]
    assert gone == []
    assert [shown for shown in SHOWN if len(re.findall("[a-z]", shown)) < 4] == [], "fits all"


def test_each_status_of_a_put_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert [one for one in Status if one is not Status.PUT_OK and f"`{one}`" not in text] == []


def test_each_row_says_what_to_do() -> None:
    assert len(BY_TEXT) > 100 and {len(row) for row in ROWS} == {3, 4}
    for row in ROWS:
        assert all(row[-2:]) or row[0] == "0" or row[0] == "130", row


def test_an_error_of_a_command_says_what_to_do() -> None:
    """By a verb that tells to do something, or by what is allowed."""
    kinds = {"UsageError", "HastoreError", "ConfigError", "PromotionRefused"}
    told = error_texts.told_by_commands(("cli", "backup"), kinds)
    mute = [str(one) for one in told if not REMEDY.search(one.text) and one.text not in NO_REMEDY]
    assert len(told) > 100 and mute == [], "\n".join(mute)


def test_an_error_of_a_configuration_file_has_a_remedy() -> None:
    """It is made of key, problem and remedy."""
    made = error_texts.errors_of_files()
    assert len(made) > 50 and {place for place, parts in made if parts < 3} == set()


@pytest.mark.parametrize(
    "kind",
    [
        one
        for _, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, HastoreError)
    ],
    ids=lambda one: one.__name__,
)
def test_each_exception_has_its_exit_code(kind: type[HastoreError]) -> None:
    @click.command()
    def fails() -> None:
        try:
            raised = kind("text")
        except TypeError:  # it has a status or a result
            raised = kind("text", Status.BUSY)  # type: ignore[call-arg]
        raise raised

    if kind.__name__ == "NotCachedError":
        assert "`NotCachedError`" in PAGE.read_text()
        return
    (row,) = [row for row in BY_CLASS if kind.__name__ in spans(row[1])]
    assert int(row[0].partition(",")[0]) == run_code(fails, "hastore", [])


def test_the_links_lead_somewhere() -> None:
    for name, anchor in re.findall(r"\]\(([\w.-]*)#([\w-]+)\)", PAGE.read_text()):
        page = PAGE.with_name(name) if name else PAGE
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
        anchors = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert anchor in anchors, f"{name}#{anchor}"
