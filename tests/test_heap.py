"""Freed memory: what is kept costs no page faults when it is used again, and is kept only once."""

import subprocess
import sys

from hastore.heap import STAYS_FREE_MS, BurstMemory

MIB = 1 << 20
SCRIPT = """
import resource, sys
from hastore.heap import keep_freed
if sys.argv[1] != "0":
    keep_freed(int(sys.argv[1]))
for _ in range(4):
    [bytes(bytearray(1024)) for _ in range(2048)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    [bytes(bytearray(1024)) for _ in range(2048)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kept_bytes: int) -> int:
    command = [sys.executable, "-c", SCRIPT, str(kept_bytes)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_reused_memory_costs_no_page_faults() -> None:
    for kept_bytes in (8 * 1024 * 1024, 1 << 40):
        assert faults(kept_bytes) < 500  # 25,600 pages are used
    assert faults(0) > 10_000  # else the checks above would prove nothing


THREADS = """
import sys, threading
from hastore.heap import keep_freed, return_freed, share_one_heap
MIB = 1 << 20

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def use():
    with in_turn:  # what is in use at once, is not shared
        blocks = [bytearray(b"x") * (3 * MIB) for _ in range(4)]
        pins.append(b"a small block that stays" * 99)
        del blocks
    freed.wait()
    ended.wait()

pins, freed, ended, in_turn = [], threading.Barrier(5), threading.Event(), threading.Lock()
if "one" in sys.argv:
    share_one_heap()
keep_freed(8 * MIB)
before = anonymous()
for _ in range(4):
    threading.Thread(target=use).start()
freed.wait()
if "return" in sys.argv:
    return_freed()
print(anonymous() - before)
ended.set()
"""


def kept(*words: str) -> int:
    """Return what four threads have left that each used 12 MiB, and still are there."""
    command = [sys.executable, "-c", THREADS, *words]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_threads_share_what_is_kept_and_all_of_it_can_be_returned() -> None:
    assert kept("one") < 20 * MIB
    assert kept("one", "return") < 4 * MIB
    assert kept() > 36 * MIB  # else the checks above would prove nothing


class Bursts:
    """What `BurstMemory` returned, by a clock that a test sets."""

    def __init__(self) -> None:
        self.returned: list[float] = []
        self.now_ms = 0.0
        self.memory = BurstMemory(16 * MIB, lambda: self.returned.append(self.now_ms))

    def look(self, in_use_mib: int, *at_ms: float) -> None:
        for self.now_ms in at_ms:
            self.memory.look(in_use_mib * MIB, self.now_ms)


def test_the_memory_of_a_burst_is_returned_once_and_not_between_bursts() -> None:
    bursts = Bursts()
    bursts.look(0, 0.0)
    assert bursts.memory.wait_ms(1.0) == float("inf"), "nobody needs to look"
    for second in range(5):
        bursts.look(24, second * STAYS_FREE_MS + 10.0)
        bursts.look(0, second * STAYS_FREE_MS + 20.0)
    assert bursts.returned == []
    assert 0.0 < bursts.memory.wait_ms(bursts.now_ms) <= STAYS_FREE_MS
    for _ in range(10):
        bursts.look(8, bursts.now_ms + min(STAYS_FREE_MS, bursts.memory.wait_ms(bursts.now_ms)))
    assert len(bursts.returned) == 1, "8 of 24 MiB are in use"
    assert STAYS_FREE_MS <= bursts.returned[0] - 4_020.0 <= 2 * STAYS_FREE_MS
    assert bursts.memory.wait_ms(bursts.now_ms) == float("inf")


def test_a_small_burst_and_memory_that_stays_in_use_cause_nothing() -> None:
    bursts = Bursts()
    for in_use_mib in (15, 0, 30):
        bursts.look(in_use_mib, *(bursts.now_ms + n * STAYS_FREE_MS for n in range(1, 5)))
    assert bursts.returned == []
    bursts.look(0, *(bursts.now_ms + n * STAYS_FREE_MS for n in range(1, 3)))
    assert len(bursts.returned) == 1
