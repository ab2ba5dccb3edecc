"""Run the attacks and print a row for each: python -m tests.attack, or make attack.

The exit code is 1 if a target was missed or something was lost, and 2 if an attack itself failed.
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback

from tests.attack.attacks import ATTACKS, LEFT_OUT
from tests.attack.kit import COLUMNS, Row, Run, table


def line(cells: list[str]) -> str:
    """Return a row as a line of text."""
    widths = (18, 33, 9, 9, 7, 15, 0)
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def run_one(name: str, seconds: float, seed: int) -> list[Row]:
    """Run one attack in a folder of its own, which is removed with all its processes."""
    with tempfile.TemporaryDirectory(prefix="hastore-attack-") as folder:
        with Run(pathlib.Path(folder), seconds, seed) as run:
            return ATTACKS[name](run)


def main(words: list[str]) -> int:
    """Run the attacks that the words name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    known = "these attacks, with commas: " + ", ".join(ATTACKS)
    parser.add_argument("--only", default="", help=known)
    parser.add_argument("--seconds", type=float, default=600.0, help="of all attacks together")
    parser.add_argument("--seed", type=int, default=0, help="repeats a run; 0: a new one")
    parser.add_argument("--markdown", action="store_true", help="a table for docs/security.md")
    given = parser.parse_args(words)
    names = [each for each in given.only.split(",") if each] or list(ATTACKS)
    unknown = [each for each in names if each not in ATTACKS]
    if unknown:
        parser.error(f"no such attack: {', '.join(unknown)}; there are {', '.join(ATTACKS)}")
    seed = given.seed or random.SystemRandom().getrandbits(32)
    print(f"seed {seed}, {given.seconds:g} s, {time.strftime('%Y-%m-%d %H:%M')}", file=sys.stderr)
    if LEFT_OUT and not given.only:
        print(LEFT_OUT, file=sys.stderr)
    logging.basicConfig(level=logging.ERROR)  # clients warn of what the attacks do to them
    if not given.markdown:
        print(line(COLUMNS), flush=True)
    rows: list[Row] = []
    failed = []
    for name in names:
        try:
            found = run_one(name, given.seconds / len(names), seed)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        rows += found
        for row in found:
            where = sys.stderr if given.markdown else sys.stdout
            print(line(row.cells()), file=where, flush=True)
    if given.markdown:
        print(table(rows))
    if failed:
        print(f"these attacks themselves failed: {', '.join(failed)}", file=sys.stderr)
        return 2
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves no folder
    sys.exit(main(sys.argv[1:]))
