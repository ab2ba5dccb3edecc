"""The folder of a demo's stores: where it is, who may use it, what the next demo replaces.

Without --folder all demos of a checkout use one folder, so that the stores stay for a look but do
not pile up. Two things keep that safe: a running demo locks its folder, and only a folder with
MARKER, which a demo made itself, is ever emptied.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator

from hastore.errors import StoreInUseError, UsageError
from hastore.fs.filesystem import REAL

MARKER = ".hastore-demo"
_MARKER_TEXT = "`hastore demo` made this folder. Without --folder, its next run empties it.\n"
_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
_ELSE = "give another place with --folder DIR"


def default_folder() -> pathlib.Path:
    """Return data/demo in the checkout; for an installed package, hastore/demo in the cache."""
    if (_CHECKOUT / "bin" / "hastore").is_file():
        return _CHECKOUT / "data" / "demo"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(cache, "hastore", "demo")


def folder_problem(folder: pathlib.Path, *, replace: bool) -> str | None:
    """Return why a demo must not use the folder, and the remedy; None if it may.

    With `replace`, an earlier demo may be in it, but nothing else, and no node may still use it.
    """
    if not folder.is_dir():
        return None
    try:
        os.close(_locked(folder))
    except UsageError as running:
        return str(running)
    return _content_problem(folder, replace=replace)


def replaced_bytes(folder: pathlib.Path) -> int:
    """Return how many bytes on the disk become free when the folder is emptied."""
    paths = folder.rglob("*") if folder.is_dir() else ()
    return sum(path.lstat().st_blocks * 512 for path in paths)


@contextlib.contextmanager
def demo_folder(folder: pathlib.Path, *, replace: bool) -> Iterator[None]:
    """Make and lock the folder, and with `replace` empty it; the lock ends with the body.

    Raises UsageError as `folder_problem` says it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _locked(folder)
    try:
        problem = _content_problem(folder, replace=replace)
        if problem is not None:
            raise UsageError(problem)
        if not os.listdir(folder):
            (folder / MARKER).write_text(_MARKER_TEXT)
        if replace:
            _empty(folder)
        yield
    finally:
        os.close(lock)


def _locked(folder: pathlib.Path) -> int:
    """Return a descriptor that locks the folder until it is closed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"another demo is using {folder}: wait for its end, or {_ELSE}") from None
    return descriptor


def _content_problem(folder: pathlib.Path, *, replace: bool) -> str | None:
    if not replace:
        return f"{folder} already contains a demo; {_ELSE}" if (folder / "node1").exists() else None
    names = os.listdir(folder)
    if names and MARKER not in names:
        return f"{folder} is not empty, and no demo made it (no {MARKER}): it is kept; {_ELSE}"
    for lock in sorted(folder.glob("node*/lock")):
        try:
            REAL.lock(str(lock)).close()
        except StoreInUseError:
            return f"a node is running on {lock.parent}, of an earlier demo: stop it, or {_ELSE}"
    return None


def _empty(folder: pathlib.Path) -> None:
    """Remove all but the marker, so that an interrupted removal is continued the next time."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
