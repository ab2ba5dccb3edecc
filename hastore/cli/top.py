"""`hastore top`: a live view of a group: roles, offsets, lags, rates, clients, consumer groups."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from hastore.cli import common
from hastore.cli.common import (
    DONE,
    FAILED,
    Seconds,
    print_error,
    print_json,
    print_text,
    terminal_columns,
    with_bootstrap,
    with_json,
)
from hastore.cli.groups import Place as GroupPlace
from hastore.cli.status import Place, look_at, place_of, with_file
from hastore.cli.top_frame import Look, Reading, frame, lines
from hastore.client.consumer.positions_client import Positions
from hastore.errors import HastoreError, UsageError

EVERY_S = 2.0
GROUPS_EVERY_S = 5.0  # consumer groups and messages: this asks for all topics


class Viewer:
    """Looks at the nodes again and again, and keeps what was before, for the rates."""

    def __init__(
        self, place: Place, timeout_s: float, groups_every_s: float | None = GROUPS_EVERY_S
    ) -> None:
        """Look at nothing yet; without `groups_every_s` at no consumer groups."""
        self._place = place
        self._timeout_s = timeout_s
        self._groups_every_s = groups_every_s
        self._looks: list[Look] = []  # the last two
        self._readings: list[Reading] = []  # the last two

    def look(self) -> int:
        """Look once more; return the exit code for what there is to see."""
        at_s = time.monotonic()
        try:
            found = look_at(self._place, self._timeout_s)
            now = Look(at_s, found.groups, found.errors, found.code)
        except HastoreError as failure:
            now = Look(at_s, [], [str(failure)], FAILED)
        self._looks = [*self._looks[-1:], now]
        every_s, last = self._groups_every_s, self._readings[-1:]
        if every_s is not None and now.groups and (
            not last or at_s - last[0].at_s >= every_s
        ):  # fmt: skip
            self._readings = [*last, read_groups(self._place, self._timeout_s, at_s)]
        return now.code

    def shown(self) -> dict[str, Any]:
        """Return the numbers of the frame after the last look."""
        before, now = [None, *self._looks][-2:]
        assert now is not None, "look first"
        read_before, read = [None, None, *self._readings][-2:]
        return frame(before, now, read_before, read)


def read_groups(place: Place, timeout_s: float, at_s: float) -> Reading:
    """Return how many messages the topics have had, and how far each consumer group is behind.

    Positions in queues that the log does not have any more do not count.
    """
    try:
        with Positions(place.addresses, timeout_s=timeout_s, security=place.security) as positions:
            committed = positions.all()
        with place.admin(timeout_s) as admin:  # after: no position is beyond its queue's end
            ranges = admin.topics()
    except HastoreError as failure:
        return Reading(at_s, 0, {}, f"consumer groups: {failure}")
    messages = sum(end for queues in ranges.values() for _, end in queues.values())
    lags: dict[str, int] = {}
    for (group, topic), offsets in committed.items():
        queues = ranges.get(topic, {})
        lag = sum(
            GroupPlace(topic, n, at, *queues[n]).lag for n, at in offsets.items() if n in queues
        )
        lags[group] = lags.get(group, 0) + lag
    return Reading(at_s, messages, lags)


@click.command("top", short_help="Watch a group: offsets, lags, rates, clients, groups.")
@click.option(
    "--every", "every_s", type=Seconds(), default=EVERY_S, show_default=True, metavar="SECONDS",
    help="How often to look.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=Seconds(), default=2.0, show_default=True, metavar="SECONDS",
    help="How long to wait for each answer.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Print one frame, with rates over --every, and end.")
@click.option("--no-groups", is_flag=True, help="Leave consumer groups and messages out.")
@with_file
@with_bootstrap
@with_json
def top_command(
    every_s: float,
    timeout_s: float,
    once: bool,
    no_groups: bool,
    path: str | None,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Watch a group: roles, offsets, lags of slaves and consumer groups, rates, waiting puts.

    `open` is what is not confirmed yet, `clients` how many are connected. A node that does not
    answer has a row that says so. q or Ctrl-C ends it. With --once the exit code is that of
    `hastore status`.
    """
    place = place_of(path, bootstrap)
    if once:
        viewer = Viewer(place, timeout_s, None if no_groups else 0.0)
        viewer.look()
        _pause(every_s)
        code = viewer.look()
        _print_frame(viewer, as_json)
        return code
    viewer = Viewer(place, timeout_s, None if no_groups else GROUPS_EVERY_S)
    if as_json:
        return _follow(viewer, every_s)
    if not common.stdout.is_terminal:
        raise UsageError("hastore top: stdout is no terminal; give --once, or --json")
    with _keys() as wait_for_quit:
        _live(viewer, every_s, wait_for_quit)
    return DONE


def _print_frame(viewer: Viewer, as_json: bool) -> None:
    if as_json:
        print_json(viewer.shown())
        return
    shown = viewer.shown()
    for text in shown["errors"]:
        print_error(text)
    for text, style in lines({**shown, "errors": []}, terminal_columns()):
        print_text(text, style)


def _follow(viewer: Viewer, every_s: float) -> int:
    """Print a frame as one object after each look, until Ctrl-C."""
    try:
        while True:
            viewer.look()
            print_json(viewer.shown())
            _pause(every_s)
    except KeyboardInterrupt:
        return DONE


def _live(viewer: Viewer, every_s: float, wait_for_quit: Callable[[float], bool]) -> None:
    """Draw frames on the whole screen until `wait_for_quit(seconds)`, or Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    console = common.stdout
    with contextlib.suppress(KeyboardInterrupt), Live(
        Text("looking ..."), console=console, screen=True, auto_refresh=False
    ) as live:  # fmt: skip
        while True:
            viewer.look()
            title = f"hastore top  {time.strftime('%H:%M:%S')}  every {every_s:g} s, q ends"
            drawn = lines(viewer.shown(), console.width, title=title)[: console.height]
            screen = Text(no_wrap=True)
            for at, (text, style) in enumerate(drawn):
                screen.append(("\n" if at else "") + text, style=style)
            live.update(screen, refresh=True)
            if wait_for_quit(every_s):
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Lend a function that waits so many seconds, and returns whether q was typed meanwhile.

    Without a terminal at stdin it only waits.
    """
    if not sys.stdin.isatty():
        yield _pause
        return
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield lambda seconds: quit_typed(stdin, seconds)
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def quit_typed(descriptor: int, seconds: float) -> bool:
    """Wait for keys up to so many seconds; return at once whether one of them is q, or the end."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        ready, _, _ = select.select([descriptor], [], [], max(0.0, left))
        if not ready:
            return False
        typed = os.read(descriptor, 64)
        if not typed or b"q" in typed.lower():
            return True
