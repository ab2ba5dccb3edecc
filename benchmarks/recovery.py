"""Restart a node with a log of 1 GiB, after a clean stop and after SIGKILL, until it serves.

    python -m benchmarks.recovery [--gib 1] [--repeats 5] [--dir FOLDER]

The node is a master without slaves, started by its command. The time is that from the start of the
process to the ready line. Before each SIGKILL the benchmark puts new messages, so that the log ends
after everything that a clean stop recorded. The peers are an interpreter that imports the same
modules, the minimum of any start; and, for a store without hastore's own files, of which recovery
must read far more, reading all of its log files.
"""

import argparse
import pathlib
import shutil
import signal
import subprocess
import sys
import time

from benchmarks.bare import PIECE_BYTES
from benchmarks.common import MIB, Group, figure, fill_store, save, say, scratch
from benchmarks.loads import pipelined

FRESH_PUTS = 5_000


def bare_start() -> float:
    """Return the seconds that an interpreter takes to import the modules of a node."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import hastore.server.node"], check=True, timeout=30.0)
    return time.perf_counter() - began


def read_all(folder: pathlib.Path) -> float:
    """Return the seconds that it takes to read the log's files once."""
    began = time.perf_counter()
    buffer = bytearray(PIECE_BYTES)
    for path in sorted((folder / "commitlog").iterdir()):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                continue
    return time.perf_counter() - began


def forget(store: pathlib.Path) -> None:
    """Remove hastore's own files from a closed store, as if RocketMQ had written it."""
    shutil.rmtree(store / "hastore")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", help="folder for the stores (default: the temporary folder)")
    given = parser.parse_args()
    size, file_size = int(given.gib * 1024 * MIB), 1024 * MIB
    bare: list[float] = []
    clean: list[float] = []
    killed: list[float] = []
    foreign: list[float] = []
    scanned: list[float] = []
    with (
        scratch(given.dir, 4 * file_size + size) as folder,
        Group(folder, 1, role="ASYNC_MASTER", store={"commitlog_file_size": file_size}) as group,
    ):
        node = group[1]
        say(f"recovery: writing {given.gib:g} GiB of log")
        fill_store(node.store, size, file_size)
        node.start()
        node.stop()
        for repeat in range(given.repeats):
            bare.append(bare_start())
            clean.append(node.start())
            pipelined(group.bootstrap, in_flight=512, count=FRESH_PUTS, acks=1)
            node.stop(signal.SIGKILL)
            killed.append(node.start())
            node.stop()
            say(
                f"recovery {repeat + 1}/{given.repeats}: clean {clean[-1]:.2f} s, after SIGKILL "
                f"{killed[-1]:.2f} s, imports alone {bare[-1]:.2f} s"
            )
        scanned.append(read_all(node.store))
        forget(node.store)
        foreign.append(node.start())
        node.stop()
    peer = "the same imports"
    figures = [
        figure("restart after a clean stop", "s", clean, peer, bare),
        figure("restart after SIGKILL", "s", killed, peer, bare),
        figure("first start on RocketMQ's store", "s", foreign, "reading its files", scanned),
    ]
    save("recovery", figures, {"bytes": size, "file_size": file_size, "fresh_puts": FRESH_PUTS})


if __name__ == "__main__":
    main()
