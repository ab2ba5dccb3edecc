"""Search all states of small groups: python -m tests.explore, or make explore.

Prints a line for each scope, and the shortest way to what is broken. The exit code is 1 if a
promise is broken, or if a search has not met what its scope is for.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.explore.scopes import MODES, planted_by_scope, search_of

HUNTED_MOST = 50_000  # states for one planted mistake
HEAL_EVERY = 11  # of these: some mistakes show only when nothing fails any more


def main(words: list[str]) -> int:
    """Search the scopes that the words name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("--mode", default="both", choices=[*sorted(MODES), "both"])
    parser.add_argument("--states", type=int, default=2_000_000, help="of each scope, at most")
    parser.add_argument("--scope", default="", help="one of them alone, by its name")
    parser.add_argument("--probe-every", type=int, default=1_000, help="heal one state of so many")
    parser.add_argument(
        "--planted", action="store_true", help="search for the planted mistakes instead"
    )
    given = parser.parse_args(words)
    modes = sorted(MODES) if given.mode == "both" else [given.mode]
    chosen = [(m, name) for m in modes for name in MODES[m] if given.scope in ("", name)]
    if not chosen:
        known = ", ".join(name for mode in modes for name in MODES[mode])
        parser.error(f"no such scope: {given.scope}; there are {known}")
    logging.disable(logging.CRITICAL)  # the nodes tell of each fault
    print(time.strftime("%Y-%m-%d %H:%M"), file=sys.stderr)
    look = _hunt if given.planted else _search
    good = [look(mode, name, given) for mode, name in chosen]
    return 0 if all(good) else 1


def _search(mode: str, name: str, given: argparse.Namespace) -> bool:
    """Search one scope; return whether all is well."""
    search = search_of(
        mode, name, states_max=given.states, probe_every=given.probe_every,
        progress=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
    )  # fmt: skip
    report = search.run()
    print(f"{mode}, {name}: {report.line()}", flush=True)
    if report.found:
        print(f"BROKEN: {report.found}")
        print("\n".join(f"{n:3} {line}" for n, line in enumerate(report.story, 1)))
        return False
    missing = search.missing()
    if missing:
        print(f"VACUOUS: {name} has not met {', '.join(missing)}; give more STATES")
    return not missing


def _hunt(mode: str, name: str, given: argparse.Namespace) -> bool:
    """Plant each mistake that a scope must show; print the shortest way to it."""
    good = True
    for bug, planted in planted_by_scope(mode, name):
        with planted():
            most = min(given.states, HUNTED_MOST)
            report = search_of(mode, name, states_max=most, probe_every=HEAL_EVERY).run()
        print(
            f"{mode}, {bug}: {report.found or 'MISSED'} ({name}, {len(report.story)} events, "
            f"{report.states:,} states, {report.cpu_seconds:.1f} s of CPU)"
        )
        print("\n".join(f"    {n:2} {line}" for n, line in enumerate(report.story, 1)), flush=True)
        good = good and bool(report.found)
    return good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
