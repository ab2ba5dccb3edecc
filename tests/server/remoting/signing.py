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
