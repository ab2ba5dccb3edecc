"""Show something again and again, until Ctrl-C: `--watch` of commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

from hastore.cli import common
from hastore.cli.common import DONE, Decorator, Seconds

EVERY_S = 2.0
_CLEAR = "\x1b[H\x1b[2J"  # the cursor to the top, the screen empty


with_watch: Decorator = click.option(
    "--watch",
    "every_s",
    type=Seconds(),
    is_flag=False,
    flag_value=str(EVERY_S),
    metavar="[SECONDS]",
    help=f"Show it again every so many seconds ({EVERY_S:g}), until Ctrl-C.",
)


def watch(show: Callable[[], object], every_s: float) -> int:
    """Call `show`, which prints a frame on stdout, every `every_s` seconds until Ctrl-C.

    On a terminal each frame replaces the one before, in one write, so that nothing flickers. In a
    pipe the frames follow each other.
    """
    console = common.stdout
    try:
        while True:
            if console.is_terminal:
                with console.capture() as frame:
                    show()
                sys.stdout.write(_CLEAR + frame.get())
            else:
                show()
            sys.stdout.flush()
            pause(every_s)
    except KeyboardInterrupt:
        return DONE


def pause(seconds: float) -> None:
    """Wait until the next frame."""
    time.sleep(seconds)
