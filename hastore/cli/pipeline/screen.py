"""Show a job's progress on stderr: a bar on a terminal, a line at intervals elsewhere."""

import time
from typing import TYPE_CHECKING

from hastore.cli.common import print_note, progress_bar, stderr

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

LINE_EVERY_S = 30.0


class Screen:
    """A `hastore.pipeline.progress.Progress` that people see."""

    def __init__(self) -> None:
        self.kept = "nothing was done"  # what remains if the job is stopped now
        self._is_terminal = stderr.is_terminal
        self._bars: Bars = progress_bar()
        self._task: TaskID | None = None
        self._text, self._unit = "", ""
        self._total: int | None = None
        self._done = 0
        self._next_line_s = time.monotonic() + LINE_EVERY_S

    def __enter__(self) -> "Screen":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, text: str, total: int | None, unit: str) -> None:
        """Begin a step; it replaces the bar of the one before."""
        self._text, self._total, self._unit, self._done = text, total, unit, 0
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(text, total=total, note=unit)
        self._print_line()

    def advance(self, amount: int) -> None:
        """Count units of the step as done."""
        self._done += amount
        if self._task is not None:
            self._bars.advance(self._task, amount)
        self._print_line()

    def keep(self, text: str) -> None:
        """Remember what a stop leaves."""
        self.kept = text

    def _print_line(self) -> None:
        now_s = time.monotonic()
        if self._is_terminal or now_s < self._next_line_s:
            return
        self._next_line_s = now_s + LINE_EVERY_S
        if self._total is None and not self._done:
            print_note(self._text)  # a step without a count
            return
        total = "" if self._total is None else f" of {self._total:,}"
        print_note(f"{self._text}: {self._done:,}{total} {self._unit}".rstrip())
