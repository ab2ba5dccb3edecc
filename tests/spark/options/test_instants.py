"""Times in options: milliseconds, ISO text with a zone, ISO text in the session's zone."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.errors import UsageError
from hastore.spark.options.offsets import parse_instant, to_milliseconds


@pytest.mark.parametrize(
    ("text", "zone", "milliseconds", "in_session_zone"),
    [
        ("1000", None, 1_000, False),
        (" 20261120 ", "UTC", 20_261_120, False),
        ("1970-01-01T00:00:01Z", None, 1_000, False),
        ("1970-01-01 01:00:01.5+01:00", "Asia/Tokyo", 1_500, False),
        ("1970-01-02", "UTC", 86_400_000, True),
        ("1970-01-01T09:00:00.0001", "Asia/Tokyo", 1, True),
        ("1970-01-01T03:30", "+03:30", 0, True),
        ("1970-01-01T01:00", "GMT+1", 0, True),
        ("1969-12-31T23:59:59Z", None, 0, False),
        # As in Spark: of an hour that occurs twice the earlier, for a skipped hour the next.
        ("2026-10-25T02:30", "Europe/Berlin", 1_792_888_200_000, True),
        ("2026-03-29T02:30", "Europe/Berlin", 1_774_747_800_000, True),
    ],
)
def test_instants(text, zone, milliseconds, in_session_zone):
    found = parse_instant("option 'startingTimestamp'", text, zone)
    assert found == (milliseconds, in_session_zone)


@pytest.mark.parametrize(
    ("text", "zone", "reason"),
    [
        ("yesterday", "UTC", "option 'startingTimestamp': Expected milliseconds since 1970 or ISO"),
        ("-1", "UTC", "Expected milliseconds"),
        ("", "UTC", "Expected milliseconds"),
        ("2026-11-20T21:52", None, "add one, such as 2026-11-20T21:52Z"),
        ("2026-11-20T21:52", "Mars/Base", "does not know the session's time zone 'Mars/Base'"),
    ],
)
def test_what_is_no_instant(text, zone, reason):
    with pytest.raises(UsageError, match=reason):
        parse_instant("option 'startingTimestamp'", text, zone)


@given(st.integers(0, 10**15), st.integers(0, 10**12))
def test_a_message_is_in_the_range_if_it_was_stored_at_the_moment_or_later(microseconds, stored_ms):
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    limit = to_milliseconds(epoch + timedelta(microseconds=microseconds))
    assert (stored_ms >= limit) == (stored_ms * 1_000 >= microseconds)
