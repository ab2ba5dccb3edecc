"""Output for people: tables in narrow terminals, and single lines in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios

import pytest

from hastore.cli import groups, top_frame
from hastore.cli.common import fitting_table, print_text
from hastore.client.messages import GroupMember, GroupMembers
from hastore.record.codec import build_record
from hastore.testing import warm
from tests.cli.kit import hastore
from tests.process.harness import ROOT, Group
from tests.store.kit import BORN, opened, put

NEEDED = ("node", "role", "epoch")


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    with Group(tmp_path_factory.mktemp("screens")) as group:
        yield group.start()


def on_a_terminal(columns: int, *arguments: str, typed: bytes = b"") -> list[str]:
    """Run `hastore ARGUMENTS` in a new pseudo-terminal; return the lines that it printed.

    `typed` is what is typed once the command has shown a master.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    with pytest.MonkeyPatch.context() as environment, os.fdopen(ours, "r+b", buffering=0) as screen:
        environment.delenv("COLUMNS", raising=False)
        environment.setenv("TERM", "xterm")
        environment.setenv("NO_COLOR", "1")
        command = [str(ROOT / "bin" / "hastore"), *arguments]
        process = warm.start(command, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        text = b""
        try:
            while piece := screen.read(65536):
                text += piece
                if typed and b"SYNC_MASTER" in text:
                    screen.write(typed)
                    typed = b""
        except OSError:
            pass  # Linux reports EIO after the other side is closed
        assert process.wait() == 0, text
    return re.sub(r"\x1b\[[0-9;]*m", "", text.decode().replace("\r", "")).splitlines()


@pytest.mark.parametrize("columns", [30, 40, 50, 60, 80, 120])
def test_a_narrow_terminal_keeps_node_role_and_epoch(group, columns):
    lines = on_a_terminal(columns, "status", "--bootstrap", ",".join(group.bootstrap))
    head = lines[0].split()
    assert tuple(head[:3]) == NEEDED
    for number, role in ((1, "SYNC_MASTER"), (2, "SLAVE")):
        epoch = str(group[number].status()["epoch"])
        assert lines[number].split()[:3] == [str(number), role, epoch], lines
    assert all(len(line) <= columns for line in lines[:3]), lines[:3]
    wide = ["writable", "max", "confirmed", "readable"]
    assert head[3:] == wide[: len(head) - 3], "the least important columns go first"
    assert columns < 80 or head[3:] == wide
    assert columns < 40 or "writable" in head


def test_a_pipe_gets_all_columns(group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    done = hastore("status", "--bootstrap", ",".join(group.bootstrap))
    assert done.stdout.splitlines()[0].split()[-1] == "readable"


def test_the_last_columns_are_left_out_first():
    head = ("a", "bb", "ccc")
    rows = [("1", "22", "333333"), ("4", "5", "6")]
    assert fitting_table(head, rows, keep=1, width=None) == [
        "a  bb  ccc", "1  22  333333", "4  5   6",
    ]  # fmt: skip
    assert fitting_table(head, rows, keep=1, width=13)[1] == "1  22  333333"
    assert fitting_table(head, rows, keep=1, width=12) == ["a  bb", "1  22", "4  5"]
    assert fitting_table(head, rows, keep=1, width=3) == ["a", "1", "4"]
    assert fitting_table(head, rows, keep=2, width=3) == ["a  bb", "1  22", "4  5"]
    right = fitting_table(("n", "x"), [("1", "5"), ("2", "500")], right={"x"}, width=None)
    assert right == ["n    x", "1    5", "2  500"]


LONG = "/".join(["/tmp/" + "a folder with a long name " * 3] * 3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "-c", f"{LONG}/node1.yaml"),
        ("doctor", "-c", f"{LONG}/node1.yaml"),
        ("promote", "-c", f"{LONG}/node1.yaml"),
        ("log", "stat", "--store", LONG),
        ("produce", "t", "--file", LONG),
        ("status", "--bootstrap", "x" * 300),
        ("positions", "import", LONG),
        ("init", f"/dev/null/{LONG}"),
        ("nosuch" * 60,),
    ],
    ids=lambda arguments: arguments[0][:8],
)
def test_an_error_in_a_pipe_is_one_line(arguments, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    done = hastore(*arguments, stdin=b"")
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr


def test_each_finding_of_status_and_doctor_is_one_line_in_a_pipe(group, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    folder = tmp_path / ("a long name " * 12).strip() / ("another one " * 12).strip()
    folder.mkdir(parents=True)
    with Group(folder) as other:
        other[2].start("slave")
        other[2].write(acks=1, ha={"slave_timeout": "9s"})
        other[2].wait_status(lambda s: s["config_pending"], "the change is seen")
        other[2].write(store={"retention": 1})  # no such key: the file is not valid
        other[2].wait_status(lambda s: s["problems"], "the wrong file is reported")
        done = hastore("status", "--bootstrap", other[2].api, "--timeout", "5")
        told = [line for line in done.stdout.splitlines() if line.startswith("node 2: ")]
        assert len(told) == 2, done.stdout
        assert "slave_timeout" in told[1] and "not followed" in told[0]
        done = hastore("doctor", "-c", str(other[1].path))
        checks = [line.split()[0] for line in done.stdout.splitlines()]
    assert checks == ["file", "node", "store", "disk", "api", "ha", "http", "node", "files"]


def test_names_that_clients_chose_reach_no_terminal_as_control_characters(capsys, monkeypatch):
    """A client id of RocketMQ's protocol may be any text; so may a message's key."""
    bad = "c\x1b[2J\nfalse row\x9b"
    found = GroupMembers([GroupMember(bad, "10.0.0.1:5", "JAVA")], {"t": {0: "gone\x1b[H"}})
    monkeypatch.setattr(groups, "_ask_members", lambda *_: found)
    done = hastore("groups", "members", "g", "--bootstrap", "127.0.0.1:1")
    _, row = done.stdout.splitlines()
    assert row.split()[:2] == ["c\\x1b[2J\\nfalse", "row\\x9b"]
    assert "\x1b" not in done.stderr and "gone\\x1b[H" in done.stderr
    look = {"nodes": [], "slaves": [], "messages_per_s": None, "errors": [bad],
            "groups": [{"group": bad, "lag": 1, "lag_per_s": None}]}  # fmt: skip
    assert all(text.isprintable() for text, _ in top_frame.lines(look, 80))
    print_text(f"first {bad}")
    assert capsys.readouterr().out == "first c\\x1b[2J\nfalse row\\x9b\n"


def test_a_key_of_a_message_reaches_no_terminal_as_control_characters(tmp_path):
    with opened(tmp_path) as store:
        put(store, build_record("t", b"", queue_id=0, properties=[("KEYS", "k\x1b[2J")],
                                born_timestamp_ms=1, born_host=BORN))  # fmt: skip
    dumped = hastore("log", "dump", "--store", str(tmp_path)).stdout
    assert "k\\x1b[2J" in dumped and "\x1b" not in dumped
