"""Messages as text: the template of `consume --format`, and the JSON that `produce` takes."""

from __future__ import annotations

import base64
import binascii
import datetime
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hastore.client.messages import Message
from hastore.client.producer.preparer import plain_properties
from hastore.errors import UsageError

Part = bytes | Callable[[Message, bytes], bytes]
_ESCAPES = {"\\n": b"\n", "\\t": b"\t", "\\0": b"\0", "\\\\": b"\\", "%%": b"%"}
_TOKEN = re.compile(r"%.|\\.|[^%\\]+|.", re.DOTALL)


def _time(ms: int) -> bytes:
    try:
        moment = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    except (OverflowError, ValueError, OSError):  # no date
        return str(ms).encode()
    return (moment.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z").encode()


_FIELDS: dict[str, Callable[[Message, bytes], bytes]] = {
    "%t": lambda one, body: one.topic.encode(),
    "%q": lambda one, body: str(one.queue_id).encode(),
    "%o": lambda one, body: str(one.queue_offset).encode(),
    "%k": lambda one, body: (one.key or "").encode(),
    "%g": lambda one, body: (one.tags or "").encode(),
    "%b": lambda one, body: body,
    "%S": lambda one, body: str(len(body)).encode(),
    "%i": lambda one, body: one.message_id.encode(),
    "%s": lambda one, body: _time(one.store_timestamp_ms),
    "%d": lambda one, body: _time(one.born_timestamp_ms),
    "%p": lambda one, body: json.dumps(one.properties).encode(),
}
FORMAT_HELP = (
    "How to print a message: %t topic, %q queue, %o queue offset, %k key, %g tags, %b body, %S its "
    "bytes, %i id, %s time stored, %d time born, %p properties, \\n, \\t."
)


class Template:
    """A text with places for a message's fields."""

    def __init__(self, text: str) -> None:
        """Parse it; raises UsageError for an unknown place."""
        self._parts: list[Part] = []
        for token in _TOKEN.findall(text):
            if token in _FIELDS:
                self._parts.append(_FIELDS[token])
            elif token in _ESCAPES:
                self._parts.append(_ESCAPES[token])
            elif token[0] in "%\\":
                known = " ".join([*_FIELDS, *_ESCAPES])
                raise UsageError(f"--format: {token!r} is unknown; known are {known}")
            else:
                self._parts.append(token.encode())

    def fill(self, message: Message, body: bytes) -> bytes:
        """Return the text for a message; `body` is its body, decompressed or not."""
        return b"".join(
            part if isinstance(part, bytes) else part(message, body) for part in self._parts
        )


def has_key(message: Message, key: str) -> bool:
    """Whether a message has this key: RocketMQ's clients put several into one, with blanks."""
    return message.key is not None and (message.key == key or key in message.key.split())


class GivenMessage(NamedTuple):
    """A message to send, as a line gives it."""

    body: bytes
    options: dict[str, Any]  # for Producer.send


def parse_keyed(line: bytes, separator: bytes) -> GivenMessage:
    """Return the key before the separator, and the body after it; raises UsageError."""
    key, found, body = line.partition(separator)
    if not found:
        raise UsageError(
            "the line has no key: --key-separator does not occur in it; correct one of the two"
        )
    return GivenMessage(body, {"key": key or None})


def parse_json(line: bytes, *, keep_queues: bool) -> GivenMessage:
    """Return the message of an object as `consume --json` prints it; raises UsageError.

    `body` or `body_base64` is needed; `key`, `tags`, `properties`, `delay_level` and, with
    `keep_queues`, `queue_id` count. What hastore sets itself is left out of the properties.
    """
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as failure:
        raise UsageError(f"the line is no JSON: {failure}; write one object a line") from failure
    if not isinstance(given, dict):
        raise UsageError("the line is no JSON object; write one object a line")
    if "body_error" in given:
        raise UsageError(f"its body is not readable: {given['body_error']}; leave this line out")
    properties = given.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise UsageError("properties: it must be an object")
    options: dict[str, Any] = {"properties": plain_properties(properties)}
    for name, kinds in (("key", str), ("tags", str), ("delay_level", int)):
        value = given.get(name)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise UsageError(
                f"{name}: {value!r} is not a {kinds.__name__}; correct it, or leave {name} out"
            )
        options[name] = value
    if keep_queues:
        queue = given.get("queue_id")
        if not isinstance(queue, int) or isinstance(queue, bool):
            raise UsageError(
                f"queue_id: {queue!r} is not an int, and --keep-queues needs it; give one in each "
                "line"
            )
        options["queue"] = queue
    return GivenMessage(_body_of(given), options)


def _body_of(given: Mapping[str, Any]) -> bytes:
    body, encoded = given.get("body"), given.get("body_base64")
    if isinstance(body, str) and encoded is None:
        try:
            return body.encode()
        except UnicodeEncodeError as failure:
            raise UsageError(f"body: {failure}; give body_base64") from failure
    if body is None and isinstance(encoded, str):
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as failure:
            raise UsageError(f"body_base64: {failure}; give base64, or body") from failure
    raise UsageError("give body as a string, or body_base64")
