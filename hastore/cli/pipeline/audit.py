"""`hastore pipeline audit`: compare two stores or nodes by digest."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from hastore.cli.common import (
    DIFFER,
    DONE,
    FAILED,
    Folder,
    counted,
    fitting_table,
    print_error,
    print_note,
    print_text,
    with_json,
)
from hastore.cli.pipeline.common import SessionOptions, run_job, with_session
from hastore.pipeline.audit import ALGORITHMS, DEFAULT_ALGORITHM

if TYPE_CHECKING:
    from hastore.pipeline.audit.difference import Difference
    from hastore.pipeline.audit.job import Summary
    from hastore.pipeline.audit.sides import Extent

_VALUE_MAX = 48  # characters of a value in the table
_BEFORE = 16  # of them before the place where two long values differ


@click.command("audit", short_help="Compare two stores or nodes, range by range, by digest.")
@click.argument("a", type=Folder())
@click.argument("b", type=Folder())
@click.option(
    "--algorithm",
    type=click.Choice(ALGORITHMS),
    default=DEFAULT_ALGORITHM,
    show_default=True,
    help="The digest: xxh3-128 finds any damage; sha256 also withstands an attacker.",
)
@click.option("--from", "start", type=click.IntRange(0), metavar="O", help="Start at this offset.")
@click.option("--to", "end", type=click.IntRange(0), metavar="O", help="End before this offset.")
@click.option(
    "--first", "stop_at_first", is_flag=True, help="End once the first difference is certain."
)
@with_session
@with_json
def audit_command(
    a: str,
    b: str,
    algorithm: str,
    start: int | None,
    end: int | None,
    stop_at_first: bool,
    session: SessionOptions,
    as_json: bool,
) -> int:
    """Compare the logs A and B: each a store's folder, or a running node's tcp://HOST:PORT.

    A node computes the digests of its own log; no data is sent. Compares what both sides have, up
    to the confirmed offset of a running node. Exit code 0: equal, 4: a difference was found (the
    first record that differs is shown with both of its versions), 1: the log was cut meanwhile, and
    a part was not compared.
    """

    def check() -> None:
        from hastore.pipeline.audit.job import check_audit

        check_audit(a, b, algorithm=algorithm, start=start, end=end)

    def job(start_spark: Any, progress: Any) -> "Summary":
        from hastore.pipeline.audit import audit

        return audit(
            start_spark(), a, b, algorithm=algorithm, start=start, end=end,
            stop_at_first=stop_at_first, progress=progress,
        )  # fmt: skip

    return run_job("audit", job, session, check=check, as_json=as_json, show=_show, judge=_judge)


def _judge(summary: "Summary") -> int:
    if not summary.equal:
        print_error(_difference_line(summary))
        return DIFFER
    if not summary.complete:
        print_error(
            f"the audit is incomplete: everything compared is equal, up to {summary.equal_until}; "
            "the log was cut meanwhile: run the audit again"
        )
        return FAILED
    if not summary.bytes and summary.start < summary.end:
        print_error(
            "nothing was compared: what both sides had was removed meanwhile; run the audit again"
        )
        return FAILED
    return DONE


def _difference_line(summary: "Summary") -> str:
    line = (
        f"{summary.a.where} and {summary.b.where} differ in {summary.differing_ranges:,} of "
        f"{counted(summary.ranges, 'range')}"
    )
    if summary.first is None:
        return line
    first = summary.first
    return f"{line}; first in the {first.item} at offset {first.offset}: {first.verdict}"


def _show(summary: "Summary") -> None:
    for name, side in (("A", summary.a), ("B", summary.b)):
        print_text(_side_line(name, side))
    print_text(
        f"compared [{summary.start:,}, {summary.end:,}): {counted(summary.ranges, 'range')}, "
        f"{summary.bytes:,} bytes, by {summary.algorithm} in {summary.seconds:.1f} s "
        f"({summary.mb_per_s:,.0f} MB/s a side)"
    )
    for each in summary.not_compared:
        print_text(f"not compared [{each.start:,}, {each.end:,}): {each.why}")
    if summary.ignored_bytes:
        print_text(
            f"ignored {summary.ignored_bytes:,} bytes in the blanks at the ends of log files: "
            "they differ, but mean nothing"
        )
    if summary.first is not None:
        _show_first(summary.first)
    shown = summary.differing[:10]
    if shown:
        more = summary.differing_ranges - len(shown)
        text = ", ".join(f"[{start:,}, {end:,})" for start, end in shown)
        print_text(f"ranges that differ: {text}" + (f" and {more:,} more" if more else ""))
    if summary.equal and summary.bytes:
        print_text("equal" + (f", digest {summary.digest}" if summary.digest else ""))
    if summary.start == summary.end:
        print_note("both logs are empty")


def _side_line(name: str, side: "Extent") -> str:
    size = f", files of {side.file_size:,} bytes" if side.file_size else ""
    return (
        f"{name}: {side.where}, {side.kind}: [{side.min_offset:,}, {side.end_offset:,}) up to its "
        f"{side.end_is}{size}"
    )


def _show_first(first: "Difference") -> None:
    print_text(
        f"first difference: byte {first.byte:,}, in {first.part} of the {first.item} at offset "
        f"{first.offset:,}"
    )
    print_text(first.verdict)
    a, b = first.a, first.b
    rows = [
        ["", "what", a.what, b.what],
        ["", "bytes", f"{a.size:,}", f"{b.size:,}"],
        ["", "sha256", a.sha256[:16] + "...", b.sha256[:16] + "..."],
    ]
    for name in [*a.fields, *(name for name in b.fields if name not in a.fields)]:
        mark = "*" if name in first.differing else ""
        rows.append([mark, name, *side_by_side(_value(name, a.fields), _value(name, b.fields))])
    mark = "*" if "body" in first.differing else ""
    rows.append([mark, "body", *_bodies(a.body_base64, b.body_base64)])
    rows.append(["*", f"from {first.byte}", *first.values])
    for line in fitting_table(["", "field", "A", "B"], rows, keep=4, width=None):
        print_text(line)


def _value(name: str, fields: dict[str, Any]) -> str:
    if name not in fields:
        return "-"
    value = fields[name]
    if name == "magic":
        return f"{value:08x}"
    if name == "properties":
        value = " ".join(f"{key}={text}" for key, text in value)
    return str(value)


def _bodies(a_base64: str, b_base64: str) -> tuple[str, str]:
    """Return the texts of two bodies around the first byte that differs."""
    import base64

    a, b = base64.b64decode(a_base64), base64.b64decode(b_base64)
    start = max(0, _difference(a, b) - 4 * _VALUE_MAX)
    for _ in range(3):  # back to the first byte of a character
        if start and 0x80 <= a[start] < 0xC0:
            start -= 1
    parts = (body[start : start + 8 * _VALUE_MAX] for body in (a, b))
    texts = (part.decode("utf-8", "backslashreplace") for part in parts)
    return side_by_side(*texts, cut=start > 0)


def _difference(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the first place at which two values differ; 0 if they are equal."""
    if a == b:
        return 0
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(a), len(b)))


def side_by_side(a: str, b: str, *, cut: bool = False) -> tuple[str, str]:
    """Return two values as the table shows them: long ones around the place where they differ.

    `cut` says that more precedes them.
    """
    at = _difference(a, b)
    start = at - _BEFORE if at > _VALUE_MAX - _BEFORE else 0
    return _short(a, start, cut), _short(b, start, cut)


def _short(text: str, start: int, cut: bool) -> str:
    shown = "".join(each if each.isprintable() else "." for each in text[start:])
    if start or cut:
        shown = "..." + shown
    return shown if len(shown) <= _VALUE_MAX else shown[: _VALUE_MAX - 3] + "..."
