"""Make glibc keep freed memory for reuse, in one place, instead of returning it at once.

By default glibc returns the end of its heap as soon as 128 KiB of it are free. A reader of messages
frees and allocates a MiB or more all the time. The kernel then unmaps and clears the same pages
again and again; that took half of a reader's CPU. When a block that glibc had mapped separately is
freed, glibc raises two thresholds. From then on, blocks up to that size come from the heap, and the
heap keeps up to twice that size free at its end.

By default glibc also gives each thread a heap of its own. Each of these keeps that much, and none
uses what another one keeps. Threads of Python allocate one at a time anyway, so they can share one.

A small block in use near the end of the heap keeps all that is free before it. `BurstMemory`
returns this to the kernel too, after a burst.
"""

import ctypes
from collections.abc import Callable

KEPT_BYTES_MAX = 31 * 1024 * 1024  # glibc does not raise its thresholds for 32 MiB or more
STAYS_FREE_MS = 1_000.0
_M_ARENA_MAX = -8  # of mallopt


def share_one_heap() -> None:
    """Let the threads that start from now on share the heap; without glibc this does nothing.

    It is for a process of hastore's own: a program that uses the client may want more heaps.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def keep_freed(size_bytes: int) -> None:
    """Let each heap keep up to twice `size_bytes` of freed memory; a lower size changes nothing.

    This allocates and frees a block of that size, whose pages are not touched: a few system calls.
    """
    bytes(min(size_bytes, KEPT_BYTES_MAX))


def return_freed() -> None:
    """Return all freed memory to the kernel, in some ms for 100 MiB; without glibc do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class BurstMemory:
    """Returns the memory of a burst once it has stayed free for STAYS_FREE_MS or longer.

    Bursts that follow each other more quickly use the same memory again.
    """

    def __init__(self, least_bytes: int, give_back: Callable[[], None] = return_freed) -> None:
        """Prepare; a burst of less than `least_bytes` counts as none."""
        self._least_bytes = least_bytes
        self._give_back = give_back
        self._most = 0  # bytes in use at once since the last return, before `_lately`
        self._lately = 0  # the same, since `_until_ms` was set
        self._until_ms = float("-inf")

    def look(self, in_use_bytes: int, now_ms: float) -> None:
        """Note how much is in use; return what was used before, if that is due."""
        self._lately = max(self._lately, in_use_bytes)
        if now_ms < self._until_ms:
            return
        if self._most - self._lately >= self._least_bytes:
            self._give_back()
            self._most = 0
        self._most = max(self._most, self._lately)
        self._lately, self._until_ms = in_use_bytes, now_ms + STAYS_FREE_MS

    def wait_ms(self, now_ms: float) -> float:
        """Return how long to wait for the next `look`; infinity if it would return nothing."""
        if max(self._most, self._lately) < self._least_bytes:
            return float("inf")
        return max(0.0, self._until_ms - now_ms)
