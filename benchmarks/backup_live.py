"""Back up a node with 10 GiB of log while puts go on, beside the same puts without a backup.

    python -m benchmarks.backup_live [--repeats 5] [--scale 1] [--dir FOLDER]

One group, a master and a slave. A client puts one message after the other, synchronously, for as
long as `hastore backup take` copies the whole log of the master, then of the slave, to a folder on
the same disk: both nodes, the client and the copy share the machine. Each is measured beside as
many puts just before, without a copy. Needs 31 GiB of disk.
"""

import contextlib
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import (
    BODY_BYTES,
    MIB,
    ROOT,
    Group,
    Node,
    arguments,
    at_most,
    figure,
    percentile,
    save,
    say,
    scratch,
)
from benchmarks.loads import batched, blocking

LOG_GIB = 10
QUIET_PUTS = 20_000
STEP = 500  # puts, then it is looked whether the copy has ended
SYNC_S = 600.0
QUIET = "without a backup"


def take(node: Node, target: pathlib.Path) -> "subprocess.Popen[str]":
    """Start `hastore backup take` for a node."""
    command = [sys.executable, str(ROOT / "bin" / "hastore"), "backup", "take"]
    return subprocess.Popen(
        [*command, "-c", str(node.config), str(target)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def puts_beside(hosts: list[str], node: Node, target: pathlib.Path) -> tuple[list[float], float]:
    """Put until a backup of a node has ended; return the ms of each put, and its seconds."""
    took: list[float] = []
    began = time.perf_counter()
    copying = take(node, target)
    try:
        while copying.poll() is None:
            took += blocking(hosts, STEP)
        seconds = time.perf_counter() - began
    finally:
        copying.kill()
    said = copying.communicate()[0]
    if copying.returncode:
        raise RuntimeError(f"the backup failed: {said}")
    return took, seconds


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    size = int(LOG_GIB * 1024 * MIB * given.scale)
    quiet: dict[str, list[list[float]]] = {"master": [], "slave": []}
    beside: dict[str, list[list[float]]] = {"master": [], "slave": []}
    rates: dict[str, list[float]] = {"master": [], "slave": []}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 3 * size + 1024 * MIB))
        group = stack.enter_context(Group(folder, 2))
        group.start()
        say(f"backup_live: writing {size / 2**30:g} GiB of log")
        batched(group.bootstrap, batch=100, in_flight=8, count=size // (BODY_BYTES + 100))
        group.wait_in_sync(SYNC_S)
        for repeat in range(given.repeats):
            for place, node in (("master", group[1]), ("slave", group[2])):
                target = folder / "backup"
                quiet[place].append(blocking(group.bootstrap, int(QUIET_PUTS * given.scale)))
                took, seconds = puts_beside(group.bootstrap, node, target)
                copied = sum(one.stat().st_size for one in target.rglob("*") if one.is_file())
                shutil.rmtree(target)
                beside[place].append(took)
                rates[place].append(copied / MIB / seconds)
                say(
                    f"backup_live {repeat + 1}/{given.repeats}, {place}: p99 "
                    f"{percentile(quiet[place][-1], 0.99):.2f} ms, with the backup "
                    f"{percentile(took, 0.99):.2f} ms; {rates[place][-1]:.0f} MiB/s"
                )
    figures: list[dict[str, Any]] = []
    for place in quiet:
        for share, name, target_of in ((0.5, "p50", None), (0.99, "p99", at_most(2.0))):
            ours, theirs = (
                [percentile(times, share) for times in found[place]] for found in (beside, quiet)
            )
            label = f"one blocking put during a backup of the {place}, {name}"
            figures.append(figure(label, "ms", ours, QUIET, theirs, target_of))
        figures.append(figure(f"rate of that backup of the {place}", "MiB/s", rates[place]))
    save("backup_live", figures, {"log_gib": LOG_GIB * given.scale})


if __name__ == "__main__":
    main()
