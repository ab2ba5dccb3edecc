"""Sync many files through descriptors opened for the sync, so that writers need not wait."""

import contextlib
from collections.abc import Iterable, Iterator

from hastore.errors import SyncFailedError
from hastore.store.fs.filesystem import NO_DESCRIPTOR, FileSystem


@contextlib.contextmanager
def _final() -> Iterator[None]:
    """Turn the OSError of a failed sync into SyncFailedError.

    The kernel may have dropped the pages, so no retry helps. If a file is missing or no descriptor
    is free, no sync was begun, and the error is raised as it is.
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
    """Sync files, then directories; skips those that were removed meanwhile.

    Raises SyncFailedError if a sync failed: pages may be lost. Raises OSError if a file could not
    be opened or no descriptor was free: nothing is lost, and the caller may try again.
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
    """Sync the file system that holds a directory; raises as `sync_files` does."""
    with _final():
        fs.sync_all(directory)
