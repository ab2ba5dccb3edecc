"""Sync what was written to many files, through descriptors of its own."""

import contextlib
from collections.abc import Iterable, Iterator

from hastore.errors import SyncFailedError
from hastore.store.fs.filesystem import NO_DESCRIPTOR, FileSystem


@contextlib.contextmanager
def _final() -> Iterator[None]:
    """Raise SyncFailedError for a failed sync: the kernel may have dropped the pages, so no retry
    helps. A sync that was not begun, since no descriptor was free, stays an OSError.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as failure:
        if failure.errno in NO_DESCRIPTOR:
            raise
        raise SyncFailedError(f"a sync failed: {failure}") from failure


def sync_files(fs: FileSystem, paths: Iterable[str], directories: Iterable[str]) -> None:
    """Sync files, then directories; what was removed meanwhile is left out.

    SyncFailedError: a sync failed. OSError: a file or directory cannot be opened now, nothing is
    lost yet.
    """
    for path in sorted(paths):
        with contextlib.suppress(FileNotFoundError):
            file = fs.open(path)
            try:
                with _final():
                    file.sync()
            finally:
                file.close()
    for directory in sorted(directories):
        with contextlib.suppress(FileNotFoundError), _final():
            fs.sync_dir(directory)


def sync_all(fs: FileSystem, directory: str) -> None:
    """Sync the whole file system that holds a directory. SyncFailedError, OSError as above."""
    with _final():
        fs.sync_all(directory)
