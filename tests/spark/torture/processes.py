"""The processes of a job: the driver, Spark's JVM, and its Python workers."""

import os
import time


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


def wait_until_gone(pids):
    """Wait until no process of a killed job is left: none may outlive its driver."""
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
