"""The node's own log: text and JSON, a file and its rotation."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import sys
from collections.abc import Iterator
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


def test_a_file_that_cannot_be_opened_is_named_with_its_key(tmp_path: pathlib.Path) -> None:
    before = list(logging.getLogger().handlers)
    with pytest.raises(ConfigError, match=r"log\.file: .*none/x cannot be opened: No such file"):
        NodeLog("INFO").follow(config(tmp_path, file=str(tmp_path / "none" / "x")))
    assert set(before) <= set(logging.getLogger().handlers)


def test_a_file_that_cannot_be_written_is_told_once_a_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    handler = LogFile("/dev/full", clock)  # type: ignore[no-untyped-call]
    record = logging.LogRecord("n", 30, "p", 1, "lost %s", ("words",), None)
    for _ in range(3):
        handler.emit(record)
    clock.pass_ms(60_000)
    handler.emit(record)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("/dev/full cannot be written: [Errno 28] No space left")
    with contextlib.suppress(OSError):  # nothing can be written at the end either
        handler.stream.close()
    handler.stream = None
