"""The log of a store whose node is down, for a repair in place; it holds the store's lock.

Checked, and repaired, is what was synced: below the flushed offset of the limits page, and below a
cut that was begun. What lies beyond is for the node's start, which finds the log's end. But a start
refuses damage that records follow, also beyond that offset, unless a power loss may have left it
(recovery.py). So then the log is checked, as without a limits page, up to its last valid item.

The source of a repair is another node that runs (`PeerLog`), asked over the client API.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from hastore.client.connections.requester import Requester, error_of
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    ClientError,
    NotAuthenticatedError,
    StoreBrokenError,
    StoreError,
    unopened_store,
)
from hastore.fs.filesystem import REAL, File, FileSystem
from hastore.ha.node.node_state import NodeState
from hastore.ha.rules.epochs import EpochStarts
from hastore.protocol import api
from hastore.record.log_format import ENTRIES, PLAIN, LogFormat
from hastore.record.log_walk import Damage, LogWalk
from hastore.repair.mending import Mended, Mender, Parts, Source, Unfit
from hastore.store.offline.log_files import LogFile, LogFiles
from hastore.store.state.entry_state import EntryState
from hastore.store.state.limits import read_limits
from hastore.store.state.marker_files import AbortFile, LockFile
from hastore.store.state.replay_progress import cache_survives

NOTED_MAX = 1000  # ranges in a report; of others only the bytes are counted
ANSWER_S = 30.0  # its disk may be slow


class StoppedLog:
    """The files of a log that no node has open."""

    def __init__(self, fs: FileSystem, root: str, files: list[LogFile], form: LogFormat) -> None:
        self.form = form
        self.epochs: EpochStarts | None = None
        self.file_size = files[0].size
        self._fs = fs
        self._root = root
        self._files = {file.start: file for file in files}
        self._opened: tuple[int, File] | None = None  # the file that was used last

    def read(self, offset: int, size: int) -> bytes:
        """Return at most so many bytes, in one file. Raises OSError."""
        start = offset - offset % self.file_size
        return self._open(start).pread(min(size, start + self.file_size - offset), offset - start)

    def write(self, parts: Parts, *, skip_unreadable: bool = False) -> None:
        """Write bytes durably over those that are there. Raises StoreBrokenError."""
        touched = set()
        for place, piece in self._in_files(parts):
            start = place - place % self.file_size
            touched.add(start)
            try:
                self._open(start).pwrite(piece, place - start)
            except OSError as failure:
                if not skip_unreadable or failure.errno != errno.EIO:
                    raise _unwritten(place, failure) from failure
        for start in sorted(touched):
            try:
                self._open(start).sync()
            except OSError as failure:
                raise _unwritten(parts[0][0], failure) from failure

    def _in_files(self, parts: Parts) -> Iterator[tuple[int, bytes]]:
        """Yield the parts in pieces, none of which spans two files."""
        for offset, data in parts:
            at = 0
            while at < len(data):
                size = self.file_size - (offset + at) % self.file_size
                yield offset + at, data[at : at + size]
                at += size

    def close(self) -> None:
        """Close the file that is open."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def _open(self, start: int) -> File:
        if self._opened is None or self._opened[0] != start:
            self.close()
            self._opened = start, self._fs.open(self._files[start].path)
        return self._opened[1]


def _unwritten(place: int, failure: OSError) -> StoreBrokenError:
    return StoreBrokenError(
        f"bytes at {place} could not be written: {failure}; replace the disk"
    )


