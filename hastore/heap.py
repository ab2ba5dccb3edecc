"""Make glibc keep freed memory for reuse instead of returning it to the kernel at once.

By default glibc returns the end of its heap as soon as 128 KiB of it are free. A reader of messages
frees and allocates a MiB or more all the time. The kernel then unmaps and clears the same pages
again and again; that took half of a reader's CPU. When a block that glibc had mapped separately is
freed, glibc raises two thresholds. From then on, blocks up to that size come from the heap, and the
heap keeps up to twice that size free at its end.
"""

KEPT_BYTES_MAX = 31 * 1024 * 1024  # glibc does not raise its thresholds for 32 MiB or more


def keep_freed(size_bytes: int) -> None:
    """Let the process keep up to twice `size_bytes` of freed memory; a lower size changes nothing.

    This allocates and frees a block of that size, whose pages are not touched: a few system calls.
    """
    bytes(min(size_bytes, KEPT_BYTES_MAX))
