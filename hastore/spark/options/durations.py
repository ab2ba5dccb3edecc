"""Options that are durations, and how long a query waits for nodes. Pure.

    retryTimeout       of a read: how long a query that runs waits for an answer of any node
    deliveryTimeout    of a write: how long a row waits for its confirmation

Without the options both are 15 minutes: longer than a planned restart of a group takes, so that it
does not end a query, and short enough that somebody hears of a group that does not come back. An
address that has never answered is more likely wrong than restarting. So a query that begins waits
FIRST_ANSWER_S for a first answer, unless its option says otherwise.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hastore.errors import UsageError

RETRY_TIMEOUT = "retryTimeout"
DELIVERY_TIMEOUT = "deliveryTimeout"
FIRST_ANSWER_S = 30.0
DEFAULT_S = 900.0
_UNITS_S = {
    **{"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0},
    "": 1e-3,  # Spark takes a number without a unit as milliseconds
}


@dataclass(frozen=True)
class Patience:
    """How long to wait for nodes: for the first answer of any, and for later ones, in seconds.

    `option` is the option that sets it, for errors.
    """

    first_s: float = FIRST_ANSWER_S
    later_s: float = DEFAULT_S
    option: str = RETRY_TIMEOUT


DEFAULT_PATIENCE = Patience()


def parse_duration(name: str, text: str) -> float:
    """Return a duration in seconds, from Spark's form of it, such as 15m or 500ms."""
    found = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", text.strip().lower(), re.ASCII)
    unit = _UNITS_S.get(found[2]) if found else None
    if found is None or unit is None:
        raise UsageError(f"option {name!r} is {text!r}; use a duration such as 500ms, 30s or 15m")
    return int(found[1]) * unit


def parse_patience(options: Mapping[str, str], *names: str) -> Patience:
    """Return how long to wait, by the first of the options `names` that is given.

    Raises UsageError for a duration that is none, or 0.
    """
    for name in names:
        if name in options:
            seconds = parse_duration(name, options[name])
            if seconds <= 0.0:
                raise UsageError(
                    f"option {name!r} is {options[name]!r}; use a time above 0, such as 30s or "
                    "15m; a number alone is milliseconds"
                )
            return Patience(seconds, seconds, name)
    return Patience(option=names[0])
