"""Replicate a log of 1 GiB to a new, empty slave; the peers are RocketMQ and bare copies of it.

    python -m benchmarks.replication [--repeats 5] [--scale 1] [--dir FOLDER]

Each repeat runs all of these, in turn:

  * `sendfile` to `recv_into` with 1 MiB buffers: the limit of loopback and the page cache;
  * the same, with each piece written to a new file, preallocated like a log file;
  * RocketMQ: a bare store as the master and one as the slave, without brokers, in JVMs that stay
    warm. Timed from the connection to the last byte, and until the slave's queues are complete;
  * hastore: a new master process on the log, a new slave process on an empty store. Timed from the
    slave's log line that it follows, to its report of the last byte, and until its queues and
    index are complete.

CPU seconds count from the start of the slave; RocketMQ's until its queues are complete.
"""

import contextlib
import pathlib
import shutil
import time
from typing import Any

from benchmarks.bare import bare_copy
from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Group,
    arguments,
    at_least,
    at_most,
    figure,
    fill_store,
    save,
    say,
    scratch,
    touch_memory,
    wait_until,
)
from benchmarks.maven import peer_version
from benchmarks.rocketmq import RocketStores
from benchmarks.side_by_side import start_peer

REPLAY_S = 60.0
WARM_ROUNDS = 2  # of RocketMQ only: its first copy takes twice the CPU of its third
FILE_BYTES = 1024 * MIB
Run = dict[str, Any]


def replicate(group: Group, end: int) -> Run:
    """Start a new pair on the log in node 1's store; return the seconds and costs."""
    master, slave = group[1], group[2]
    shutil.rmtree(slave.store, ignore_errors=True)
    (master.store / "hastore" / "node.json").unlink(missing_ok=True)  # a new group each time
    master.start()
    slave_start = slave.start()
    before = {"master": master.cost(), "slave": slave.cost()}

    def reported() -> bool:
        return any(s["ack_offset"] == end for s in master.status()["slaves"])

    wait_until(reported, 60.0, "the slave did not report the log's end", poll_s=0.004)
    all_reported = time.time()
    began = wait_until(lambda: slave.said("following node"), 5.0, "the slave never followed")
    after = {"master": master.cost(), "slave": slave.cost()}
    wait_until(
        lambda: slave.status()["dispatched_offset"] == end, REPLAY_S, "replay did not end", 0.02
    )
    caught_up = time.time()
    last = {"master": master.cost(), "slave": slave.cost()}
    master.stop()
    slave.stop()
    check_equal(master.store, slave.store, end)
    return {
        "seconds": all_reported - began,
        "caught_up_seconds": caught_up - began,
        "slave_start_seconds": slave_start,
        "cpu_s": {k: after[k].cpu_s - before[k].cpu_s for k in after},
        "cpu_caught_up_s": {k: last[k].cpu_s - before[k].cpu_s for k in after},
        "costs": last,
    }


def check_equal(left: pathlib.Path, right: pathlib.Path, end: int) -> None:
    """Compare both logs byte by byte up to `end`; a wrong copy must not count as a figure."""
    for path in sorted((left / "commitlog").iterdir()):
        start = int(path.name)
        with open(path, "rb") as one, open(right / "commitlog" / path.name, "rb") as other:
            due = min(path.stat().st_size, end - start)
            while due > 0:
                piece = min(8 * MIB, due)
                if one.read(piece) != other.read(piece):
                    raise RuntimeError(f"{path.name}: the copies differ")
                due -= piece


def open_copy(rocket: RocketStores, store: pathlib.Path) -> None:
    """Open a copy of hastore's store as the store of RocketMQ's master."""
    shutil.copytree(store, rocket.root("master"), ignore=shutil.ignore_patterns("hastore"))
    rocket.open("master")


