"""Parse and check the options of a write. Pure.

Spark passes the names in lower case; this module restores their spelling. Unknown names are
refused: an option that is ignored may be one that should have kept rows from being lost.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hastore.errors import MessageIllegalError, UsageError
from hastore.record.properties import check_topic
from hastore.spark.options.source_options import BOOTSTRAP, PATH, SECURITY, security_file

TOPIC = "topic"
_KNOWN = (
    *(BOOTSTRAP, TOPIC, "acks", "syncFlush", "deliveryTimeout", "idempotent", "writeId"),
    SECURITY,
    # Spark's own for streams; it passes them on.
    *("checkpointLocation", "queryName"),
)
_BY_LOWER_NAME = {name.lower(): name for name in _KNOWN}
_KAFKA = {
    "kafka.bootstrap.servers": BOOTSTRAP,
    "kafka.acks": "acks",
    "kafka.delivery.timeout.ms": "deliveryTimeout",
    "kafka.enable.idempotence": "idempotent",
}
_ACKS: dict[str, Literal[0, 1, "all"]] = {"0": 0, "1": 1, "all": "all", "-1": "all"}
_UNITS_S = {"ms": 0.001, "": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d{1,12})\s*(ms|s|m|min|h|)", re.ASCII | re.IGNORECASE)
_TIMEOUT_S = 120.0  # Kafka's delivery.timeout.ms
_FORMAT = "format 'hastore'"


@dataclass(frozen=True)
class SinkOptions:
    """The checked options of a write. `acks` None: the default of the master's role."""

    bootstrap: tuple[str, ...]
    topic: str | None
    acks: Literal[0, 1, "all"] | None
    sync_flush: bool
    delivery_timeout_s: float
    idempotent: bool
    write_id: str | None
    security: str | None = None


def parse_sink_options(raw: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Check the options of a write. Raises UsageError, which names the option and the remedy."""
    options: dict[str, str] = {}
    for given, value in raw.items():
        name = _BY_LOWER_NAME.get(given.lower())
        if name is None:
            raise UsageError(_unknown(given))
        options[name] = value
    if "writeId" in options and streaming:
        raise UsageError(
            "option 'writeId' is for batch writes; a stream's rows are known by its checkpoint"
        )
    idempotent = _parse_bool(options, "idempotent", default=True)
    if "writeId" in options and not (options["writeId"].strip() and idempotent):
        problem = "is empty" if idempotent else "contradicts idempotent=false"
        raise UsageError(f"option 'writeId' {problem}; give a text of your own, or leave it out")
    return SinkOptions(
        bootstrap=_parse_bootstrap(options),
        topic=_parse_topic(options),
        acks=_parse_acks(options),
        sync_flush=_parse_bool(options, "syncFlush", default=False),
        delivery_timeout_s=_parse_timeout(options),
        idempotent=idempotent,
        write_id=options.get("writeId"),
        security=security_file(options),
    )


def _unknown(given: str) -> str:
    lower = given.lower()
    if lower == PATH:
        return (
            f"option 'path': {_FORMAT} writes to running nodes, not to a directory; leave the path "
            f"out and set {BOOTSTRAP!r}"
        )
    if lower in _KAFKA:
        return f"option {given!r} is Kafka's; use {_KAFKA[lower]!r}"
    if lower.startswith("kafka."):
        return f"option {given!r} has no meaning for {_FORMAT}; remove it"
    near = difflib.get_close_matches(lower, _BY_LOWER_NAME, n=1)
    if near:
        name = _BY_LOWER_NAME[near[0]]
        return f"unknown option {given!r} for a write to {_FORMAT}; did you mean {name!r}?"
    return f"unknown option {given!r} for a write to {_FORMAT}; known options: " + ", ".join(_KNOWN)


def _parse_bootstrap(options: Mapping[str, str]) -> tuple[str, ...]:
    text = options.get(BOOTSTRAP)
    servers = tuple(s.strip() for s in (text or "").split(",") if s.strip())
    if not servers:
        problem = "must be specified" if text is None else "is empty"
        raise UsageError(
            f"option {BOOTSTRAP!r} {problem} for a write to {_FORMAT}; name at least one node, "
            "e.g. tcp://127.0.0.1:10911"
        )
    return servers


def _parse_topic(options: Mapping[str, str]) -> str | None:
    topic = options.get(TOPIC)
    if topic is not None:
        try:
            check_topic(topic)
        except MessageIllegalError as failure:
            raise UsageError(f"option 'topic': {failure}") from failure
    return topic


def _parse_acks(options: Mapping[str, str]) -> Literal[0, 1, "all"] | None:
    text = options.get("acks")
    if text is None:
        return None
    found = _ACKS.get(text.strip().lower())
    if found is None:
        raise UsageError(
            f"option 'acks' is {text!r}; use 'all' (the master and the group's slaves), 1 (the "
            "master) or 0 (nobody)"
        )
    return found


def _parse_bool(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name)
    if text is None:
        return default
    lower = text.strip().lower()
    if lower not in ("true", "false"):
        raise UsageError(f"option {name!r} is {text!r}; use 'true' or 'false'")
    return lower == "true"


def _parse_timeout(options: Mapping[str, str]) -> float:
    text = options.get("deliveryTimeout")
    if text is None:
        return _TIMEOUT_S
    found = _DURATION.fullmatch(text.strip())
    seconds = int(found[1]) * _UNITS_S[found[2].lower()] if found is not None else 0.0
    if seconds <= 0.0:
        raise UsageError(
            f"option 'deliveryTimeout' is {text!r}; use a time above 0, such as 30s, 2m or "
            "500ms; a number alone is milliseconds"
        )
    return seconds
