"""Search all states of small groups: python -m tests.explore, or make explore.

Prints a line for each scope, and the shortest way to what is broken. The exit code is 1 if a
promise is broken, or if a search has not met what its scope is for.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from tests.explore.scopes import MODES, planted_by_scope, search_of


def main(words: list[str]) -> int:
    """Search the scopes that the words name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("--mode", default="dledger", choices=sorted(MODES))
    parser.add_argument("--states", type=int, default=2_000_000, help="of each scope, at most")
    scopes = "; ".join(f"{mode}: {', '.join(found)}" for mode, found in MODES.items())
    parser.add_argument("--scope", default="", help=f"one of them alone: {scopes}")
    parser.add_argument("--probe-every", type=int, default=1_000, help="heal one state of so many")
    parser.add_argument(
        "--planted", action="store_true", help="search for the planted mistakes instead"
    )
    given = parser.parse_args(words)
    known = MODES[given.mode]
    names = [given.scope] if given.scope else list(known)
    if not known.keys() >= set(names):
        parser.error(f"no such scope: {given.scope}; there are {', '.join(known)}")
    print(f"mode {given.mode}, {time.strftime('%Y-%m-%d %H:%M')}", file=sys.stderr)
    if given.planted:
        return _hunt(given.mode, names, given.states)
    bad = False
    for name in names:
        search = search_of(
            given.mode, name, states_max=given.states, probe_every=given.probe_every,
            progress=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
        )  # fmt: skip
        report = search.run()
        print(f"{name}: {report.line()}", flush=True)
        missing = search.missing() if not report.found else []
        if report.found:
            print(f"BROKEN: {report.found}")
            print("\n".join(f"{n:3} {line}" for n, line in enumerate(report.story, 1)))
        if missing:
            print(f"VACUOUS: {name} has not met {', '.join(missing)}; give more STATES")
        bad = bad or bool(report.found) or bool(missing)
    return 1 if bad else 0


def _hunt(mode: str, names: list[str], states: int) -> int:
    """Plant each mistake that a scope must show; print the shortest way to it."""
    missed = []
    for name in names:
        for bug, planted in planted_by_scope(mode, name):
            with contextlib.ExitStack() as stack:
                stack.enter_context(planted())
                report = search_of(mode, name, states_max=states).run()
                if not report.found:  # nothing forbidden happens, but perhaps too little
                    report = search_of(mode, name, states_max=states, probe_every=97).run()
            if not report.found:
                missed.append(bug)
            print(
                f"{bug}: {report.found or 'MISSED'} ({name}, {len(report.story)} events, "
                f"{report.states:,} states, {report.cpu_seconds:.1f} s of CPU)"
            )
            print("\n".join(f"    {n:2} {line}" for n, line in enumerate(report.story, 1)))
            sys.stdout.flush()
    if missed:
        print(f"MISSED: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
