"""How a job reports what it does; the commands show it as a bar or as lines.

The commands import this without pyspark.
"""

from typing import Protocol


class Progress(Protocol):
    """What a job calls while it runs, from its own thread only."""

    def begin(self, text: str, total: int | None, unit: str) -> None:
        """Begin a step of `total` units (None: unknown), such as messages; it ends the one before.

        `text` names the step: "export 2 of 7".
        """
        ...

    def advance(self, amount: int) -> None:
        """Count units of the step as done."""
        ...

    def keep(self, text: str) -> None:
        """Say what remains when the job is stopped now, such as "1,200 messages are exported".

        The command prints the last text after Ctrl-C, followed by the advice to run it again.
        """
        ...


class NoProgress:
    """Shows nothing: for callers without a screen, such as notebooks and tests."""

    def begin(self, text: str, total: int | None, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int) -> None:
        """Do nothing."""

    def keep(self, text: str) -> None:
        """Do nothing."""
