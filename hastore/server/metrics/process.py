"""The metrics of the process, with the names that Prometheus' own libraries give them."""

import os
import resource

from hastore.fs.filesystem import REAL
from hastore.server.metrics.page import Page

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def add_process(page: Page, started_ms: int) -> None:
    """Add CPU, memory and descriptors; what /proc does not say is left out."""
    page.add("process_start_time_seconds", started_ms / 1000.0)
    times = os.times()
    page.add("process_cpu_seconds_total", times.user + times.system)
    page.add("process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        virtual, resident = REAL.read_bytes("/proc/self/statm").split()[:2]
        descriptors = len(REAL.list_dir("/proc/self/fd")) - 1  # without that of the look itself
    except (OSError, ValueError):  # no /proc, or no free descriptor
        return
    page.add("process_virtual_memory_bytes", int(virtual) * _PAGE_BYTES)
    page.add("process_resident_memory_bytes", int(resident) * _PAGE_BYTES)
    page.add("process_open_fds", descriptors)
