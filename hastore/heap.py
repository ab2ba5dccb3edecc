"""How much freed memory a process keeps for its next need, instead of giving it back at once.

glibc gives the end of its heap back as soon as 128 KiB of it are free. Who reads messages frees and
needs a MiB and more all the time: each page goes and comes again, cleared by the kernel, which took
half of a reader's CPU. glibc corrects itself when a block is freed that was too large for its heap:
from then on blocks up to that size come from the heap, and twice as much stays at its end.
"""

KEPT_BYTES_MAX = 31 * 1024 * 1024  # from 32 MiB on glibc learns nothing


def keep_freed(size_bytes: int) -> None:
    """Let the process keep up to twice `size_bytes` of freed memory; never takes a promise back.

    Costs a system call or two: the block's pages are never touched.
    """
    bytes(min(size_bytes, KEPT_BYTES_MAX))
