"""Run all benchmarks, one after the other, and show their figures.

    python -m benchmarks.run_all [--repeats 5] [--dir FOLDER] [--only NAME] [--write-docs]

Each writes `benchmarks/results/NAME.json`; `--write-docs` also puts the figures into
docs/benchmarks.md, between its two marks.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, ROOT, say

NAMES = ("replication", "puts", "recovery")
LIMIT_S = 600.0
DOCUMENT = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
Document = dict[str, Any]


def run(name: str, repeats: int, folder: str | None) -> bool:
    """Run one benchmark in a process of its own; whether it succeeded."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--repeats", str(repeats)]
    if folder is not None:
        command += ["--dir", folder]
    began = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    say(
        f"{name}: {'done' if not ended.returncode else 'FAILED'} ({time.monotonic() - began:.0f} s)"
    )
    return ended.returncode == 0


def rows(document: Document) -> list[tuple[str, ...]]:
    """Return the table of one result: figure, ours, the peer's, the ratio."""
    out: list[tuple[str, ...]] = []
    for one in document["figures"]:
        note = ""
        if "cpu_us_per_message" in one:
            note = ", ".join(f"{who} {us:g}" for who, us in one["cpu_us_per_message"].items())
            note = f"CPU us each: {note}"
        elif "resident" in one:
            note = f"{one['resident']:,.0f} MiB with the mapped log"
        theirs = f"{one['peer']}: {told(one['theirs'])}" if "peer" in one else note
        ratio = told(one["ratio"]) if "ratio" in one else ""
        out.append((one["name"], f"{told(one['ours'])} {one['unit']}", theirs, ratio))
    return out


def told(spread: dict[str, float]) -> str:
    """Return "median (min to max)"."""
    low, middle, high = (number(spread[key]) for key in ("min", "median", "max"))
    return middle if low == high else f"{middle} ({low} to {high})"


def number(value: float) -> str:
    """Return a number in three digits or more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def show(document: Document) -> None:
    """Print one result as a table."""
    table = Table("figure", "ours", "beside", "ratio", title=document["benchmark"], box=None)
    for row in rows(document):
        table.add_row(*row)
    Console().print(table)


def write_docs(documents: list[Document]) -> None:
    """Put the figures between the document's marks."""
    text = DOCUMENT.read_text()
    head, _, rest = text.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise SystemExit(f"{DOCUMENT}: the marks {BEGIN} and {END} are not there")
    parts = [head, BEGIN, "\n"]
    for document in documents:
        machine = document["machine"]
        parts.append(
            f"\n### {document['benchmark']}\n\n{machine['date']}, {machine['processor']}, "
            f"{machine['cores']} cores, {machine['memory_gib']:g} GiB, Linux {machine['linux']}, "
            f"Python {machine['python']}, load {machine['load_before']:g}\n\n"
            "| figure | ours: median (min to max) | beside it | ratio |\n|---|---|---|---|\n"
        )
        parts += [f"| {' | '.join(row)} |\n" for row in rows(document)]
    parts += ["\n", END, tail]
    DOCUMENT.write_text("".join(parts))
    say(f"{DOCUMENT.relative_to(ROOT)} has the figures")


def read(name: str) -> Document:
    """Return the latest result of one benchmark."""
    document: Document = json.loads(pathlib.Path(RESULTS / f"{name}.json").read_text())
    return document


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", help="where the stores lie (default: the temporary folder)")
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--write-docs", action="store_true")
    given = parser.parse_args()
    names = [given.only] if given.only else list(NAMES)
    good = [name for name in names if run(name, given.repeats, given.dir)]
    for name in good:
        show(read(name))
    if given.write_docs:
        write_docs([read(name) for name in NAMES if (RESULTS / f"{name}.json").exists()])
    if len(good) < len(names):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
