"""Warnings that strangers can cause are bounded in the log."""

import logging
import sys

from hastore.bounded_log import BoundedLines, LineFormatter
from tests.security.conftest import Clock


def test_a_flood_is_counted_and_told_with_the_next_line(caplog):
    clock = Clock()
    warn = BoundedLines(logging.getLogger("test"), clock=clock, burst=3, every_ms=100.0).write
    for number in range(50):
        warn("refused %s: %d", "a%d", number)
    assert caplog.messages == ["refused a%d: 0", "refused a%d: 1", "refused a%d: 2"]
    caplog.clear()
    clock.pass_ms(100)
    warn("refused %s: %d", "b", 0)
    warn("refused %s: %d", "c", 0)
    assert caplog.messages == ["refused b: 0 (47 other such lines were not logged)"]
    caplog.clear()
    clock.pass_ms(60_000)  # an hour of silence does not pay for more than a burst
    for number in range(9):
        warn("refused %s: %d", "late", number)
    assert caplog.messages == [
        "refused late: 0 (1 other such lines were not logged)",
        "refused late: 1", "refused late: 2",
    ]  # fmt: skip


def test_a_flood_of_one_kind_hides_no_line_of_another(caplog):
    """Who opens many bad connections must not hide that the node cannot accept any more."""
    clock = Clock()
    warn = BoundedLines(logging.getLogger("test"), clock=clock, burst=1, every_ms=100.0).write
    for number in range(50):
        warn("connection from %s ended", number)
    warn("cannot accept: %s; raise the limit of open files", "Too many open files")
    assert caplog.messages == [
        "connection from 0 ended",
        "cannot accept: Too many open files; raise the limit of open files",
    ]


def test_what_a_peer_says_cannot_look_like_another_line():
    def line(text, *arguments, exc_info=None):
        record = logging.LogRecord("n", logging.INFO, "p", 1, text, arguments, exc_info)
        return LineFormatter("%(levelname)s %(message)s").format(record)

    assert line("plain, with umlauts: \u00e4 %d", 1) == "INFO plain, with umlauts: \u00e4 1"
    said = "x\n2026-11-22 CRITICAL forged\r\x1b[31m\u2028\u202e\x9b\x00\udc80"
    assert line("refused: %s", said) == (
        r"INFO refused: x\n2026-11-22 CRITICAL forged\r\x1b[31m\u2028\u202e\x9b\x00\udc80"
    )
    try:
        raise ValueError("inside")
    except ValueError:
        text = line("failed", exc_info=sys.exc_info())
    assert text.startswith("INFO failed\nTraceback") and text.endswith("ValueError: inside")
