"""Turn a scalar of the configuration file into a typed value; format sizes for people. Pure."""

import re
import types
import typing
from enum import Enum

import yaml

from hastore.config.checks import Places
from hastore.config.model import DAY_MS, GIB, KIB, MIB, Range, Unit

# Unit -> the noun in errors, the suffixes allowed in the file with their factors, the remedy.
_UNITS: dict[Unit, tuple[str, dict[str, int], str]] = {
    Unit.ITEMS: ("whole number", {"": 1}, "write a whole number"),
    Unit.BYTES: (
        "size",
        {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB},
        "write a size like 64KiB or 1GiB",
    ),
    Unit.MILLISECONDS: (
        "time",
        {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": DAY_MS},
        "write a time like 500ms, 5s or 72h",
    ),
}
_QUANTITY = re.compile(r"(-?[0-9][0-9_]*)\s*([A-Za-z]*)")
_PLAIN_TAGS = frozenset({"str", "int", "float", "bool", "timestamp"})
_TRUTH = {"true": True, "false": False}


def read_value(places: Places, key: str, node: yaml.Node, kind: typing.Any) -> typing.Any:
    """Return the scalar `node` as a value of a field's type `kind`; raises ConfigError.

    A number's Range defines its unit: a size is returned in bytes, a time in milliseconds.
    """
    optional = typing.get_origin(kind) in (types.UnionType, typing.Union)
    if optional:
        kind = next(one for one in typing.get_args(kind) if one is not types.NoneType)
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
    if typing.get_origin(kind) is typing.Annotated:
        return _number(places, key, text, kind.__metadata__[0])
    if not text.strip():
        raise places.error(key, "is empty", "give a value, or remove the key")
    return text


def _choice(places: Places, key: str, text: str, kind: type[Enum]) -> Enum:
    choices = {str(choice.value): choice for choice in kind}
    if text not in choices:
        raise places.error(key, f"{text!r} is not one of {', '.join(choices)}", "use one of these")
    return choices[text]


def _number(places: Places, key: str, text: str, allowed: Range) -> int:
    noun, units, remedy = _UNITS[allowed.unit]
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or len(match[1]) > 19:
        raise places.error(key, f"{text!r} is not a {noun}", remedy)
    number = int(match[1].replace("_", ""))
    if match[2] not in units and (number != 0 or match[2]):
        problem = f"{text!r} has the unit {match[2]!r}" if match[2] else f"{text!r} has no unit"
        raise places.error(key, problem, remedy)
    value = number * units.get(match[2], 1)
    if not allowed.least <= value <= allowed.most:
        unit = "" if allowed.unit is Unit.ITEMS else f" {allowed.unit.value}"
        why = f": {allowed.why}" if allowed.why and value > allowed.most else ""
        problem = f"{value}{unit} is out of range{why}"
        raise places.error(key, problem, f"use {allowed.least} to {allowed.most}{unit}")
    return value


def human_size(size: int) -> str:
    """Return a number of bytes for people to read: `512 B`, `64 KiB`, `1.5 GiB`."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"
