"""What errors call the options: as a query of Spark gives them, or as a command's own options.

The jobs of hastore read and write by the same source as a user's query. So their `Names` come with
the options, as one that only they set (`NAMES`), and go to whoever raises an error about one, in
each of Spark's processes.
"""

import enum
from collections.abc import Mapping

from hastore.errors import UsageError

NAMES = "optionNames"
BOOTSTRAP = "hastore.bootstrap.servers"
PATH = "path"
TOPIC = "topic"


class Names(enum.Enum):
    """Who has given the options, and may give others."""

    QUERY = "query"  # of Spark
    COMMAND = "command"  # of `hastore pipeline`, or its job as a function
    LOSING_COMMAND = "losing-command"  # one with --allow-data-loss
    DESTINATION = "destination"  # where a command writes

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Names":
        """Return what the options say. Raises UsageError."""
        text = options.get(NAMES, cls.QUERY.value)
        for one in cls:
            if one.value == text:
                return one
        raise UsageError(f"option {NAMES!r} is for hastore's own jobs; remove it")

    def bare(self, option: str) -> str:
        """Return an option's name: `path` or `--path`."""
        return _OF_COMMANDS[self].get(option, option)

    def said(self, option: str) -> str:
        """Return an option as a text says it: `option 'path'` or `--path`."""
        return _OF_COMMANDS[self].get(option) or f"option {option!r}"

    @property
    def have_waits(self) -> bool:
        """Whether an option says how long to wait for nodes."""
        return self is Names.QUERY

    def without_loss(self, what: str = "read the messages that are available") -> str:
        """Return the remedy for messages that are gone."""
        return self._go_on(what) or "run it again"

    def or_without_loss(self, what: str = "read the messages that are available") -> str:
        """Return what to add to another remedy; "" if messages cannot be left out."""
        remedy = self._go_on(what)
        return f", or {remedy}" if remedy else ""

    def _go_on(self, what: str) -> str:
        if self is Names.QUERY:
            return f"set failOnDataLoss to false to {what}"
        return f"give --allow-data-loss to {what}" if self is Names.LOSING_COMMAND else ""


_READING = {
    PATH: "--path",
    BOOTSTRAP: "--servers",
    "subscribe": "--topic",
    "subscribePattern": "--pattern",
    "startingTimestamp": "--since",
    "endingTimestamp": "--until",
}
_OF_COMMANDS: dict[Names, dict[str, str]] = {
    Names.QUERY: {},
    Names.COMMAND: _READING,
    Names.LOSING_COMMAND: _READING,
    Names.DESTINATION: {BOOTSTRAP: "--to-servers", TOPIC: "--to-topic"},
}
