"""How a producer sends: the checked arguments of its constructor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hastore.client.arguments import flag, integer, number, refusal, seconds
from hastore.protocol.api import MAX_MESSAGE_BYTES, WINDOW

Acks = Literal[0, 1, "all"] | None
_ACKS = {None: None, 0: 0, 1: 1, "all": -1}  # the codes of the protocol
BATCH_BYTES = 256 * 1024


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


def make_options(
    acks: Acks,
    sync_flush: bool,
    linger_ms: float,
    batch_bytes: int,
    max_in_flight: int,
    delivery_timeout_s: float,
    idempotent: bool,
) -> SendOptions:
    """Check the arguments and return the options; raises UsageError."""
    if type(acks) not in (int, str, type(None)) or acks not in _ACKS:
        raise refusal("acks", acks, '0, 1, "all" or None')
    return SendOptions(
        _ACKS[acks],
        flag("sync_flush", sync_flush),
        number("linger_ms", linger_ms),
        integer("batch_bytes", batch_bytes, 1, MAX_MESSAGE_BYTES),
        integer("max_in_flight", max_in_flight, 1, WINDOW),
        seconds("delivery_timeout_s", delivery_timeout_s, positive=True) * 1000.0,
        flag("idempotent", idempotent),
    )
