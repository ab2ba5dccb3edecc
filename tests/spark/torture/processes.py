"""The processes of a job: the driver, Spark's JVM, and its Python workers."""

import os

from tests.process.harness import wait_until

GONE_S = 300.0


def children(pid):
    """Return a process and all that descend from it."""
    found = [pid]
    for one in found:
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{task}/children") as file:
                    found += [int(child) for child in file.read().split()]
        except OSError:
            continue  # it has ended
    return found


def is_worker(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"pyspark.daemon" in file.read()
    except OSError:
        return False


def is_alive(pid):
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids):
    """Wait until no process of a killed job is left: none may outlive its driver."""
    wait_until(lambda: not any(map(is_alive, pids)), GONE_S, "a process has outlived its driver")
