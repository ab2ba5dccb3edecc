"""Hunt through crash states: python -m tests.crash, or make crash-points.

Prints progress, what was covered, and each finding with what replays it. The exit code is 1 if a
promise was broken, and 2 if nothing was, but a kind of state or a durable file had none.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import logging
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.crash.hunt import Report, hunt
from tests.crash.planted import MISTAKES, hunt_planted
from tests.crash.points import Budget
from tests.crash.workloads import SHARES, WORKLOADS, missing

ROUND = 500  # states of one seed of a workload, at most
BUDGET = Budget(drawn=12, torn=5, all_of=256)
SHARE = 0.12  # of the points of a round
SHOWN = 3  # findings of a kind
EVERY_S = 10.0


def one_round(name: str, seed: int, most: int) -> Report:
    """Hunt through one seed of a workload, in a process of its own."""
    logging.disable(logging.CRITICAL)  # stores warn of what a crash has left
    return hunt(WORKLOADS[name], seed, BUDGET, most=most, share=SHARE)


def rounds(only: list[str], seed: int) -> Iterator[tuple[str, int]]:
    """Yield workloads with their seeds, each as often as its share says."""
    for number in itertools.count(seed):
        for turn in range(max(SHARES.values())):
            yield from ((name, number * 10 + turn) for name in only if turn < SHARES[name])


def run(only: list[str], seed: int, states: int, workers: int) -> Report:
    """Hunt until so many states were checked; print progress."""
    report, began, told = Report(), time.monotonic(), time.monotonic()
    following = rounds(only, seed)
    shown: Counter[str] = Counter()
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        waiting: set[concurrent.futures.Future[Report]] = set()
        while report.states < states or waiting:
            while report.states + len(waiting) * ROUND < states and len(waiting) < 2 * workers:
                waiting.add(pool.submit(one_round, *next(following), ROUND))
            if not waiting:
                waiting.add(pool.submit(one_round, *next(following), states - report.states))
            done, waiting = concurrent.futures.wait(
                waiting, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for one in done:
                found = one.result()
                report.add(found)
                _show(found, shown)
            if time.monotonic() - told > EVERY_S:
                told = time.monotonic()
                print(_progress(report, told - began), file=sys.stderr, flush=True)
    print(_progress(report, time.monotonic() - began), flush=True)
    return report


def _show(found: Report, shown: Counter[str]) -> None:
    """Print findings; of those that differ in numbers only, the first ones."""
    for one in found.findings:
        kind = f"{one.workload} {re.sub(r'[0-9]+', '#', one.reason)[:100]}"
        shown[kind] += 1
        if shown[kind] <= SHOWN:
            print(f"\n{one}\n{one.trace if shown[kind] == 1 else ''}", flush=True)


def _progress(report: Report, seconds: float) -> str:
    return (
        f"{report.states:,} states and {report.again:,} second crashes in {seconds:.0f} s,"
        f" {len(report.findings)} findings"
    )


def run_planted(most: int) -> int:
    """Hunt for each planted mistake; return 1 if one is not found."""
    logging.disable(logging.CRITICAL)
    lost = 0
    for name in MISTAKES:
        states, finding = hunt_planted(name, most=most)
        lost += finding is None
        print(f"{name}: {states:,} states: {finding or 'NOT FOUND'}", flush=True)
    return min(lost, 1)


def main(words: list[str]) -> int:
    """Run the hunt that the words ask for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--states", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0, help="repeats a run; 0: a new one")
    parser.add_argument("--only", default="", help=f"these, with commas: {', '.join(WORKLOADS)}")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--round", type=int, help="replay the one round that a finding names")
    parser.add_argument("--planted", action="store_true", help="hunt for planted mistakes instead")
    given = parser.parse_args(words)
    if given.planted:
        return run_planted(given.states)
    only = [each for each in given.only.split(",") if each] or list(WORKLOADS)
    if unknown := [each for each in only if each not in WORKLOADS]:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if given.round is not None:
        report = one_round(only[0], given.round, ROUND)
        _show(report, Counter())
        return min(len(report.findings), 1)
    seed = given.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"seed {seed}, {given.states:,} states of {', '.join(only)}", flush=True)
    report = run(only, seed, given.states, given.workers)
    for title, counts in (
        ("state", report.kinds), ("last effect", report.effects), ("file", report.files),
    ):  # fmt: skip
        for name, count in sorted(counts.items()):
            print(f"  {title}: {name}: {count:,}")
    print(f"  names out of a journal's order: {report.unordered:,}")
    lacking = missing(report, only)
    for one in lacking:
        print(f"no state of {one}: the hunt has missed its point")
    return 1 if report.findings else 2 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
