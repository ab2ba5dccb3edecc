"""What `hastore top` shows: numbers and rates from two looks at a group, and their lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hastore.bounded_log import one_line
from hastore.cli.common import fitting_table
from hastore.cli.status import GroupAnswers, Status, default_refusal

GROUPS_SHOWN = 10
_UNITS = ("", "k", "M", "G", "T", "P")
Line = tuple[str, str | None]  # with its style


class Look(NamedTuple):
    """What the nodes said at a moment of a monotonic clock."""

    at_s: float
    groups: Sequence[GroupAnswers]
    errors: Sequence[str]
    code: int


class Reading(NamedTuple):
    """How far the consumer groups are, at a moment of a monotonic clock."""

    at_s: float
    messages: int  # in all queues since their begin
    lags: Mapping[str, int]  # by consumer group, in messages
    problem: str | None = None


def frame(
    before: Look | None, now: Look, read_before: Reading | None, read: Reading | None
) -> dict[str, Any]:
    """Return the numbers of a frame: `nodes`, `slaves`, `groups`, rates by second, `errors`.

    A rate is None without an earlier look, and of a node that was not there then.
    """
    earlier = {} if before is None else {_name(one): one for one in _rows(before)}
    seconds = 0.0 if before is None else now.at_s - before.at_s
    nodes, slaves = [], []
    for one in _rows(now):
        was = earlier.get(_name(one), {})
        nodes.append(_node(one, was, seconds))
        acks = {(s["node"], s["address"]): s for s in was.get("slaves", ())}
        for slave in one["slaves"]:
            old = acks.get((slave["node"], slave["address"]), {})
            slaves.append(_slave(one, slave, old, seconds))
    return {
        "nodes": nodes,
        "slaves": slaves,
        "messages_per_s": None if read is None else _messages(read_before, read),
        "groups": [] if read is None else _lags(read_before, read),
        "errors": [*now.errors, *([] if read is None or not read.problem else [read.problem])],
    }


def _rows(look: Look) -> list[Status]:
    return [status for group in look.groups for status in group.rows]


def _name(status: Status) -> tuple[object, ...]:
    return status.get("cluster"), status.get("group"), status["node"], status["address"]


def _rate(now: Any, was: Any, seconds: float) -> float | None:
    """Return the growth by second; a log that was cut has none."""
    if not isinstance(now, int) or not isinstance(was, int) or seconds <= 0:
        return None
    return max(0, now - was) / seconds


def _node(one: Status, was: Status, seconds: float) -> dict[str, Any]:
    if not one["answers"]:
        return {"node": one["node"], "address": one["address"], "answers": False,
                "silence": one["silence"]}  # fmt: skip
    end, confirmed = one.get("max_offset"), one.get("confirmed_offset")
    unconfirmed = None
    if isinstance(end, int) and isinstance(confirmed, int):
        unconfirmed = max(0, end - confirmed)
    return {
        "node": one["node"],
        "address": one["address"],
        "answers": True,
        "role": one["role"],
        "epoch": one["epoch"],
        "puts": _puts(one),
        "max_offset": end,
        "bytes_per_s": _rate(end, was.get("max_offset"), seconds),
        "unconfirmed_bytes": unconfirmed,
        "waiting_puts": one.get("waiting_puts"),
        "connections": one.get("connections"),
        "problems": len(one.get("problems") or ()),
    }


def _puts(one: Status) -> str:
    if not one["writable"]:
        return "no"
    return "yes" if default_refusal(one) is None else "acks 1"


def _slave(master: Status, slave: Status, was: Status, seconds: float) -> dict[str, Any]:
    return {
        "node": slave["node"],
        "of": master["node"],
        "in_sync": slave["in_sync"],
        "ack_offset": slave["ack_offset"],
        "lag_bytes": slave["lag_bytes"],
        "bytes_per_s": _rate(slave["ack_offset"], was.get("ack_offset"), seconds),
    }


def _messages(was: Reading | None, now: Reading) -> float | None:
    if was is None or was.problem or now.problem:
        return None
    return _rate(now.messages, was.messages, now.at_s - was.at_s)


def _lags(was: Reading | None, now: Reading) -> list[dict[str, Any]]:
    seconds = 0.0 if was is None else now.at_s - was.at_s
    found = []
    for group, lag in sorted(now.lags.items(), key=lambda each: (-each[1], each[0])):
        old = None if was is None else was.lags.get(group)
        grows = None if old is None or seconds <= 0 else (lag - old) / seconds
        found.append({"group": group, "lag": lag, "lag_per_s": grows})
    return found


# -- lines ---------------------------------------------------------------------------------------


def lines(shown: Mapping[str, Any], width: int | None, *, title: str = "") -> list[Line]:
    """Return the lines of a frame with their styles, none wider than `width` (None: no limit)."""
    found: list[Line] = [(title, "bold")] if title else []
    found += [(f"error: {one_line(text)}", "red") for text in shown["errors"]]
    found += _table(
        ["node", "role", "puts", "bytes/s", "end", "open", "waiting", "clients", "problems",
         "epoch"],
        [(_node_cells(one), _style(one)) for one in shown["nodes"]], 2, width,
    )  # fmt: skip
    if shown["slaves"]:
        found += [("", None)]
        found += _table(
            ["slave", "of", "in sync", "lag", "bytes/s", "at"],
            [(_slave_cells(one), None if one["in_sync"] else "yellow") for one in shown["slaves"]],
            0, width,
        )  # fmt: skip
    rate = shown["messages_per_s"]
    if rate is not None:
        found += [("", None), (f"messages: {short(rate)}/s", None)]
    groups = shown["groups"]
    if groups:
        rows = [(_group_cells(one), None) for one in groups[:GROUPS_SHOWN]]
        found += [("", None), *_table(["group", "lag", "lag/s"], rows, 1, width)]
        if len(groups) > GROUPS_SHOWN:
            found.append((f"and {len(groups) - GROUPS_SHOWN:,} more groups", None))
    return [(_cut(text, width), style) for text, style in found]


def _table(
    head: list[str], rows: Sequence[tuple[list[str], str | None]], left: int, width: int | None
) -> list[Line]:
    """Return a table whose columns after the first `left` are aligned to the right."""
    if not rows:
        return []
    cells = [row for row, _ in rows]
    right = head[left:] if left > 1 else [name for name in head if name not in ("group", "in sync")]
    drawn = fitting_table(head, cells, keep=2, right=right, width=width)
    return list(zip(drawn, ["bold", *(style for _, style in rows)], strict=True))


def _node_cells(one: Mapping[str, Any]) -> list[str]:
    number = "?" if one["node"] is None else str(one["node"])
    if not one["answers"]:
        return [number, "no answer", one["silence"], *[""] * 7]
    return [
        number, one["role"], one["puts"], short(one["bytes_per_s"]),
        _exact(one["max_offset"]), short(one["unconfirmed_bytes"]), _exact(one["waiting_puts"]),
        _exact(one["connections"]), str(one["problems"] or ""), str(one["epoch"]),
    ]  # fmt: skip


def _slave_cells(one: Mapping[str, Any]) -> list[str]:
    number = "RocketMQ" if one["node"] is None else str(one["node"])
    sync = "yes" if one["in_sync"] else "no"
    return [number, str(one["of"]), sync, short(one["lag_bytes"]), short(one["bytes_per_s"]),
            _exact(one["ack_offset"])]  # fmt: skip


def _group_cells(one: Mapping[str, Any]) -> list[str]:
    grows = one["lag_per_s"]
    sign = "" if grows is None or grows < 0 else "+"
    return [one["group"], _exact(one["lag"]), f"{sign}{short(grows)}" if grows else short(grows)]


def _style(one: Mapping[str, Any]) -> str | None:
    if not one["answers"]:
        return "red"
    return {"yes": "green", "acks 1": "yellow"}.get(one["puts"])


def short(number: float | None) -> str:
    """Return a number with at most 4 digits and a unit, as 1.2k or 34M; "-" for None."""
    if number is None:
        return "-"
    value, sign = abs(float(number)), "-" if number < 0 else ""
    at = 0
    while value >= 999.5 and at < len(_UNITS) - 1:
        value, at = value / 1000, at + 1
    digits = f"{value:.1f}" if 0 < value < 9.95 and (at or value % 1) else f"{value:.0f}"
    return f"{sign}{digits}{_UNITS[at]}"


def _exact(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _cut(text: str, width: int | None) -> str:
    if width is None or len(text) <= width:
        return text
    return text[: max(0, width - 3)] + "..."
