"""Sync many files through descriptors opened for the sync, so that writers need not wait."""

import contextlib
from collections.abc import Iterable, Iterator

from hastore.errors import SyncFailedError
from hastore.store.fs.filesystem import NO_DESCRIPTOR, FileSystem


@contextlib.contextmanager
def _final() -> Iterator[None]:
    """Turn the OSError of a failed sync into SyncFailedError.

    The kernel may have dropped the pages, so no retry helps. An error for a missing file or for
    lack of a descriptor stays as it is: no sync was begun.
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

    SyncFailedError: a sync failed; its pages may be lost. OSError: a file or directory could not be
    opened; nothing is lost, and the caller may try again.
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
