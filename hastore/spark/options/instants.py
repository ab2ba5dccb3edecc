"""Parse the instants of `startingTimestamp` and `endingTimestamp`. Pure.

Digits alone are milliseconds since 1970, as in Kafka. Everything else is ISO 8601 text, with a time
zone or in that of the session.
"""

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from hastore.errors import UsageError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECONDS = re.compile(r"[0-9]{1,18}")
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])([0-9]{1,2})(?::?([0-5][0-9]))?")


class Instant(NamedTuple):
    """A parsed instant; `in_session_zone` is true if the text named no time zone."""

    timestamp_ms: int
    in_session_zone: bool


def parse_instant(option: str, text: str, session_zone: str | None) -> Instant:
    """Parse milliseconds or ISO 8601 text.

    Raises UsageError, also if the text has no time zone and the session's is not known.
    """
    text = text.strip()
    if _MILLISECONDS.fullmatch(text):
        return Instant(int(text), False)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"option {option!r}: Expected milliseconds since 1970 or ISO 8601 text such as "
            f"2026-11-20T21:52:00+01:00, got {text}"
        ) from error
    if moment.tzinfo is not None:
        return Instant(to_milliseconds(moment), False)
    if session_zone is None:
        raise UsageError(
            f"option {option!r}: {text} has no time zone; add one, such as {text}Z, or call "
            "hastore.spark.register(spark) first: then the session's zone counts (not with Spark "
            "Connect)"
        )
    return Instant(to_milliseconds(moment.replace(tzinfo=find_zone(session_zone))), True)


def to_milliseconds(moment: datetime) -> int:
    """Return milliseconds since 1970, rounded up, and 0 for earlier moments.

    Rounding up is exact: a message was stored at `moment` or later if and only if its time in
    milliseconds reaches the result.
    """
    return max(0, -((_EPOCH - moment) // timedelta(milliseconds=1)))


def find_zone(name: str) -> tzinfo:
    """Return the time zone of one of Spark's names: `Europe/Berlin`, `Z`, `+01:00`, `UTC+1`.

    Raises UsageError for a name that this machine does not know.
    """
    if name in ("Z", "UTC", "GMT", "UT"):
        return UTC
    match = _OFFSET.fullmatch(name)
    if match and int(match[2]) <= 18:
        distance = timedelta(hours=int(match[2]), minutes=int(match[3] or 0))
        return timezone(distance if match[1] == "+" else -distance)
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(
            f"this machine does not know the session's time zone {name!r}; write times with an "
            "offset, such as 2026-11-20T21:52:00+01:00"
        ) from error
