"""Hunt for each planted mistake; `python -m tests.planted_table` prints what caught it, and where.

Each mistake breaks one rule of a node (tests/ha/planted.py, tests/dledger/planted.py). The hunt
takes the same walks as the suite: one of the mistake's own, if it has one, else random walks from
seed 0 on, up to SEEDS. Without the mistake the walk that caught it must pass: else the walk is what
is wrong. The table is Markdown, for docs/planted-mistakes.md; the exit code is 1 if a mistake was
not caught.
"""

import argparse
import inspect
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.dledger import planted as dledger_planted
from tests.dledger import simulation as dledger_simulation
from tests.dledger import test_simulation as dledger_walks
from tests.ha import planted as classic_planted
from tests.ha import simulation as classic_simulation
from tests.ha import test_simulation as classic_walks

MODES = ("classic", "dledger")
VIOLATIONS = (classic_simulation.Violation, dledger_simulation.Violation)


@dataclass(frozen=True)
class Hunt:
    """What was found of one mistake: walks until it was caught, or None."""

    mode: str
    name: str
    meaning: str
    layer: str
    walks: int | None
    seconds: float

    def row(self) -> str:
        """Return a line of the table."""
        found = "**not caught**" if self.walks is None else f"{self.walks:,}"
        return f"| `{self.name}` | {self.meaning} | {self.layer} | {found} |"


def dledger_walk(bug: str) -> tuple[str, Callable[..., object]]:
    """Return the kind of walk that may meet a mistake of mode dledger, and the walk."""
    if bug in dledger_walks.DIRECTED:
        return classic_walks.DIRECTED_WALK, dledger_walks.DIRECTED[bug]
    return "simulation", dledger_simulation.walk


def hunt(job: tuple[str, str, int]) -> Hunt:
    """Take walks with one mistake until one of them fails."""
    mode, bug, seeds = job
    module = classic_planted if mode == "classic" else dledger_planted
    layer, walk = (classic_walks.walk_for if mode == "classic" else dledger_walk)(bug)
    numbers = [()] if layer == classic_walks.DIRECTED_WALK else [(n,) for n in range(seeds)]
    begun, caught = time.monotonic(), None
    with module.planted(bug):
        for count, number in enumerate(numbers, 1):
            try:
                walk(*number)
            except VIOLATIONS:
                caught = count
                break
    if caught is not None:
        walk(*numbers[caught - 1])
    meaning = (inspect.getdoc(module.BUGS[bug]) or "").splitlines()[0]
    return Hunt(mode, bug, meaning, layer, caught, time.monotonic() - begun)


def main() -> int:
    """Hunt for all mistakes, and print a table for each mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--seeds", type=int, default=20_000, help="random walks for a mistake")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    modes = options.mode or MODES
    bugs = {"classic": classic_planted.BUGS, "dledger": dledger_planted.BUGS}
    jobs = [(mode, bug, options.seeds) for mode in modes for bug in bugs[mode]]
    found: list[Hunt] = []
    with multiprocessing.Pool(options.processes, maxtasksperchild=1) as pool:
        for one in pool.imap_unordered(hunt, jobs, chunksize=1):
            print(f"{one.mode} {one.name}: {one.walks}, {one.seconds:.1f} s", file=sys.stderr)
            found.append(one)
    for mode in modes:
        print(f"\n## Mode {mode}\n\n| mistake | what is wrong | caught by | walks |")
        print("|---|---|---|---|")
        for one in sorted((one for one in found if one.mode == mode), key=lambda one: one.name):
            print(one.row())
    missed = [one.name for one in found if one.walks is None]
    print(f"\n{len(found)} mistakes, {len(missed)} not caught.")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
