"""Signs requests as RocketMQ's clients do; written apart from the product's own code."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping


def signed(
    name: str, secret: str, fields: Mapping[str, str] | None = None, body: bytes = b""
) -> dict[str, str]:
    """Return the fields of a request with those that prove who sends it."""
    given = {**(fields or {}), "AccessKey": name}
    text = "".join(value for _, value in sorted(given.items()))
    digest = hmac.new(secret.encode(), text.encode() + body, hashlib.sha1).digest()
    return {**given, "Signature": base64.b64encode(digest).decode()}


def send_fields(topic: str, properties: str = "WAIT\x01false\x02") -> dict[str, str]:
    """Return the fields of a send (310); by default of one that waits for the master alone."""
    return {
        "a": "group", "b": topic, "c": "TBW102", "d": "4", "e": "0", "f": "0",
        "g": "1700000000123", "h": "0", "i": properties, "j": "0",
    }  # fmt: skip
