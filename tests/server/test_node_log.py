"""The node's own log: text and JSON, a file and its rotation."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from hastore.config.model import Config, LogConfig, LogFormat
from hastore.errors import ConfigError
from hastore.server.node_log import JsonFormatter, LogFile, NodeLog
from tests.security.conftest import Clock
from tests.server.kit import config_of

log = logging.getLogger("hastore.test")


@pytest.fixture(autouse=True)
def _root() -> Iterator[None]:
    """Let the root logger have the handlers that it had before."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)
        handler.close()


def config(root: pathlib.Path, **settings: object) -> Config:
    changed = LogConfig(**settings)  # type: ignore[arg-type]
    return msgspec.structs.replace(config_of(root), log=changed)


def test_a_line_of_json_has_the_node_and_cannot_be_ended_by_a_message(
    tmp_path: pathlib.Path,
) -> None:
    def line(text: str, *arguments: object, exc_info: Any = None) -> dict[str, object]:
        record = logging.LogRecord("hastore.x", 30, "p", 1, text, arguments, exc_info)
        record.created = 1_800_000_000.1235
        written = JsonFormatter(config_of(tmp_path)).format(record)
        assert written.isascii() and "\n" not in written
        found: dict[str, object] = json.loads(written)
        return found

    found = line("refused: %s", "x\n\u2028\udc80")
    assert found == {
        "time": "2027-01-15T08:00:00.123Z", "level": "WARNING", "logger": "hastore.x",
        "thread": "MainThread", "cluster": "test", "group": "g0", "node": 1,
        "message": "refused: x\n\u2028\udc80",
    }  # fmt: skip
    try:
        raise ValueError("inside")
    except ValueError:
        assert str(line("failed", exc_info=sys.exc_info())["exception"]).endswith("inside")


@pytest.mark.parametrize("format", [LogFormat.TEXT, LogFormat.JSON])
def test_a_file_that_was_moved_away_is_opened_anew(
    tmp_path: pathlib.Path, format: LogFormat
) -> None:
    path, moved = tmp_path / "node.log", tmp_path / "node.log.1"
    node_log = NodeLog("INFO")
    node_log.follow(config(tmp_path, file=str(path), format=format))
    log.error("one")
    path.rename(moved)
    node_log.reopen()
    assert path.read_text() == "", "SIGHUP: whoever compresses the old one may begin"
    log.error("two")
    path.unlink()
    log.error("three")
    assert "one" in moved.read_text() and "two" not in moved.read_text()
    (line,) = path.read_text().splitlines()
    if format is LogFormat.JSON:
        assert json.loads(line)["message"] == "three"
    else:
        assert line.split(" ", 1)[1] == "ERROR three" and line.split()[0].endswith("Z")


