"""Keep in `rescued/` the bytes that a node takes out of its log.

A tail that is cut off is copied to `rescued/<name>/`; a log that is set aside is moved there by
LogStore. Whether a message in it was acknowledged is not known, and it may be the only copy. So a
node removes an archive only if `rescued/` is large, and only if all of it lies before the place
where the log begins now: retention would have removed it too, had it stayed in the log. That holds
for a tail that has aged with this log, not for a log that was set aside: the master's log begins
behind it from the first moment on. So what an undismissed cut (cuts.py) names stays in any case.
All else stays until an operator removes it. `Rescued` says how much that is, and when it is too
much.
"""

import contextlib
import logging
from collections.abc import Callable

from hastore.clock import Clock
from hastore.errors import StoreError, StoreFullError, UsageError
from hastore.fs.filesystem import NO_ROOM, FileSystem, file_name, is_file_name, size_of
from hastore.store.derived.scalar_walk import ScalarWalker, Stop
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.record_walk import cut_point

_COPY_BYTES = 1 << 20
_HEAD_BYTES = 8  # of an item; no item begins with so many zeros
LOOK_MS = 10_000.0
_WALK_BYTES = 16 << 20  # more than the largest item
COUNT_BYTES_MAX = 128 << 20  # of a cut; a count must not hold the node up for long
OWN_TOPICS = "HASTORE_"
LARGE_BYTES = 1 << 30  # of `rescued/`, from here on; or as many as are free on its disk

logger = logging.getLogger(__name__)


class Rescued:
    """How much is in `rescued/`, as of the last look; `look` and `tidy` by one thread at a time."""

    def __init__(
        self, fs: FileSystem, root: str, clock: Clock, free_bytes: Callable[[], int]
    ) -> None:
        self.folder = f"{root}/rescued"
        self.bytes = 0
        self.problem: str | None = None
        self._fs = fs
        self._clock = clock
        self._free_bytes = free_bytes
        self._next_ms = 0.0

    def tidy(self, min_offset: int, is_held: Callable[[str], bool]) -> None:
        """Look again if the last time is a while ago; remove what has expired if it is large.

        `min_offset` is where the log begins now. `is_held(name)` says whether an archive must stay.
        """
        if self._clock.monotonic_ms() < self._next_ms:
            return
        self.look()
        if self.problem is None or self.bytes == 0:
            return
        try:
            ends = sorted((self._end_of(name), name) for name in self._fs.list_dir(self.folder))
            for name in [one for end, one in ends if 0 < end <= min_offset and not is_held(one)]:
                if self.problem is None:
                    break
                size = self._fs.used_bytes(f"{self.folder}/{name}")
                logger.warning(
                    "%s/%s is removed, %d bytes: all of it lies before offset %d, where the log"
                    " begins now, and %s is large", self.folder, name, size, min_offset, self.folder
                )  # fmt: skip
                self._fs.remove_tree(f"{self.folder}/{name}")
                self.look()
        except OSError as failure:
            self.problem = f"{self.folder} cannot be tidied: {failure}"

    def look(self) -> None:
        """Look again. A failure to read the folder is a problem too."""
        self._next_ms = self._clock.monotonic_ms() + LOOK_MS
        try:
            self.bytes = self._fs.used_bytes(self.folder)
            names = self._fs.list_dir(self.folder)
            free = self._free_bytes()
        except OSError as failure:
            self.problem = f"{self.folder} cannot be read: {failure}"
            return
        self.problem = None
        if self.bytes >= LARGE_BYTES or self.bytes > free:
            self.problem = (
                f"{self.folder} takes {self.bytes} bytes, with {len(names)} archives, and {free}"
                " bytes of its disk are free: the archives hold what was cut from this log, perhaps"
                " the only copies: look at them (`hastore log dump`), move away what is still"
                " needed, and remove them"
            )

    def _end_of(self, name: str) -> int:
        """Return the offset at which an archive's log ends, at the latest; 0: it has none."""
        fs, found = self._fs, 0
        folder = f"{self.folder}/{name}"
        if not fs.is_dir(folder):
            return 0
        ledgers = [one for one in fs.list_dir(folder) if one.startswith("dledger-")]
        for part in ("", "/commitlog", *(f"/{one}/data" for one in ledgers)):
            for file in filter(is_file_name, fs.list_dir(f"{folder}{part}")):
                found = max(found, int(file) + size_of(fs, f"{folder}{part}/{file}"))
        return found


