"""Read private files, which only their owner may read; write files of any mode durably."""

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ConfigError, UsageError
from hastore.fs.protocols import NO_ROOM

MAX_KEY_FILE_BYTES = 4096
CHECK_PATH = "check path and permissions"
PRIVATE_MODE = 0o600
PUBLIC_MODE = 0o644  # of what all users may read
LOCK_POLL_S = 0.01
LOCK_WAIT_S = 5.0  # for a command that has the folder of a configuration file locked
UMASK_MODE = 0o666  # of what the umask of the user decides


class _Held:
    """An open file: while it is kept, no other file gets its number, which would look the same."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._descriptor)


@dataclass(frozen=True, slots=True)
class PrivateFile:
    """The content of a private file; `place` differs if it was replaced by another file."""

    data: bytes = field(repr=False)
    place: tuple[int, int]
    held: _Held = field(repr=False, compare=False)


def read_private(path: str, max_bytes: int) -> bytes:
    """Return the content of a private file; raises what `load_private` raises."""
    return load_private(path, max_bytes).data


def load_private(path: str, max_bytes: int, *, missing: str = CHECK_PATH) -> PrivateFile:
    """Return a private file; ConfigError names the file and the remedy, `missing` if there is none.

    Refused are a file that other users may read or write, anything but a regular file, and a file
    of more than `max_bytes` bytes.
    """
    if "\0" in path:
        raise ConfigError(f"{path!r}: the path contains a NUL byte; name a file")
    try:
        # O_NONBLOCK: the open of a FIFO must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as failure:
        remedy = missing if isinstance(failure, FileNotFoundError) else CHECK_PATH
        raise ConfigError(f"{path}: cannot be read: {failure.strerror}; {remedy}") from failure
    held = _Held(descriptor)  # closes it, whatever happens
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path}: is not a regular file; name a file")
    if status.st_mode & 0o077:
        raise ConfigError(f"{path}: is open to other users; run chmod 600 {path}")
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    except OSError as failure:
        raise ConfigError(
            f"{path}: cannot be read: {failure.strerror}; check its disk"
        ) from failure
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: is larger than {max_bytes} bytes; is it the right file?")
    return PrivateFile(data, (status.st_dev, status.st_ino), held)


def create_file(path: str, data: bytes, mode: int) -> None:
    """Write a new file of that mode, durably; UsageError if there is one already."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, mode)
    except FileExistsError as failure:
        raise UsageError(f"{path}: exists already; name a new file, or remove it") from failure
    except (OSError, ValueError) as failure:
        raise _unwritable(path, failure) from failure
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # whatever the umask took away
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        _sync_folder(path)
    except OSError as failure:
        os.unlink(path)
        raise _unwritable(path, failure) from failure


def open_fresh(path: str | os.PathLike[str], mode: int) -> BinaryIO:
    """Open a new file for writing, in place of what is there. Raises OSError.

    It is for a name that others can guess, in a folder where they may write: a link that waits
    there is removed, and never opened.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


def append_private(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to append to it; a new one is private. A link is not followed. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, PRIVATE_MODE), "ab")


def replace_file(path: str, data: bytes, mode: int) -> None:
    """Replace a file's content, atomically and durably; its mode becomes `mode`.

    A symbolic link stays, and its file is replaced. As root, a file keeps its owner; otherwise its
    group, and a file that its owner or group could not read any more is not replaced.
    """
    path = os.path.realpath(path)
    temporary: str | None = None
    try:
        before = os.stat(path) if os.path.exists(path) else None
        descriptor, temporary = tempfile.mkstemp(prefix=".hastore-", dir=os.path.dirname(path))
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            if before is not None:
                _keep_owners(path, descriptor, before, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
        temporary = None
        _sync_folder(path)
    except OSError as failure:
        raise _unwritable(path, failure) from failure
    finally:
        if temporary is not None:
            os.unlink(temporary)


def _keep_owners(path: str, descriptor: int, before: os.stat_result, mode: int) -> None:
    """Give a new file the owner and group of the one before, as far as this user may.

    Raises ConfigError if who could read that one, such as the node, could not read this one.
    """
    user, group = before.st_uid, before.st_gid
    if os.geteuid() == 0:
        os.fchown(descriptor, user, group)
        return
    is_lost = False
    if os.fstat(descriptor).st_gid != group:
        try:
            os.fchown(descriptor, -1, group)
        except PermissionError:  # not a group of this user
            is_lost = bool(mode & stat.S_IRGRP)
    if user not in (0, os.geteuid()) and not (mode & stat.S_IRGRP and _is_member(user, group)):
        is_lost = True
    if is_lost and not mode & stat.S_IROTH:
        raise ConfigError(
            f"{path}: belongs to user {user} and group {group}, and one of them could not read it "
            "any more if you replace it; nothing was changed: run the command as root, or as that "
            "user"
        )


def _is_member(user: int, group: int) -> bool:
    """Whether a user is in a group, as far as this machine knows."""
    try:
        known = pwd.getpwuid(user)
    except KeyError:
        return False
    return group in os.getgrouplist(known.pw_name, known.pw_gid)


@contextlib.contextmanager
def folder_locked(path: str, wait_s: float | None = None) -> Iterator[None]:
    """Hold the lock of the folder that holds the file `path`, against other commands.

    With `wait_s`, raises ConfigError if another one holds it for longer.
    """
    folder = os.path.dirname(os.path.realpath(path))
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as failure:
        raise ConfigError(
            f"{folder}: cannot be opened: {failure.strerror}; name a file in a folder that exists"
        ) from failure
    try:
        if wait_s is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        else:
            _lock_within(descriptor, folder, wait_s)
        yield
    finally:
        os.close(descriptor)


def _lock_within(descriptor: int, folder: str, wait_s: float) -> None:
    end_ms, pause = SYSTEM_CLOCK.monotonic_ms() + wait_s * 1000.0, threading.Event()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as held:
            if SYSTEM_CLOCK.monotonic_ms() >= end_ms:
                raise ConfigError(
                    f"{folder}: another command has held its lock for {wait_s:g} s; let it end, "
                    "and try again"
                ) from held
        pause.wait(LOCK_POLL_S)


def _sync_folder(path: str) -> None:
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _unwritable(path: str, failure: OSError | ValueError) -> ConfigError:
    why = failure.strerror if isinstance(failure, OSError) else str(failure)
    remedy = "check its folder and permissions"
    if isinstance(failure, OSError):
        if failure.errno in NO_ROOM:
            remedy = "make room on its disk, or raise the quota of this user"
        elif failure.errno == errno.EROFS:
            remedy = "its file system is read-only: mount it for writing, or change the original"
    return ConfigError(f"{path}: cannot be written: {why}; {remedy}")
