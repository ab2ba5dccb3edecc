"""Sync what was written to many files, through descriptors of its own."""

import contextlib
from collections.abc import Iterable, Iterator

from hastore.errors import SyncFailedError
from hastore.store.fs.filesystem import FileSystem


@contextlib.contextmanager
def _final() -> Iterator[None]:
    """Tell a failed sync from all else: the kernel may have dropped the pages, no retry helps."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as failure:
        raise SyncFailedError(f"a sync failed: {failure}") from failure


def sync_files(fs: FileSystem, paths: Iterable[str], directories: Iterable[str]) -> None:
    """Sync files, then directories; what was removed meanwhile is left out.

    SyncFailedError: a sync failed. OSError: a file cannot be opened now, nothing is lost yet.
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
    """Sync the whole file system that holds a directory. SyncFailedError."""
    with _final():
        fs.sync_all(directory)
