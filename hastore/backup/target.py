"""Where backups are kept: a local folder, or whatever fsspec reaches by a URL.

A target holds objects by name, such as `log/...`. A new object is written whole and never changed;
`replace` alone writes a name again. Names are at most one folder deep.

One run at a time writes to a target. A local folder is locked for that. fsspec knows no locks: a
run there looks before its manifest whether another one has written one (take.py).
"""

import contextlib
import errno
import os
import posixpath
import re
from collections.abc import Iterator
from typing import Any, Protocol

from hastore.addresses import folder_of_url
from hastore.backup.manifest import LOG, MANIFESTS, PARTIAL, STATE
from hastore.errors import (
    HastoreError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    UsageError,
)
from hastore.fs.filesystem import NO_ROOM, REAL, File, FileSystem, size_of

FOLDERS = (MANIFESTS, LOG, STATE)
_LOCK = "lock"
_SYNC_BYTES = 32 << 20
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://|^[a-z0-9]+::")
_PASSWORD = re.compile(r"(://[^/@:\s]*):[^/@\s]*@")  # of a user, in a URL
_FSSPEC_MISSING = 'a target with a URL needs fsspec: pip install "hastore[backup]"'


class Writer(Protocol):
    """A new object that is being written."""

    def write(self, data: bytes | memoryview) -> object:
        """Append bytes."""
        ...


class Target(Protocol):
    """A place for backups. Raises StoreError, with the place's name, if it fails."""

    name: str

    def objects(self) -> dict[str, int]:
        """Return the objects that are there, with their sizes."""
        ...

    def foreign(self) -> list[str]:
        """Return what lies beside the objects and is none of hastore's."""
        ...

    def new(self, name: str) -> contextlib.AbstractContextManager[Writer]:
        """Write a new object; it is whole, and durable after `settle`, at the end of the `with`.

        If the `with` ends by an exception, no object stays, if that can be helped.
        """
        ...

    def read(self, name: str, size: int, position: int = 0) -> bytes:
        """Return up to `size` bytes of an object. Raises FileNotFoundError if it is not there."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object, whether there is one or not: atomically and durably."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        ...

    def settle(self) -> None:
        """Make the names of new objects durable."""
        ...

    def free_bytes(self) -> int | None:
        """Return the room that is left; None if that is not known."""
        ...

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Exclude other runs, if the place can; make the place if it is not there."""
        ...


def without_password(text: str) -> str:
    """Return a text without the passwords of URLs in it."""
    return _PASSWORD.sub(r"\1:***@", text)


def open_target(place: str, fs: FileSystem = REAL) -> Target:
    """Return the target at a local path or a URL; nothing is made there.

    Raises UsageError for a URL without fsspec, or that it does not know, and for a relative one.
    """
    place = folder_of_url(place)
    if place.lower().startswith("file:"):
        raise UsageError(
            f"{place} names no folder of this machine: write the whole path, file:///FOLDER"
        )
    if _SCHEME.match(place):
        return UrlTarget(place)
    return LocalTarget(os.path.abspath(place), fs)


class LocalTarget:
    """A folder on this machine, perhaps of a network file system."""

    def __init__(self, path: str, fs: FileSystem = REAL) -> None:
        self.name = path
        self._fs = fs

    def objects(self) -> dict[str, int]:
        """Return the objects that are there, with their sizes."""
        fs, root = self._fs, self.name
        sizes: dict[str, int] = {}
        with self._named():
            found = [
                f"{folder}/{name}" for folder in FOLDERS for name in fs.list_dir(f"{root}/{folder}")
            ]
            if fs.exists(f"{root}/{PARTIAL}"):
                found.append(PARTIAL)
            for name in found:
                with contextlib.suppress(FileNotFoundError):  # a run beside this one removed it
                    sizes[name] = size_of(fs, f"{root}/{name}")
        return sizes

    def foreign(self) -> list[str]:
        """Return what lies beside the objects and is none of hastore's."""
        with self._named():
            every = self._fs.list_dir(self.name)
        known = (*FOLDERS, PARTIAL, f"{PARTIAL}.tmp", _LOCK, "lost+found")
        return [name for name in every if name not in known]

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Writer]:
        """Write a new object."""
        path = f"{self.name}/{name}"
        with self._named():
            file = self._fs.create_new(path)
            try:
                with contextlib.closing(file):
                    yield _Appender(file)
                    file.sync()
            except BaseException:
                with contextlib.suppress(OSError):  # the first failure says more
                    self._fs.remove(path)
                raise

    def read(self, name: str, size: int, position: int = 0) -> bytes:
        """Return up to `size` bytes of an object."""
        path, found = f"{self.name}/{name}", None
        with self._named(), contextlib.suppress(FileNotFoundError):
            found = self._fs.open(path, writable=False)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        with self._named(), contextlib.closing(found) as file:
            return file.pread(size, position)

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object."""
        with self._named():
            self._fs.replace_bytes(f"{self.name}/{name}", data)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with self._named(), contextlib.suppress(FileNotFoundError):
            self._fs.remove(f"{self.name}/{name}")

    def settle(self) -> None:
        """Make the names of new objects durable."""
        with self._named():
            for folder in FOLDERS:
                self._fs.sync_dir(f"{self.name}/{folder}")

    def free_bytes(self) -> int | None:
        """Return the room that is left."""
        with self._named():
            return self._fs.free_bytes(self.name)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other runs; make the folder if it is not there."""
        with self._named():
            for folder in FOLDERS:
                self._fs.make_dirs(f"{self.name}/{folder}")
            try:
                lock = self._fs.lock(f"{self.name}/{_LOCK}")
            except StoreInUseError as failure:
                raise StoreInUseError(
                    f"{self.name}: another backup writes there now; wait for its end"
                ) from failure
        with contextlib.closing(lock):
            yield

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turn a failure of the disk into a StoreError."""
        try:
            yield
        except OSError as failure:
            if failure.errno in NO_ROOM:
                raise StoreFullError(f"{self.name}: no room: {failure}") from failure
            denied = isinstance(failure, PermissionError)
            remedy = "; run the command as the user who owns it" if denied else ""
            raise StoreError(f"{self.name}: {failure}{remedy}") from failure


class _Appender:
    """Writes a file from its beginning on, and syncs it in steps.

    A gigabyte that is synced at once keeps the disk from the node's own syncs for seconds.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self._at = self._synced = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.pwrite(data, self._at)
        self._at += len(data)
        if self._at - self._synced >= _SYNC_BYTES:
            self._file.sync()
            self._synced = self._at


