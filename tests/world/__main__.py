"""Walks on demand: `python -m tests.world --mode classic --seed 0 --seeds 100`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from hastore.config.model import Mode
from tests.world.events import KINDS
from tests.world.isolated import run
from tests.world.plans import plan_of, tour_of
from tests.world.shrink import shrink

ALL_KINDS = 100  # so many walks have every kind of event


def main() -> int:
    """Run the walks; return 1 if one fails, or if a kind of event never came in many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["classic", "dledger", "both"], default="both")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--tour", choices=["tame", "rest", "registry"], help="each kind once")
    parser.add_argument("--lines", type=int, default=0, help="of the nodes' logs, to print")
    parser.add_argument("--keep-going", action="store_true", help="also after a walk that fails")
    parser.add_argument("--whole", action="store_true", help="do not reduce a walk that fails")
    options = parser.parse_args()
    modes = list(Mode) if options.mode == "both" else [Mode(options.mode)]
    fired: Counter[str] = Counter()
    failed = walks = 0
    begun = time.monotonic()
    for seed in range(options.seed, options.seed + options.seeds):
        for mode in modes:
            plan = tour_of(mode, options.tour, seed) if options.tour else plan_of(seed, mode)
            walks += 1
            try:
                outcome = run(plan, lines=options.lines)
            except RuntimeError as failure:  # of the world itself, or a thread that never waits
                print(f"seed {seed}, mode {mode.value}: {failure}")
                failed += 1
                continue
            fired += outcome.fired
            if options.lines:
                print("\n".join(outcome.log_lines))
            if options.seeds == 1 or outcome.problems:
                print(outcome.story())
                print(f"digest {outcome.digest:08x}, {outcome.virtual_s:.1f} s, "
                      f"{outcome.switches} switches, {outcome.reads} reads\n")  # fmt: skip
            if outcome.problems:
                failed += 1
                if not options.whole:
                    small = shrink(outcome, run)
                    print(f"reduced to {len(small.plan.events)} events:\n{small.story()}\n")
                if not options.keep_going:
                    return 1
    took = time.monotonic() - begun
    print(f"{walks} walks in {took:.1f} s, {walks / took:.2f} a second; {failed} failed")
    missing = []
    for name, kind in KINDS.items():
        print(f"  {fired[name]:6d}  {name}")
        if not fired[name] and set(modes) & set(kind.modes):
            missing.append(name)
    if walks >= ALL_KINDS and missing:
        print(f"these kinds of event have not come: {', '.join(missing)}")
        failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
