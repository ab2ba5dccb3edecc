"""Checks the arguments of the clients' constructors and methods, before anything is sent.

Without these checks, a node would get a malformed request and close the connection, and the caller
would take the node for unreachable. A refused argument raises UsageError, which names the argument,
the given value and the accepted values. `SendOptions` has the checked arguments of a producer.
"""

from __future__ import annotations

import datetime
import math
import operator
import reprlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hastore.clock import Clock
from hastore.errors import UsageError
from hastore.protocol.api import MAX_MESSAGE_BYTES, WINDOW
from hastore.record.compression import ALGORITHMS, check_algorithm

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_NAME = 32_767  # characters of a topic or a key in the protocol
LONGEST_S = 2_000_000.0  # 23 days; epoll_wait takes at most 2**31 - 1 ms
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MS = datetime.timedelta(milliseconds=1)
_shorter = reprlib.Repr()
_shorter.maxstring = _shorter.maxother = _shorter.maxlong = 60


def refusal(name: str, given: object, expected: str) -> UsageError:
    """Return the error for a refused argument."""
    kind = type(given).__name__
    return UsageError(f"{name}: expected {expected}, got {_shorter.repr(given)} ({kind})")


def text(name: str, given: object, most: int = MAX_NAME) -> str:
    """Return a str of 1 to `most` characters that UTF-8 can encode; raises UsageError."""
    found = plain_text(given)
    if found is None or not 1 <= len(found) <= most or not _is_utf8(found):
        raise refusal(name, given, f"a str of 1 to {most:,} characters without lone surrogates")
    return found


def plain_text(given: object) -> str | None:
    """Return the plain str of a str or of an instance of a subclass; None for anything else."""
    if type(given) is str:
        return given
    return str.__str__(given) if isinstance(given, str) else None


def value_text(name: str, given: object, expected: str = "a str") -> str:
    """Return the text of a message's property; raises UsageError for other types.

    Surrogates are accepted: the client decodes bytes that are not UTF-8 to them, so a property that
    it has read can be put again.
    """
    found = plain_text(given)
    if found is not None and (found.isascii() or _is_utf8(found, "surrogateescape")):
        return found
    raise refusal(name, given, expected)


def utf8_text(name: str, given: object, expected: str) -> str:
    """Return a str that UTF-8 can encode, which may be empty; raises UsageError."""
    found = plain_text(given)
    if found is None or not _is_utf8(found):
        raise refusal(name, given, expected)
    return found


def key_text(name: str, given: object) -> str:
    """Return a key: a str, or bytes that are UTF-8; raises UsageError."""
    expected = "a str, or bytes of UTF-8"
    if isinstance(given, bytes | bytearray | memoryview):
        try:
            return bytes(given).decode()
        except ValueError as failure:  # not UTF-8, or a memoryview that was released
            raise refusal(name, given, expected) from failure
    return value_text(name, given, expected)


def queue_of_key(key: str, queues: int) -> int:
    """Return the queue of messages with this key, of a topic with so many queues."""
    return zlib.crc32(key.encode("utf-8", "surrogateescape")) % queues


def integer(name: str, given: object, low: int, high: int) -> int:
    """Return an int (or an object with `__index__`) from `low` to `high`; raises UsageError."""
    found: int | None = None
    if not isinstance(given, bool):
        try:
            found = operator.index(given)  # type: ignore[arg-type]
        except TypeError:
            found = None
    if found is None or not low <= found <= high:
        raise refusal(name, given, f"an int from {low:,} to {high:,}")
    return found


def number(name: str, given: object, *, positive: bool = False) -> float:
    """Return a number that is >= 0, or > 0 if `positive`; raises UsageError for others and NaN.

    A great one becomes 23 days in ms, also an int that no float can hold.
    """
    expected = "a positive number" if positive else "a number, 0 or more"
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise refusal(name, given, expected)
    is_nan = isinstance(given, float) and math.isnan(given)
    if is_nan or given < 0 or (positive and given == 0):
        raise refusal(name, given, expected)
    return min(given, LONGEST_S * 1000.0)


def seconds(name: str, given: object, *, positive: bool = False) -> float:
    """Return a time in seconds; longer times than 23 days become 23 days. Raises UsageError."""
    return min(number(name, given, positive=positive), LONGEST_S)


def waiting_time(name: str, given: object) -> float:
    """Return how many seconds a call waits; a negative number counts as 0. Raises UsageError."""
    if isinstance(given, int | float) and not isinstance(given, bool) and given < 0:
        return 0.0
    return seconds(name, given)


def waiting_limit(name: str, given: object) -> float | None:
    """Return how many seconds a call waits, None for no limit; raises UsageError."""
    return None if given is None else waiting_time(name, given)