def rescue_folder(fs: FileSystem, root: str, name: str) -> str:
    """Return the path of an empty or new folder `rescued/<name>`.

    If an earlier attempt left files there, a number is added to the name, so that nothing is
    overwritten. Raises UsageError if `name` is no directory name.
    """
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise UsageError(f"{name!r} is no name for a folder in {root}/rescued; give another")
    folder = f"{root}/rescued/{name}"
    number = 1
    while fs.list_dir(folder):
        number += 1
        folder = f"{root}/rescued/{name}.{number}"
    return folder


def copy_tail(fs: FileSystem, root: str, name: str, log: CommitLog, offset: int, end: int) -> str:
    """Copy [offset, end) to sparse files under `rescued/<name>`, synced; returns that folder.

    The files keep their names. The caller holds the log's lock. Raises StoreFullError if there is
    no room, StoreError if the copy fails.
    """
    folder = rescue_folder(fs, root, name)
    size = end - offset
    if size > fs.free_bytes(root):
        raise StoreFullError(
            f"{folder}: no room for {size} bytes to be rescued, {fs.free_bytes(root)} are free;"
            f" free {size} bytes on its file system, for example in {root}/rescued",
            needed_bytes=size,
        )
    try:
        fs.make_dirs(folder)
        while offset < end:
            offset = _copy_file(fs, log, offset, end, folder)
        fs.sync_dir(folder)
    except OSError as failure:
        with contextlib.suppress(OSError):  # each further attempt would leave another part
            fs.remove_tree(folder)
        why = f"{folder}: the log's tail cannot be rescued: {failure}; it was not cut: "
        if failure.errno in NO_ROOM:  # others took the room, or it is a quota
            remedy = f"free {size} bytes on its file system, or raise the quota of the node's user"
            raise StoreFullError(why + remedy, needed_bytes=size) from failure
        raise StoreError(why + "make the folder writable, and check its disk") from failure
    return folder


def count_messages(log: CommitLog, offset: int) -> tuple[int, bool]:
    """Return how many messages end beyond `offset`, and whether these are all.

    Records of hastore's own topics are no messages. The count ends before damage, and after
    COUNT_BYTES_MAX, and where the disk cannot read. The caller holds the log's lock.
    """
    walker, count = ScalarWalker(log.form), 0
    if log.entries is None:
        offset = cut_point(log, offset)
    end, limit = log.max_offset, offset + COUNT_BYTES_MAX
    while offset < end:
        if offset >= limit:
            return count, False
        left = log.file_size - offset % log.file_size
        try:
            with log.view(offset, min(left, _WALK_BYTES)) as view:
                walk = walker.walk(view, offset, left)
        except OSError as failure:
            logger.warning("messages beyond %d are not counted: %s", offset, failure)
            return count, False
        count += sum(not one.topic.startswith(OWN_TOPICS) for one in walk.batch)
        if walk.stop is Stop.BAD:
            return count, False
        if walk.stop is Stop.BLANK:
            offset += left
        elif walk.consumed:
            offset += walk.consumed
        else:
            break  # a part of a record is at the log's end
    return count, True


def written_end(log: CommitLog, offset: int) -> int:
    """Return the end of what is written from `offset` on; `offset` if zeros begin there.

    The log's files are read beyond its end. Raises OSError.
    """
    first = log.queue.find(offset)
    if first is None or not any(first.file.pread(_HEAD_BYTES, offset - first.start)):
        return offset
    for file in reversed(log.queue.files):
        end = file.size
        while end:
            size = min(_COPY_BYTES, end)
            found = file.file.pread(size, end - size).rstrip(b"\0")
            if found:
                return file.start + end - size + len(found)
            end -= size
    return offset


def _copy_file(fs: FileSystem, log: CommitLog, offset: int, stop: int, folder: str) -> int:
    """Copy the log's bytes from `offset` to `stop`, or the end of their file; return that end."""
    file = log.queue.find(offset)
    if file is None:
        raise log.gone(offset, f"the file of offset {offset}")
    end = min(file.end, stop)
    path = f"{folder}/{file_name(file.start)}"
    with contextlib.closing(fs.open(path, create=True)) as target:
        target.truncate(0)
        while offset < end:
            data = file.file.pread(min(_COPY_BYTES, end - offset), offset - file.start)
            target.pwrite(data, offset - file.start)
            offset += len(data)
        target.sync()
    return end
