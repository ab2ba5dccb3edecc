"""The demo as a process, at 1/100 of its size and without Spark."""

import json

from hastore.demo.flights import count_rows
from tests.process.harness import hastore

SCALE = "0.01"


def run_small_demo(folder, *options):
    """Run `hastore demo` to its end; return its facts, how many rows it sent, and its stderr."""
    words = ("--json", "--scale", SCALE, "--no-spark", "--folder", str(folder))
    done = hastore("demo", *options, *words, timeout_s=800)
    assert done.returncode == 0, done.stderr
    facts, rows = json.loads(done.stdout), count_rows(float(SCALE))
    assert facts["messages"] == facts["queue_units_identical"] == rows
    return facts, rows, done.stderr
