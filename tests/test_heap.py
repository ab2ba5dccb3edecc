"""`keep_freed`: a process that keeps freed memory gets no page faults when it uses it again."""

import subprocess
import sys

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
