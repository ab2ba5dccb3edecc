"""The signatures of RocketMQ's clients (its ACL 1.0): HMAC-SHA1 over a request. Pure.

    AccessKey      the name of the identity
    Signature      base64 of HMAC-SHA1(secret, values + body)
    values         the values of all fields but Signature, in the order of their names, without
                   names and without separators; AccessKey is one of them

So Java's clients sign, 4.9.8 and 5.3.3 (AclClientRPCHook), and those of Go. The signature covers
neither the request's code, its number and its flags, nor the names of its fields; nothing in it is
fresh.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping, Sequence

ACCESS_KEY, SIGNATURE, TOKEN = "AccessKey", "Signature", "SecurityToken"
SIGNATURE_BYTES = 28  # 20 bytes in base64
_COPIED_BYTES = 64 * 1024  # a longer body is not copied
_MOCK = b"no identity has this secret"


def sign(secret: str, fields: Mapping[str, str], body: bytes) -> str:
    """Return the signature of a request; `fields` have AccessKey already.

    Raises UnicodeEncodeError for a field that is not Unicode.
    """
    return _sign(secret.encode(), _values(fields), body).decode()


def signer(
    secrets: Sequence[str], fields: Mapping[str, str], body: bytes, given: str
) -> str | None:
    """Return which of the secrets has made a signature, None if none has.

    It takes the same time whether there is a secret, and whether it is the right one.
    """
    try:
        values, wanted = _values(fields), given.encode()
    except UnicodeEncodeError:
        return None
    found = None
    for secret in secrets:
        if hmac.compare_digest(_sign(secret.encode(), values, body), wanted):
            found = secret
    if not secrets:
        hmac.compare_digest(_sign(_MOCK, values, body), wanted)
    return found


def _values(fields: Mapping[str, str]) -> bytes:
    names = sorted(fields)
    if not "".join(names).isascii():  # Java sorts by UTF-16 units
        names.sort(key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    return "".join([fields[name] for name in names if name != SIGNATURE]).encode()


def _sign(secret: bytes, values: bytes, body: bytes) -> bytes:
    if len(body) <= _COPIED_BYTES:
        digest = hmac.digest(secret, values + body, "sha1")
    else:
        state = hmac.new(secret, values, "sha1")
        state.update(body)
        digest = state.digest()
    return base64.b64encode(digest)