def figures_of(
    runs: list[Run], rocket_runs: list[Run], bare: list[float], stored: list[float], end: int
) -> list[dict[str, Any]]:
    """Return the figures of all repeats."""
    gib, name = end / 2**30, "replication to an empty slave"

    def rates(of: list[Run], key: str) -> list[float]:
        return [end / run[key] / 1e6 for run in of]

    ours, theirs = rates(runs, "seconds"), rates(rocket_runs, "seconds")
    late, their_late = rates(runs, "caught_up_seconds"), rates(rocket_runs, "caught_up_seconds")
    out = [
        figure(name, "MB/s", ours, "RocketMQ", theirs, at_least(4.0)),
        figure(name, "MB/s", ours, "sendfile, recv_into", bare, at_least(0.7)),
        figure(name, "MB/s", ours, "sendfile, recv_into, pwrite", stored),
        figure(
            "the same until its queues are caught up",
            "MB/s",
            late,
            "RocketMQ",
            their_late,
            at_least(2.0),
        ),
    ]
    for who, limit in (("slave", 0.4), ("master", 0.5)):
        used = [run["cpu_caught_up_s"][who] / gib for run in runs]
        peers = [run["cpu_s"][who] / gib for run in rocket_runs]
        text = f"CPU of the {who} until the queues are caught up"
        out.append(figure(text, "s/GiB", used, "RocketMQ", peers, at_most(limit)))
    for who in ("slave", "master"):
        used = [run["cpu_s"][who] / gib for run in runs]
        out.append(figure(f"CPU of the {who} until all is reported", "s/GiB", used))
    for who in ("master", "slave"):
        out.append(
            figure(
                f"memory of the {who} that is not mapped log, replicating",
                "MiB",
                [run["costs"][who].anonymous_mib for run in runs],
                "RocketMQ's bare store",
                [run["costs"][who].anonymous_mib for run in rocket_runs],
                resident=max(run["costs"][who].resident_mib for run in runs),
            )
        )
    return out


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    size = int(FILE_BYTES * given.scale)
    bare: list[float] = []
    stored: list[float] = []
    runs: list[Run] = []
    rocket_runs: list[Run] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 10 * FILE_BYTES))
        group = stack.enter_context(
            Group(
                folder, store={"commitlog_file_size": FILE_BYTES}, ha={"max_gap_not_in_sync": 2**40}
            )
        )
        say(f"replication: writing {size / 2**30:g} GiB of log")
        touch_memory(folder, 4 * size)
        end = fill_store(group[1].store, size, FILE_BYTES)
        first = group[1].store / "commitlog" / f"{0:020}"
        rocket = start_peer(stack, "RocketMQ", lambda: RocketStores(folder))
        if rocket is not None:
            open_copy(rocket, group[1].store)
            for _ in range(WARM_ROUNDS):
                rocket.follow(end)
            check_equal(rocket.root("master"), rocket.root("slave"), end)
        for repeat in range(given.repeats):
            bare.append(end / bare_copy(first, end, None) / 1e6)
            stored.append(end / bare_copy(first, end, folder / "copy") / 1e6)
            if rocket is not None:
                rocket_runs.append(rocket.follow(end))
            runs.append(replicate(group, end))
            text = f"bare {bare[-1]:,.0f}, into a file {stored[-1]:,.0f}"
            for who, all_runs in (("hastore", runs), ("RocketMQ", rocket_runs)):
                if all_runs:
                    text += f"; {who} {end / all_runs[-1]['seconds'] / 1e6:,.0f}, caught up "
                    text += f"{end / all_runs[-1]['caught_up_seconds'] / 1e6:,.0f}"
            say(f"replication {repeat + 1}/{given.repeats}, MB/s: {text}")
    settings = {"bytes": end, "file_size": FILE_BYTES, "body": BODY_BYTES}
    figures = figures_of(runs, rocket_runs, bare, stored, end)
    save("replication", figures, settings | {"rocketmq": peer_version("rocketmq")})


if __name__ == "__main__":
    main()