class UrlTarget:
    """A place that fsspec reaches, such as s3://BUCKET/FOLDER."""

    def __init__(self, url: str) -> None:
        """Find the file system of the URL; how to reach it is fsspec's own configuration."""
        self.name = without_password(url)  # texts have it, which logs and mails keep
        try:
            import fsspec
        except ImportError as missing:
            raise UsageError(_FSSPEC_MISSING) from missing
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, TypeError) as wrong:
            why = without_password(str(wrong))
            raise UsageError(
                f"{self.name}: fsspec does not take it: {why}; give a folder, or s3://BUCKET/FOLDER"
            ) from None
        self._root = self._root.rstrip("/")

    def objects(self) -> dict[str, int]:
        """Return the objects that are there, with their sizes."""
        with self._named():
            self._fs.invalidate_cache()
            try:
                found: dict[str, Any] = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        every = {path[len(self._root) :].lstrip("/"): one for path, one in found.items()}
        return {
            name: int(one["size"])
            for name, one in every.items()
            if name == PARTIAL or posixpath.dirname(name) in FOLDERS
        }

    def foreign(self) -> list[str]:
        """Return what lies beside the objects and is none of hastore's."""
        with self._named():
            try:
                every = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        names = [posixpath.basename(str(path).rstrip("/")) for path in every]
        root = posixpath.basename(self._root)  # some list the folder itself
        return sorted(one for one in names if one not in (*FOLDERS, PARTIAL, "", root))

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Writer]:
        """Write a new object."""
        path = f"{self._root}/{name}"
        with self._named(writes=True):
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
        try:
            with self._named(writes=True), self._fs.open(path, "wb") as file:
                yield file
        except BaseException:
            with contextlib.suppress(Exception):  # it is in the way of nobody; the next run tries
                self._fs.rm_file(path)
            raise

    def read(self, name: str, size: int, position: int = 0) -> bytes:
        """Return up to `size` bytes of an object."""
        with self._named():
            found: bytes = self._fs.cat_file(
                f"{self._root}/{name}", start=position, end=position + size
            )
            return found

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object; what is torn because the place cannot do it at once is no JSON."""
        path = f"{self._root}/{name}"
        with self._named(writes=True):
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            self._fs.pipe_file(path, data)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with self._named(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def settle(self) -> None:
        """Return: an object that was written is there."""

    def free_bytes(self) -> int | None:
        """Return None: the room is not known."""
        return None

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Return a lock that excludes nobody."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _named(self, *, writes: bool = False) -> Iterator[None]:
        """Turn whatever a file system of fsspec raises into a StoreError.

        Not that an object is not there. But whoever `writes` makes it: then its place is gone, such
        as a bucket.
        """
        try:
            yield
        except HastoreError:
            raise
        except Exception as failure:  # each of them has errors of its own
            if isinstance(failure, FileNotFoundError) and not writes:
                raise
            full = isinstance(failure, OSError) and failure.errno in NO_ROOM
            text = f"{self.name}: {type(failure).__name__}: {without_password(str(failure))}"
            raise (StoreFullError(text) if full else StoreError(text)) from failure
