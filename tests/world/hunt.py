"""Hunt planted mistakes: `python -m tests.world.hunt NAME...` prints the seed that catches each."""

from __future__ import annotations

import os
import sys
from functools import partial

from tests.world.isolated import run
from tests.world.plans import Outcome
from tests.world.planted import BUGS, plan_for, plant


def hunt(name: str, walks: int) -> Outcome | None:
    """Return the first walk that catches a mistake; None if none of so many does."""
    plans = [plan_for(name, seed) for seed in range(walks)]
    for plan in plans:
        outcome = run(plan, before=partial(plant, name))
        if outcome.problems:
            return outcome
    return None


if __name__ == "__main__":
    for chosen in sys.argv[1:] or BUGS:
        found = hunt(chosen, int(os.environ.get("WALKS", "14")))
        if found is None:
            print(f"{chosen}: not caught", flush=True)
        else:
            print(f"{chosen}: seed {found.plan.seed}: {found.problems[0][-200:]}", flush=True)
