"""Turn a scalar of the configuration file into a typed value, and write sizes for people. Pure."""

import re
import types
import typing
from enum import Enum

import yaml

from hastore.config.checks import Places, check_range
from hastore.config.model import GIB, KIB, MIB

_SIZE_FIELDS = frozenset(
    {
        "commitlog_file_size",
        "max_message_size",
        "transfer_batch_size",
        "max_gap_not_in_sync",
        "max_size_bytes",
        "max_pending_bytes",
    }
)
_SIZE_UNITS = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
_TIME_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_QUANTITY = re.compile(r"(-?[0-9][0-9_]*)\s*([A-Za-z]*)")
_PLAIN_TAGS = frozenset({"str", "int", "float", "bool", "timestamp"})
_TRUTH = {"true": True, "false": False}


def read_value(
    places: Places, key: str, node: yaml.Node, kind: typing.Any, field: str = ""
) -> typing.Any:
    """Return the scalar `node` as a value of `kind`; ConfigError names `key` and its line.

    `field` is the field of the struct: it tells whether a number is a size (returned in bytes) or
    a time (returned in milliseconds).
    """
    optional = typing.get_origin(kind) in (types.UnionType, typing.Union)
    if optional:
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    if not isinstance(node, yaml.ScalarNode):
        raise places.error(key, "must be a single value", "see conf/master.yaml")
    text: str = node.value
    if node.tag.endswith(":null"):
        if optional:
            return None
        raise places.error(key, "has no value", "give one, or remove the key")
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN_TAGS:
        raise places.error(key, f"has the tag {node.tag}", "write a plain value without a tag")
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise places.error(key, f"{text!r} is neither true nor false", "write true or false")
        return _TRUTH[text.lower()]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choice(places, key, text, kind)
    if kind is int:
        return _number(places, key, text, field)
    if not text.strip():
        raise places.error(key, "is empty", "give a value, or remove the key")
    return text


def _choice(places: Places, key: str, text: str, kind: type[Enum]) -> Enum:
    choices = {str(choice.value): choice for choice in kind}
    if text not in choices:
        raise places.error(key, f"{text!r} is not one of {', '.join(choices)}", "use one of these")
    return choices[text]


def _number(places: Places, key: str, text: str, field: str) -> int:
    if field in _SIZE_FIELDS:
        noun, units, remedy = "size", _SIZE_UNITS, "write a size like 64KiB or 1GiB"
    elif field.endswith("_ms"):
        noun, units, remedy = "time", _TIME_UNITS, "write a time like 500ms, 5s or 72h"
    else:
        noun, units, remedy = "whole number", {"": 1}, "write a whole number"
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or len(match[1]) > 19:
        raise places.error(key, f"{text!r} is not a {noun}", remedy)
    number = int(match[1].replace("_", ""))
    if match[2] not in units and (number != 0 or match[2]):
        problem = f"{text!r} has the unit {match[2]!r}" if match[2] else f"{text!r} has no unit"
        raise places.error(key, problem, remedy)
    value = number * units.get(match[2], 1)
    check_range(places, key, field or key, value)
    return value


def human_size(size: int) -> str:
    """Return a number of bytes for people to read: `512 B`, `64 KiB`, `1.5 GiB`."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"
