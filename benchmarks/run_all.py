"""Run all benchmarks, one after the other, and show their figures and targets.

    python -m benchmarks.run_all [--repeats 5] [--dir FOLDER] [--only NAME] [--write-docs]

Each benchmark writes `benchmarks/results/NAME.json`; this module then writes
`results/summary.json` and docs/img/benchmarks.png. `--write-docs` also writes the figures into
docs/benchmarks.md and README.md, between their marks. Without Java and Maven the peers in Java are
left out.
"""

import argparse
import subprocess
import sys
import time

from benchmarks import plot
from benchmarks.common import RESULTS, ROOT, say
from benchmarks.maven import NoPeer, class_path, peer_version
from benchmarks.report import read, show, write_docs, write_summary

NAMES = ("puts", "flush", "replication", "consume", "restart", "failover", "growth")
MORE = (
    "growth_log",
    "recovery",
    "profile_put",
    "dledger",
    "security",
    "tls_links",
    "remoting",
    "rebalance",
    "delays",
    "groups",
    "metrics_cost",
    "backup_live",
    "tasks",
    "develop",
)  # with --only
LIMIT_S = 600.0
LONG_LIMIT_S = 3_600.0


def run(name: str, given: argparse.Namespace) -> float | None:
    """Run one benchmark in a process of its own; return its seconds, or None if it failed."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--repeats", str(given.repeats)]
    if given.scale != 1.0:
        command += ["--scale", str(given.scale)]
    if given.dir is not None:
        command += ["--dir", given.dir]
    began = time.monotonic()
    limit_s = LONG_LIMIT_S if name in MORE else LIMIT_S
    try:
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=limit_s)
        good = not ended.returncode
    except subprocess.TimeoutExpired:
        good = False
    seconds = time.monotonic() - began
    say(f"{name}: {'done' if good else 'FAILED'} ({seconds:.0f} s)")
    return seconds if good else None


def get_peers() -> None:
    """Download and build the peers before anything is timed; print which are left out."""
    for name in ("rocketmq", "kafka"):
        began = time.monotonic()
        try:
            class_path(name)
        except NoPeer as reason:
            say(f"{name} is left out everywhere: {reason}")
        else:
            say(f"{name} {peer_version(name)} is ready ({time.monotonic() - began:.0f} s)")


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all amounts")
    parser.add_argument("--dir", help="folder for the stores (default: the temporary folder)")
    parser.add_argument("--only", choices=NAMES + MORE)
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--no-run", action="store_true", help="only show the latest results")
    given = parser.parse_args()
    names = [given.only] if given.only else list(NAMES)
    began = time.monotonic()
    took: dict[str, float | None] = {}
    if not given.no_run:
        get_peers()
        took = {name: run(name, given) for name in names}
    documents = [found for name in NAMES + MORE if (found := read(name)) is not None]
    for document in documents:
        if document["benchmark"] in names:
            show(document)
    seconds = {name: value for name, value in took.items() if value is not None}
    RESULTS.mkdir(exist_ok=True)
    summary = write_summary(documents, seconds)
    plot.main()
    if given.write_docs:
        write_docs(documents, summary)
    say(
        f"{summary['met']} targets met, {summary['missed']} missed, {summary['not_run']} not run; "
        f"{time.monotonic() - began:.0f} s"
    )
    if None in took.values():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
