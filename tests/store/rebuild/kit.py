"""Stores on disk for the tests of a rebuild, and what replay makes of them."""

from hastore.fs.filesystem import REAL
from hastore.store.rebuild.layout import Sizes, run_here
from hastore.store.rebuild.rebuild import How
from tests.store.derived_files import ENTRIES, SLOTS, UNITS, Derived

SIZES = Sizes(UNITS, SLOTS, ENTRIES)


class Quiet:
    """Shows nothing; `steps` has the total and the sum of the units of each step."""

    def __init__(self):
        self.kept = ""
        self.steps = {}

    def begin(self, text, total, unit):
        self._step = self.steps[text] = [total, 0]

    def advance(self, amount):
        self._step[1] += amount

    def keep(self, text):
        self.kept = text


def how(*, range_bytes=9_000, buckets=5, index=True, runner=run_here):
    return How(runner, Quiet(), range_bytes=range_bytes, buckets=buckets, index=index)


def write_log(root, log):
    """Write a MemoryLog as the commit log of a store that RocketMQ closed cleanly."""
    (root / "commitlog").mkdir(parents=True)
    for at in range(0, len(log.data), log.file_size):
        path = root / "commitlog" / f"{log.base + at:020}"
        path.write_bytes(bytes(log.data[at : at + log.file_size]).ljust(log.file_size, b"\0"))


def derived_files(root):
    return Derived(root, None, None, None).files()


__all__ = ["REAL", "SIZES", "Quiet", "derived_files", "how", "write_log"]
