"""Put and restart with a log of 1 GiB and with one of 16 GiB: does the size matter?

    make bench-growth            # python -m benchmarks.growth_log [--gib 16] [--dir FOLDER]

Writes 2 * (1 + GIB) GiB: the master's log by its own append, the slave's by replication. With less
free space it uses a smaller log, and says so. It takes 8 to 20 s per GiB, so it is not part of
`make bench`.
"""

import contextlib
import pathlib
import shutil
from typing import Any

from benchmarks.common import (
    BODY_BYTES,
    Group,
    arguments,
    figure,
    fill_store,
    save,
    say,
    scratch,
    wait_until,
)
from benchmarks.loads import blocking, pipelined
from benchmarks.side_by_side import OURS, Row, run_rounds, share

FILE_BYTES = 1024**3
START_S = 900.0
RESTARTS = 5


def make_group(folder: pathlib.Path, gib: int) -> Group:
    """Return a running pair whose log has `gib` GiB."""
    place = folder / f"log{gib}"
    place.mkdir()
    group = Group(place, 2, ha={"max_gap_not_in_sync": 2**40})
    say(f"growth_log: writing {gib} GiB")
    fill_store(group[1].store, gib * FILE_BYTES, FILE_BYTES)
    group.start(START_S)
    end = group[1].status()["max_offset"]

    def here() -> bool:
        return all(slave["ack_offset"] == end for slave in group[1].status()["slaves"])

    # With the large max_gap_not_in_sync the slave counts as in sync at once, so wait for its
    # report.
    wait_until(here, START_S, f"the slave did not get {gib} GiB", poll_s=0.2)
    return group


def restarts(group: Group) -> list[float]:
    """Return the seconds from a slave's start to its ready line, each after a clean stop."""
    took = []
    for _ in range(RESTARTS):
        group[2].stop()
        took.append(group[2].start())
    group.wait_in_sync(START_S)
    return took


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__, gib=16)
    gib = given.gib
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 8 * FILE_BYTES))
        fits = int(shutil.disk_usage(folder).free / FILE_BYTES - 8) // 2
        if fits < gib:
            say(f"growth_log: there is no room for {gib} GiB twice; using {fits}")
            gib = fits
        sizes = (1, gib)
        groups = [stack.enter_context(make_group(folder, size)) for size in sizes]
        loads: dict[str, Any] = {
            "one blocking put, p50": lambda hosts: lambda n: blocking(hosts, n),
            "64 puts in flight": lambda hosts: lambda n: pipelined(hosts, in_flight=64, count=n),
        }
        counts = {"one blocking put, p50": 1_000, "64 puts in flight": 20_000}
        rows = []
        for name, load in loads.items():
            of_group = {OURS: groups[1], "small": groups[0]}
            systems = {
                who: (counts[name], load(group.bootstrap)) for who, group in of_group.items()
            }
            unit = "ms" if "blocking" in name else "msg/s"
            label = f"{name}, log of {gib} GiB"
            rows.append(Row(label, unit, systems, {"small": ("log of 1 GiB", None)}))
        run_rounds(rows, {OURS: None, "small": None}, given.repeats, given.scale)
        took = [restarts(group) for group in groups]
    figures = rows[0].figures(pick=share(0.5)) + rows[1].figures()
    name = f"restart of a slave, clean, log of {gib} GiB"
    figures.append(figure(name, "s", took[1], "log of 1 GiB", took[0]))
    save("growth_log", figures, {"body": BODY_BYTES, "gib": gib})


if __name__ == "__main__":
    main()
