"""Replicate a log to a new, empty slave, beside bare copies of the same file over loopback.

    python -m benchmarks.replication [--gib 1] [--repeats 5] [--dir FOLDER]

Each repeat runs all three, in turn:
  * `sendfile` to `recv_into` of 1 MiB buffers: what loopback and the page cache can do at all;
  * the same, and each piece is written to a new file, preallocated like a log file;
  * hastore: a fresh master process on the log, a fresh slave process on an empty store. Clock: from
    the moment the slave says that it follows, to the master having its report of the last byte, and
    further until the slave's queues and index know all of it.
"""

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import shutil
import socket
import time
from typing import Any

from benchmarks.common import (
    MIB,
    Cost,
    Group,
    ended,
    figure,
    fill_store,
    save,
    say,
    scratch,
    touch_memory,
    wait_until,
)

PIECE_BYTES = MIB
REPLAY_S = 60.0


def send_file(path: str, listener: socket.socket, size: int) -> None:
    """Send the first `size` bytes of a file to whoever connects."""
    sock, _ = listener.accept()
    with sock, open(path, "rb") as file:
        position = 0
        while position < size:
            position += os.sendfile(sock.fileno(), file.fileno(), position, size - position)
        sock.recv(1)  # until the receiver has all


def bare_copy(path: pathlib.Path, size: int, target: pathlib.Path | None) -> float:
    """Copy a file's bytes over loopback, into memory or into a new file; returns seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        fork = multiprocessing.get_context("fork")
        sender = fork.Process(target=send_file, args=(str(path), listener, size), daemon=True)
        sender.start()
        stack.enter_context(ended(sender))
        sock = stack.enter_context(socket.create_connection(listener.getsockname()))
        descriptor = None
        if target is not None:
            file = stack.enter_context(open(target, "wb", buffering=0))
            descriptor = file.fileno()
            os.posix_fallocate(descriptor, 0, size)
        buffer = memoryview(bytearray(PIECE_BYTES))
        got = 0
        began = time.perf_counter()
        while got < size:
            count = sock.recv_into(buffer)
            if not count:
                raise RuntimeError("the sender ended early")
            if descriptor is not None:
                os.pwrite(descriptor, buffer[:count], got)
            got += count
        seconds = time.perf_counter() - began
        sock.sendall(b"x")
    if target is not None:
        target.unlink()
    return seconds


def replicate(group: Group, end: int) -> dict[str, Any]:
    """Start a new pair on the log in node 1's store; returns seconds and costs."""
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
        lambda: slave.status()["dispatched_offset"] == end, REPLAY_S, "replay did not end", 0.05
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
    """Compare both logs byte by byte up to `end`; what was fast but wrong is no figure."""
    for path in sorted((left / "commitlog").iterdir()):
        start = int(path.name)
        with open(path, "rb") as one, open(right / "commitlog" / path.name, "rb") as other:
            due = min(path.stat().st_size, end - start)
            while due > 0:
                piece = min(8 * MIB, due)
                if one.read(piece) != other.read(piece):
                    raise RuntimeError(f"{path.name}: the copies differ")
                due -= piece


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", help="where the stores lie (default: the temporary folder)")
    given = parser.parse_args()
    size = int(given.gib * 1024 * MIB)
    file_size = 1024 * MIB
    with (
        scratch(given.dir, 8 * file_size + size) as folder,
        Group(
            folder, store={"commitlog_file_size": file_size}, ha={"max_gap_not_in_sync": 2**40}
        ) as group,
    ):
        say(f"replication: writing {given.gib:g} GiB of log")
        touch_memory(folder, 4 * size)
        end = fill_store(group[1].store, size, file_size)
        first = group[1].store / "commitlog" / f"{0:020}"
        span = min(end, file_size)
        bare: list[float] = []
        stored: list[float] = []
        runs: list[dict[str, Any]] = []
        for repeat in range(given.repeats):
            bare.append(span / bare_copy(first, span, None) / 1e6)
            stored.append(span / bare_copy(first, span, folder / "copy") / 1e6)
            run = replicate(group, end)
            runs.append(run)
            rate, late = end / run["seconds"] / 1e6, end / run["caught_up_seconds"] / 1e6
            say(
                f"replication {repeat + 1}/{given.repeats}: {rate:,.0f} MB/s, caught up "
                f"{late:,.0f} MB/s; bare {bare[-1]:,.0f} MB/s, into a file {stored[-1]:,.0f} MB/s"
            )
    rates = [end / run["seconds"] / 1e6 for run in runs]
    replayed = [end / run["caught_up_seconds"] / 1e6 for run in runs]
    gib = end / 2**30
    figures = [
        figure("replication to an empty slave", "MB/s", rates, "sendfile, recv_into", bare),
        figure(
            "replication to an empty slave", "MB/s", rates, "sendfile, recv_into, pwrite", stored
        ),
        figure("the same until its queues are caught up", "MB/s", replayed),
    ]
    for name in ("master", "slave"):
        used = [run["cpu_s"][name] / gib for run in runs]
        figures.append(figure(f"CPU of the {name} until all is reported", "s/GiB", used))
    used = [run["cpu_caught_up_s"]["slave"] / gib for run in runs]
    figures.append(figure("CPU of the slave until its queues are caught up", "s/GiB", used))
    for name in ("master", "slave"):
        costs: list[Cost] = [run["costs"][name] for run in runs]
        own = [cost.anonymous_mib for cost in costs]
        resident = max(cost.resident_mib for cost in costs)
        figures.append(
            figure(f"memory of the {name} that is not mapped log", "MiB", own, resident=resident)
        )
    save("replication", figures, {"bytes": end, "file_size": file_size, "body": 1024})


if __name__ == "__main__":
    main()