@dataclass(slots=True)
class Report:
    """What a repair has found and done; offsets are bytes of the log."""

    store: str
    dry_run: bool
    min_offset: int = 0
    end_offset: int = 0  # checked up to here
    damaged_bytes: int = 0
    left_bytes: int = 0  # that are damaged still; of a dry run, for which no other node has bytes
    ranges: list[Mended] = field(default_factory=list)

    def note(self, mended: Mended) -> None:
        """Add a range."""
        size = mended.damage.end - mended.damage.start
        self.damaged_bytes += size
        self.left_bytes += size if mended.source is None else 0
        if len(self.ranges) < NOTED_MAX:
            self.ranges.append(mended)

    @property
    def ok(self) -> bool:
        """Whether the log is sound now."""
        return not (self.damaged_bytes if self.dry_run else self.left_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        found = asdict(self)
        found["ranges"] = [
            {
                "offset": one.damage.start,
                "end_offset": one.damage.end,
                "reason": one.damage.reason,
                "from": one.source,
                "repaired": one.written,
                "refused": list(one.refusals),
            }
            for one in self.ranges
        ]
        return {"ok": self.ok, **found}


@dataclass(frozen=True, slots=True)
class Stopped:
    """An open stopped store: its log, and where the walk over it begins and ends."""

    log: StoppedLog
    start: int
    end: int  # an item ends here
    stop: int  # beyond `end`, checked is what valid items follow up to here

    def walks(self) -> Iterator[LogWalk]:
        """Yield walks over what is checked."""
        log = self.log
        if self.end > self.start:
            yield LogWalk(log.form, log.read, log.file_size, self.start, self.end)
        if self.stop > self.end:
            yield LogWalk(
                log.form, log.read, log.file_size, self.end, self.stop, ends_whole=False
            )


@contextlib.contextmanager
def opened(
    root: str, *, node: int, cluster: str, group: str, fs: FileSystem = REAL
) -> Iterator[Stopped]:
    """Open the store of a node that is down.

    Raises StoreInUseError if it runs, StoreError if the folder is no store of this node or may not
    be written, or if log files are missing or have a wrong size.
    """
    if not fs.is_dir(root):
        raise StoreError(f"{root}: no such folder; run the command where the node is started")
    lock = LockFile(fs, root)
    try:
        lock.acquire()
    except OSError as failure:
        raise unopened_store(root, failure) from failure
    try:
        stopped = _look(fs, root, node, cluster, group)
        try:
            yield stopped
        finally:
            stopped.log.close()
    finally:
        lock.release()


def _look(fs: FileSystem, root: str, node: int, cluster: str, group: str) -> Stopped:
    with contextlib.closing(LogFiles(root, fs)) as files:
        found, entries = files.list(), files.ledger is not None
        if not found:
            raise StoreError(f"{root} has no log files")
        begin = files.first_record_start(found)
    limits = read_limits(fs, root)
    log = StoppedLog(fs, root, found, ENTRIES if entries else PLAIN)
    _check_files(files.directory, found, 0 if limits is None else limits.file_size)
    if fs.exists(f"{root}/hastore/node.json"):
        state = NodeState(fs, root)
        state.load(node, cluster, group)
        intent = state.data.intent
        if not entries:
            log.epochs = [(entry.epoch, entry.start) for entry in state.history]
        cut = None if intent is None else intent.offset
    else:
        cut, log.epochs = None, None if entries else []
    if entries:
        cut = EntryState(fs, root).load().cut_at
    if limits is None:
        end = found[-1].end if cut is None else max(begin, cut)
        return Stopped(log, begin, begin, end)
    start = max(found[0].start, limits.first_offset)
    end = max(start, min(limits.flushed_offset, limits.flushed_offset if cut is None else cut))
    if end > found[-1].end:
        raise StoreError(
            f"{files.directory}: bytes [{found[-1].end}, {end}) were synced, and their files are"
            " missing: a repair writes over what is there; restore the files from a backup, or"
            " replace the store"
        )
    power_lost = AbortFile(fs, root).exists() and not cache_survives(fs, root, limits.boot_id)
    only_synced = entries or cut is not None or power_lost
    return Stopped(log, start, end, end if only_synced else found[-1].end)


def _check_files(directory: str, files: list[LogFile], file_size: int) -> None:
    """Raise StoreError unless the files are whole, and follow each other."""
    size = file_size or files[0].size
    for number, file in enumerate(files):
        if file.size != size:
            raise StoreError(
                f"{file.path} has {file.size} bytes instead of {size}: a repair writes over what is"
                " there; restore the file from a backup, or replace the store"
            )
        if number and file.start != files[number - 1].end:
            raise StoreError(
                f"{directory}: no file has the bytes [{files[number - 1].end}, {file.start}): a"
                f" repair writes over what is there; restore it from a backup, or replace the store"
            )


def repair(stopped: Stopped, sources: list[Source], report: Report) -> None:
    """Find the damaged ranges of a log and repair each from the first source that fits.

    Adds to `report`, also if it raises StoreError because a range could not be written.
    """
    report.min_offset, report.end_offset = stopped.start, stopped.start
    mender = Mender(stopped.log, sources, dry_run=report.dry_run)
    for walk in stopped.walks():
        _repair(walk, mender, report)


def _repair(walk: LogWalk, mender: Mender, report: Report) -> None:
    tried: Damage | None = None
    while (damage := walk.next_damage()) is not None:
        if tried is not None and damage.start < tried.end:
            raise StoreBrokenError(
                f"bytes [{damage.start}, {damage.end}) were written, and are read back damaged: "
                f"{damage.reason}; replace the disk"
            )
        mended = mender.mend(walk, damage)
        report.note(mended)
        tried = damage if mended.written else None
        if not mended.written:
            walk.skip(damage)
        report.end_offset = walk.offset
    report.end_offset = walk.offset


class PeerLog:
    """The log of a node that runs. Methods raise Unfit if it does not answer, or lacks bytes."""

    def __init__(self, where: str, security: SecurityLike = None) -> None:
        """Prepare; `where` is tcp://HOST:PORT. Raises UsageError, ConfigError."""
        self.where = where
        self.min_offset = 0
        self.readable_offset = 0
        self._requester = Requester((where,), SYSTEM_CLOCK, security)

    def close(self) -> None:
        """End the connection."""
        self._requester.close()

    def look(self, *, node: int, cluster: str, group: str, mode: str) -> str | None:
        """Ask for the node's limits; return why it is not one to repair this node from.

        Raises NotAuthenticatedError if the node does not accept this command, or it not the node.
        """
        try:
            reply = self._ask(api.AskStatus)[0]
        except Unfit as unfit:
            return str(unfit)
        if not isinstance(reply, api.NodeStatus):
            return f"it answered {type(reply).__name__} to a question for its status"
        status: dict[str, Any] = reply.status
        theirs = status.get("cluster"), status.get("group"), status.get("mode")
        if theirs != (cluster, group, mode):
            return (
                f"it is of group {theirs[0]}/{theirs[1]}, mode {theirs[2]}, and the log of"
                f" {cluster}/{group}, mode {mode}"
            )
        if status["node"] == node:
            return f"it is node {node} itself"
        self.min_offset = status["min_offset"]
        self.readable_offset = status["readable_offset"]
        return None

    def read(self, start: int, end: int) -> tuple[bytes, EpochStarts]:
        """Return the bytes [start, end), in as many requests as it takes, and who wrote them."""
        found, epochs = bytearray(), []
        while start + len(found) < end:
            at = start + len(found)
            stop = min(end, at + api.MAX_RANGE_BYTES)
            reply, payload = self._ask(partial(api.AskBytes, start=at, end=stop))
            if not isinstance(reply, api.RangeBytes) or not reply.present:
                raise Unfit(f"it does not have bytes [{at}, {stop}) any more")
            if len(payload) != stop - at:
                raise Unfit(f"it sent {len(payload)} bytes of [{at}, {stop})")
            found += payload
            epochs += [(epoch, begin) for epoch, begin in reply.epochs]
        return bytes(found), epochs

    def digest(self, start: int, end: int) -> bytes:
        """Return the digest of bytes."""
        reply, _ = self._ask(partial(api.AskDigest, start=start, end=end))
        if not isinstance(reply, api.RangeDigest) or reply.digest is None:
            raise Unfit(f"it does not have bytes [{start}, {end}) any more")
        return reply.digest

    def _ask(self, make: Callable[[int], api.Request]) -> tuple[Any, Any]:
        address = self._requester.cluster.addresses[0]
        try:
            steps = self._requester.ask(address, make, ANSWER_S)
            reply, payload = self._requester.run_steps(steps)
            if isinstance(reply, api.Failed):
                raise error_of(reply)
        except NotAuthenticatedError:
            raise
        except ClientError as failure:
            raise Unfit(str(failure)) from failure
        return reply, payload