def flag(name: str, given: object) -> bool:
    """Return a bool; raises UsageError for other types."""
    if not isinstance(given, bool):
        raise refusal(name, given, "True or False")
    return given


def one_of(name: str, given: object, known: Iterable[str]) -> str:
    """Return one of the known words; raises UsageError for others."""
    words = list(known)
    if not isinstance(given, str) or given not in words:
        raise refusal(name, given, "one of " + ", ".join(f'"{word}"' for word in words))
    return given


def moment_ms(name: str, given: object, *, round_up: bool) -> int:
    """Return a point in time as ms since 1970; raises UsageError.

    The caller gives an int of ms, or a datetime with a time zone. A datetime is rounded to whole
    ms: up with `round_up`, else down.
    """
    expected = "an int of ms since 1970 (UTC), from 0, or a datetime with a time zone"
    if isinstance(given, datetime.datetime):
        if given.utcoffset() is None:
            raise refusal(name, given, expected + " (datetime.now(timezone.utc))")
        since = given - _EPOCH
        found = -(-since // _MS) if round_up else since // _MS
        if found < 0:
            raise refusal(name, given, expected)
        return found
    try:
        return integer(name, given, 0, MAX_INT64)
    except UsageError as failure:
        raise refusal(name, given, expected) from failure


def queue_ids(name: str, given: object) -> tuple[int, ...] | None:
    """Return the queue ids without duplicates, None for all queues; raises UsageError."""
    if given is None:
        return None
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise refusal(name, given, "a list of queue ids, or None for all")
    found = [integer(f"{name}[{place}]", each, 0, MAX_INT32) for place, each in enumerate(given)]
    if not found:
        raise refusal(name, given, "a list of one queue id or more, or None for all")
    return tuple(dict.fromkeys(found))


def check_clock(name: str, given: object) -> None:
    """Raise UsageError for an object that is not a Clock."""
    if not all(callable(getattr(given, each, None)) for each in ("monotonic_ms", "wall_ms")):
        raise refusal(name, given, f"a {Clock.__module__}.{Clock.__name__}")


def _is_utf8(found: str, errors: str = "strict") -> bool:
    try:
        found.encode("utf-8", errors)
    except UnicodeEncodeError:
        return False
    return True


Acks = Literal[0, 1, "all"] | None
_ACKS = {None: None, 0: 0, 1: 1, "all": -1}  # the codes of the protocol
BATCH_BYTES = 256 * 1024
Compression = Literal["lz4", "zstd", "zlib"] | None
COMPRESSION_THRESHOLD = 4096  # bytes, as RocketMQ's compressMsgBodyOverHowmuch


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How a producer sends; times in ms."""

    acks: int | None
    sync_flush: bool
    linger_ms: float
    batch_bytes: int
    max_in_flight: int
    delivery_timeout_ms: float
    idempotent: bool
    compression: str | None = None
    compression_threshold: int = COMPRESSION_THRESHOLD  # bytes of a body
    # A message that may move to another group, and is certainly not stored here, ends after this
    # time without a master; None: none moves.
    leave_ms: float | None = None


def make_options(
    acks: Acks,
    sync_flush: bool,
    linger_ms: float,
    batch_bytes: int,
    max_in_flight: int,
    delivery_timeout_s: float,
    idempotent: bool,
    compression: Compression = None,
    compression_threshold: int = COMPRESSION_THRESHOLD,
) -> SendOptions:
    """Check the arguments and return the options; raises UsageError."""
    if type(acks) not in (int, str, type(None)) or acks not in _ACKS:
        raise refusal("acks", acks, '0, 1, "all" or None')
    linger = number("linger_ms", linger_ms)
    delivery_timeout_ms = seconds("delivery_timeout_s", delivery_timeout_s, positive=True) * 1000.0
    if linger >= delivery_timeout_ms:  # it would end unsent, unless others fill its frame
        limit = f"less than delivery_timeout_s, {delivery_timeout_ms / 1000.0:g} s"
        raise refusal("linger_ms", linger_ms, f"a number of ms, {limit}")
    return SendOptions(
        _ACKS[acks],
        flag("sync_flush", sync_flush),
        linger,
        integer("batch_bytes", batch_bytes, 1, MAX_MESSAGE_BYTES),
        integer("max_in_flight", max_in_flight, 1, WINDOW),
        delivery_timeout_ms,
        flag("idempotent", idempotent),
        _compression("compression", compression),
        integer("compression_threshold", compression_threshold, 0, MAX_MESSAGE_BYTES),
    )


def _compression(name: str, given: object) -> str | None:
    """Return an algorithm whose library is there; raises UsageError."""
    if given is None:
        return None
    found = one_of(name, given, ALGORITHMS)
    check_algorithm(found)
    return found