@pytest.mark.parametrize("by_signal", [False, True], ids=["a line", "SIGHUP"])
def test_a_log_whose_file_became_a_folder_raises_into_nobody(
    by_signal: bool, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "node.log"
    node_log = NodeLog("INFO")
    node_log.follow(config(tmp_path, file=str(path)))
    path.unlink()
    path.mkdir()
    if by_signal:
        node_log.reopen()
    log.error("a line")
    assert "Is a directory" in capsys.readouterr().err
    path.rmdir()
    log.error("another")
    assert path.read_text().endswith("ERROR another\n")


def test_a_file_that_cannot_be_opened_is_named_with_its_key(tmp_path: pathlib.Path) -> None:
    before = list(logging.getLogger().handlers)
    with pytest.raises(ConfigError, match=r"log\.file: .*none/x cannot be opened: No such file"):
        NodeLog("INFO").follow(config(tmp_path, file=str(tmp_path / "none" / "x")))
    assert set(before) <= set(logging.getLogger().handlers)


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("n", 30, "p", 1, text, arguments, None)


def made(path: pathlib.Path | str, clock: Clock | None = None) -> LogFile:
    return LogFile(str(path), clock or Clock())


def test_a_file_that_cannot_be_written_is_told_once_a_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    handler = made("/dev/full", clock)
    for _ in range(3):
        handler.handle(record("lost %s", "words"))
    clock.pass_ms(60_000)
    handler.handle(record("lost %s", "words"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("/dev/full cannot be written: [Errno 28] No space left")
    assert lines[0].endswith("lost: lost words")
    handler.close()


def no_folder(handler: LogFile, path: pathlib.Path) -> None:
    path.parent.rename(path.parent.with_name("away"))


def a_folder_in_its_place(handler: LogFile, path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def a_file_for_its_folder(handler: LogFile, path: pathlib.Path) -> None:
    no_folder(handler, path)
    path.parent.write_text("")


def a_loop(handler: LogFile, path: pathlib.Path) -> None:
    path.unlink()
    path.symlink_to(path)


def a_bad_descriptor(handler: LogFile, path: pathlib.Path) -> None:
    os.close(handler.stream.fileno())


def refusing(number: int) -> Callable[[LogFile, pathlib.Path], None]:
    """Return what makes the file impossible to open again, as rights and disks do."""

    def fail() -> Any:
        raise OSError(number, os.strerror(number))

    def plant(handler: LogFile, path: pathlib.Path) -> None:
        path.unlink()
        handler._open = fail  # type: ignore[method-assign]

    return plant


def undo(handler: LogFile, path: pathlib.Path) -> None:
    """Let the file be opened again."""
    handler.__dict__.pop("_open", None)
    away = path.parent.with_name("away")
    if away.exists():
        path.parent.unlink(missing_ok=True)
        away.rename(path.parent)
    elif path.is_dir():
        path.rmdir()
    elif path.is_symlink():
        path.unlink()


@pytest.mark.parametrize("by_signal", [False, True], ids=["a line", "SIGHUP"])
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (no_folder, "No such file"),
        (a_folder_in_its_place, "Is a directory"),
        (a_file_for_its_folder, "Not a directory"),
        (a_loop, "Too many levels"),
        (refusing(errno.EACCES), "Permission denied"),
        (refusing(errno.EIO), "Input/output error"),
        (refusing(errno.ENOSPC), "No space left"),
        (refusing(errno.EMFILE), "Too many open files"),
    ],
)
def test_a_file_that_cannot_be_opened_again_ends_nothing(
    plant: Callable[[LogFile, pathlib.Path], None],
    said: str,
    by_signal: bool,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "logs" / "node.log"
    path.parent.mkdir()
    handler = made(path)
    handler.handle(record("before"))
    plant(handler, path)
    for _ in range(3):
        if by_signal:
            handler.reopen()
        else:
            handler.handle(record("meanwhile"))
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"{path} cannot be written: ") and said in told
    undo(handler, path)
    if by_signal:
        handler.reopen()
        assert path.exists(), "SIGHUP opens it at once"
    handler.handle(record("after"))
    assert path.read_text().endswith("after\n") and "meanwhile" not in path.read_text()
    handler.close()


def test_the_next_line_after_a_bad_descriptor_is_written(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "node.log"
    handler = made(path)
    a_bad_descriptor(handler, path)
    handler.handle(record("one"))
    assert "Bad file descriptor" in capsys.readouterr().err
    handler.handle(record("two"))
    assert path.read_text().endswith("two\n")
    handler.close()


def test_what_utf_8_cannot_say_is_escaped(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "node.log"
    handler = made(path)
    handler.handle(record("a name \udc80"))
    assert path.read_text() == "a name \\udc80\n"
    handler.close()


def test_nothing_raises_if_stderr_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        for stderr in (full, None):
            monkeypatch.setattr(sys, "stderr", stderr)
            handler = made("/dev/full")
            handler.handle(record("lost %s", "words"))
            handler.handle(record("%d", "no number"))
            handler.close()
        with contextlib.suppress(OSError):
            full.close()
    closed = open(os.devnull, "w")  # noqa: SIM115 - closed on purpose
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    made("/dev/full").handle(record("x"))
