"""The client API's header frames: requests, and the replies of nodes."""

from __future__ import annotations

from typing import Any

import msgspec

from hastore.errors import ProtocolError
from hastore.protocol import api
from hastore.protocol.api import decode_reply, decode_request, encode, is_anothers, own_prefix
from tests.fuzz import kit

REACHES = (decode_request, decode_reply, encode, is_anothers)
LEAST = kit.Least(0.5, 2)
_KINDS = {"n": None, "i": 1, "s": "name", "b": b"bytes"}


def _value(kind: object) -> object:
    """Return a value for a field, as simple as its type allows."""
    found = msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind
    inspect = msgspec.inspect
    if isinstance(found, inspect.UnionType):
        return _value(found.types[0])
    if isinstance(found, inspect.IntType):
        return found.ge if found.ge is not None else 1
    if isinstance(found, inspect.StrType):
        return "n" * max(1, found.min_length or 1)
    if isinstance(found, inspect.BytesType):
        return b"bytes"
    if isinstance(found, inspect.BoolType):
        return True
    if isinstance(found, inspect.FloatType):
        return 0.5
    if isinstance(found, inspect.EnumType):
        return next(iter(found.cls))
    if isinstance(found, inspect.StructType):
        return _filled(found.cls)
    if isinstance(found, inspect.ListType | inspect.VarTupleType | inspect.SetType):
        return [_value(found.item_type)]
    if isinstance(found, inspect.TupleType):
        return [_value(one) for one in found.item_types]
    if isinstance(found, inspect.DictType):
        return {_value(found.key_type): _value(found.value_type)}
    if isinstance(found, inspect.LiteralType):
        return found.values[0]
    return None


def _filled(kind: type) -> Any:
    """Return a message with a value in each field, checked by what decodes it."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return kind(*(_value(field.type) for field in info.fields))


def _all(union: object) -> list[type]:
    info = msgspec.inspect.type_info(union)
    assert isinstance(info, msgspec.inspect.UnionType)
    return [one.cls for one in info.types if isinstance(one, msgspec.inspect.StructType)]


def seeds() -> list[bytes]:
    """Return a request and a reply of each kind."""
    requests = [b"q" + encode(_filled(kind)) for kind in _all(api.Request)]
    replies = [b"r" + encode(_filled(kind)) for kind in _all(api.Reply)]
    return [
        *requests,
        *replies,
        b"q",
        b"r\xc0",
        b"q\x93\xa6status\x01" + b"\x91" * 1_500 + b"\xc0",
        b"p" + own_prefix("a").encode(),
        b"pother",
    ]


def one(data: bytes) -> None:
    """Read a header; what it says is written, and read again to the same."""
    kind, header = data[:1], data[1:]
    if kind == b"p":
        own = own_prefix("a").encode()
        assert not is_anothers(own + header, own)
        is_anothers(header, own)
        return
    with kit.documented(ProtocolError):
        message = (decode_request if kind == b"q" else decode_reply)(header)
    again = encode(message)
    decoded = (decode_request if kind == b"q" else decode_reply)(again)
    assert decoded == message and encode(decoded) == again
