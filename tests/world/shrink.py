"""Reduce a failing walk: leave out events as long as it still fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from tests.world.plans import Outcome, Plan, without

Run = Callable[[Plan], Outcome]


def kind_of(problem: str) -> str:
    """Return a problem without what differs from walk to walk: numbers, and who it was."""
    text = problem.splitlines()[-1] if problem.startswith(("n", "m", "p", "r")) and (
        "Traceback" in problem) else problem  # fmt: skip
    return re.sub(r"Sent\([^)]*\)|\([^)]*\)|'[^']*'|[a-z]?\d+", "#", text)[:60]


def shrink(failed: Outcome, run: Run, *, runs: int = 60) -> Outcome:
    """Return the smallest outcome that was found with a problem of the same kind.

    At most `runs` walks are run: halves of the events are left out first, then smaller parts,
    single ones at last; then threads that lose their turn at locks.
    """
    wanted = {kind_of(problem) for problem in failed.problems}
    best = failed

    def fails(plan: Plan) -> bool:
        nonlocal best, runs
        runs -= 1
        outcome = run(plan)
        if wanted & {kind_of(problem) for problem in outcome.problems}:
            best = outcome
            return True
        return False

    size = max(1, len(best.plan.events) // 2)
    while runs > 0 and best.plan.events:
        at, dropped = 0, False
        while at < len(best.plan.events) and runs > 0:
            part = set(range(at, at + size))
            if fails(without(best.plan, part)):
                dropped = True
            else:
                at += size
        if size == 1 and not dropped:
            break
        size = max(1, size // 2)
    if best.plan.preempts and runs > 0:
        fails(replace(best.plan, preempts=0.0))
    return best
