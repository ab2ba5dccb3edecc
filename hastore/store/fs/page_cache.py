"""Ask the kernel which bytes of a mapped file are in the page cache.

A read of such bytes through the map neither waits for the disk nor ends the process by SIGBUS at a
bad sector, unless the kernel drops the pages right after the question.
"""

import mmap

from hastore.store.fs.filesystem import LIBC

_PAGE = mmap.PAGESIZE
_RESIDENT = 1  # the lowest bit of a page's entry; the others are undefined


def is_cached(view: memoryview, begin: int, end: int) -> bool:
    """Whether all bytes [begin, end) of a mapped file are in the page cache.

    `view` is the whole file, and at least one byte is asked for. Returns False if the kernel does
    not tell. It tells the file's owner, and whoever may write to the file; it would tell others
    that everything is cached.
    """
    import numpy as np  # imported late: a node starts faster without numpy

    first = begin - begin % _PAGE
    pages = (end - first + _PAGE - 1) // _PAGE
    found = np.empty(pages, np.uint8)
    address = np.frombuffer(view, np.uint8).ctypes.data + first
    if LIBC.mincore(address, end - first, found.ctypes.data) != 0:
        return False
    return bool((found & _RESIDENT).all())
