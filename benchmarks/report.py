"""Present the results: tables for the terminal and the documents, a JSON summary for programs."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import interpreter
from benchmarks.common import RESULTS, ROOT, say

DOCUMENT = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
FIGURES = ("<!-- figures -->", "<!-- end of figures -->")
HEADLINE = ("<!-- headline -->", "<!-- end of headline -->")
# The rows in README.md: the start of a figure's name, and a part of its peer's name.
HEADLINES = (
    ("one blocking put, p50", "RocketMQ"),
    ("64 puts in flight", "Kafka"),
    ("own batching", "Kafka"),
    ("64 producers", "one producer"),
    ("one consumer", "1,024 an answer"),
    ("SIGKILL of the master to the first", "RocketMQ"),
)
Document = dict[str, Any]


def read(name: str) -> Document | None:
    """Return the latest result of one benchmark, or None if there is none."""
    path = pathlib.Path(RESULTS / f"{name}.json")
    document: Document | None = json.loads(path.read_text()) if path.exists() else None
    return document


def number(value: float) -> str:
    """Format a number with at least three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def spread_text(spread: dict[str, float]) -> str:
    """Return "median (min to max)"."""
    low, middle, high = (number(spread[key]) for key in ("min", "median", "max"))
    return middle if low == high else f"{middle} ({low} to {high})"


def target(one: Document) -> str:
    """Return the target of a figure as text."""
    if "target" not in one:
        return ""
    unit = f" {one['unit']}" if one["target"]["of"] == "figure" else ""
    return f"{one['target']['sense']} {one['target']['limit']:g}{unit}"


def verdict(one: Document) -> str:
    """Return whether the target was met, as text."""
    if "target" not in one:
        return ""
    return {True: "met", False: "**missed**", None: "not run"}[one["met"]]


def rows(document: Document) -> list[tuple[str, ...]]:
    """Return the rows of one result's table."""
    out: list[tuple[str, ...]] = []
    for one in document["figures"]:
        beside = f"{one['peer']}: {spread_text(one['theirs'])}" if "theirs" in one else ""
        ratio = spread_text(one["ratio"]) if "ratio" in one else ""
        ours = f"{spread_text(one['ours'])} {one['unit']}"
        out.append((one["name"], ours, beside, ratio, target(one), verdict(one)))
    return out


def used(costs: dict[str, float]) -> str:
    """Return the CPU us per message of each process, as text."""
    return ", ".join(f"{who} {us:g}" for who, us in costs.items())


def cpu_rows(document: Document) -> list[tuple[str, str, str]]:
    """Return the CPU rows of a result: load, system, and the CPU of its processes."""
    out: list[tuple[str, str, str]] = []
    for one in document["figures"]:
        load = one["name"].removesuffix(", p50").removesuffix(", p99")
        found = [("hastore", one.get("cpu_us_per_message"))]
        found.append((one.get("peer", ""), one.get("peer_cpu_us_per_message")))
        for system, costs in found:
            if costs and (load, system, used(costs)) not in out:
                out.append((load, system, used(costs)))
    return out


def resident_rows(document: Document) -> list[tuple[str, str, str]]:
    """Return the rows of resident memory, which includes the mapped log."""
    out = []
    for one in document["figures"]:
        if "resident" in one:
            theirs = f"{one['peer_resident']:,.0f}" if "peer_resident" in one else ""
            name = one["name"].replace(" that is not mapped log", "")
            out.append((name, f"{one['resident']:,.0f}", theirs))
    return out


def show(document: Document) -> None:
    """Print one result as a table."""
    heads = ("figure", "ours", "peer", "ratio", "target", "")
    title = f"{document['benchmark']}: {interpreter.text_of(document['machine'])}"
    table = Table(*heads, title=title, box=None)
    for row in rows(document):
        table.add_row(*(cell.replace("**", "") for cell in row))
    Console(width=200).print(table)


def write_summary(documents: Sequence[Document], seconds: dict[str, float]) -> Document:
    """Write `results/summary.json`: every figure that has a target, and its verdict."""
    figures = [
        {"benchmark": document["benchmark"], **one}
        for document in documents
        for one in document["figures"]
        if "target" in one
    ]
    summary = {
        "machine": documents[0]["machine"] if documents else {},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "met": sum(one["met"] is True for one in figures),
        "missed": sum(one["met"] is False for one in figures),
        "not_run": sum(one["met"] is None for one in figures),
        "figures": figures,
    }
    (RESULTS / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


# ---- documents


def table_of(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    out = [f"| {' | '.join(heads)} |\n", f"|{'---|' * len(heads)}\n"]
    out += [f"| {' | '.join(line)} |\n" for line in lines]
    return "".join(out)


def between(path: pathlib.Path, marks: tuple[str, str], text: str) -> None:
    """Replace the text between a document's two marks."""
    head, first, rest = path.read_text().partition(marks[0])
    _, last, tail = rest.partition(marks[1])
    if not first or not last:
        raise SystemExit(f"{path}: the marks {marks[0]} and {marks[1]} are missing")
    path.write_text(f"{head}{first}\n{text}{last}{tail}")
    say(f"wrote the figures into {path.relative_to(ROOT)}")


def section(document: Document) -> str:
    """Return one benchmark's part of docs/benchmarks.md."""
    machine = document["machine"]
    peer = "peer: median (min to max)"
    heads = ("figure", "ours: median (min to max)", peer, "ratio", "target", "")
    parts = [
        f"\n### {document['benchmark']}\n\n{machine['date']}, {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory_gib']:g} GiB, Linux {machine['linux']}, "
        f"{interpreter.text_of(machine)}, load at the end {machine.get('load', 0):g}\n\n",
        table_of(heads, rows(document)),
    ]
    cpu, resident = cpu_rows(document), resident_rows(document)
    if cpu:
        parts += ["\n", table_of(("load", "system", "CPU us per message, median"), cpu)]
    if resident:
        parts += ["\n", table_of(("resident, MiB, with the mapped log", "ours", "peer"), resident)]
    return "".join(parts)


def write_docs(documents: Sequence[Document], summary: Document) -> None:
    """Write the figures into docs/benchmarks.md, and the headline table into README.md."""
    counts = f"{summary['met']} targets met, {summary['missed']} missed"
    if summary["not_run"]:
        counts += f", {summary['not_run']} not run"
    intro = f"\n{counts}. Each ratio is ours over the peer's.\n"
    between(DOCUMENT, FIGURES, intro + "".join(map(section, documents)) + "\n")
    lines = []
    for begins, peer in HEADLINES:
        for one in summary["figures"]:
            if one["name"].startswith(begins) and peer in one["peer"] and "ratio" in one:
                ratio = number(one["ratio"]["median"])
                ours = f"{number(one['ours']['median'])} {one['unit']}"
                theirs = f"{number(one['theirs']['median'])} {one['unit']}"
                lines.append((one["name"], ours, f"{one['peer']}: {theirs}", ratio))
    table = table_of(("median of five", "hastore", "peer, in the same run", "ratio"), lines)
    between(README, HEADLINE, f"\n{table}\n")
