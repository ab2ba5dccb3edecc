"""Mistakes to plant, one at a time; the hunt must find each: python -m tests.crash --planted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec

from hastore.backup.target import LocalTarget
from hastore.dledger.store.hard_state import HardStateFiles
from hastore.fs import protocols
from hastore.fs.protocols import File
from hastore.server.kept_positions import KeptPositions
from hastore.store import rescue
from hastore.store.derived.unit_files import FileCache
from hastore.store.entry_message_store import EntryMessageStore
from hastore.store.log.mapped_file_queue import MappedFile, MappedFileQueue
from hastore.store.log_store import LogStore
from hastore.store.state.limits import LimitsPage
from tests.crash.effects import Effect, Sync, SyncNames
from tests.crash.hunt import Finding, hunt
from tests.crash.points import Budget
from tests.crash.recording import RecordingFileSystem
from tests.crash.workloads import WORKLOADS

Patch = tuple[Any, str, Any]


def nothing(*_: object, **__: object) -> None: ...


def true(*_: object) -> bool:
    return True


def name_unsynced() -> list[Patch]:
    """A state file is replaced, and the sync of its folder is left out."""

    def replace_bytes(self: Any, path: str, data: bytes) -> None:
        file = self._fresh(f"{path}.tmp")
        protocols._write_whole(file, data)
        self.rename(f"{path}.tmp", path)

    return [(protocols.FileSystem, "replace_bytes", replace_bytes)]


def content_unsynced() -> list[Patch]:
    """A state file gets its name before its bytes are synced."""

    def write(file: File, data: bytes) -> None:
        with contextlib.closing(file):
            file.pwrite(data, 0)

    return [(protocols, "_write_whole", write)]


def written_in_place() -> list[Patch]:
    """A state file is overwritten."""

    def replace_bytes(self: Any, path: str, data: bytes) -> None:
        with contextlib.closing(self.open(path, create=True)) as file:
            file.truncate(0)
            file.pwrite(data, 0)
            file.sync()

    return [(protocols.FileSystem, "replace_bytes", replace_bytes)]


def vote_before_sync() -> list[Patch]:
    """A vote is given before `currterm` is on the disk."""
    save, note = HardStateFiles.save, RecordingFileSystem.note

    def unsynced(self: RecordingFileSystem, effect: Effect) -> None:
        if not isinstance(effect, Sync | SyncNames):
            note(self, effect)

    def early(self: HardStateFiles, *given: Any) -> None:
        with patch.object(RecordingFileSystem, "note", unsynced):
            save(self, *given)

    return [(HardStateFiles, "save", early)]


def checkpoint_first() -> list[Patch]:
    """The checkpoint says of records that they are synced, and they are not yet."""
    keep = LogStore._keep

    def first(self: LogStore) -> None:
        last = self._appender.last_store_timestamp_ms
        self._checkpoint.save(replace(self._checkpoint.now, log_timestamp_ms=last), sync=True)
        keep(self)

    return [(LogStore, "_keep", first)]


def sync_error_swallowed() -> list[Patch]:
    """A sync of the log fails, and nobody hears of it."""
    return [(MappedFile, "sync", nothing)]


def log_name_unsynced() -> list[Patch]:
    """The name of a new log file is not synced."""
    return [(MappedFileQueue, "sync_names", nothing)]


def removed_in_one_go() -> list[Patch]:
    """Retention removes several log files, and syncs the folder once."""

    def discard(self: MappedFileQueue, stop: Callable[[], bool] = bool) -> None:
        del stop
        for one in self._detached:
            one.remove()
        if self._detached:
            self.sync_names()
        self._detached.clear()

    return [(MappedFileQueue, "discard", discard)]


def limits_later() -> list[Patch]:
    """A cut lowers the limits once the bytes are gone, not before."""
    return [(LimitsPage, "cut", nothing)]


def archive_unsynced() -> list[Patch]:
    """What a cut archives is not synced."""

    def copy(fs: Any, log: Any, offset: int, stop: int, folder: str) -> int:
        file = log.queue.find(offset)
        end = min(file.end, stop)
        data = file.file.pread(end - offset, offset - file.start)
        with contextlib.closing(fs.open(f"{folder}/{file.start:020d}", create=True)) as target:
            target.pwrite(data, offset - file.start)
        return int(end)

    return [(rescue, "_copy_file", copy)]


def positions_not_kept() -> list[Patch]:
    """Retention removes commits of positions that nothing else has."""
    return [(KeptPositions, "gather", true)]


def queues_unsynced() -> list[Patch]:
    """Replay says that the queues are synced, and they are not."""
    return [(FileCache, "flush", nothing)]


def cut_unnoted() -> list[Patch]:
    """A cut of entries, or an install, begins before it is noted."""

    def note(self: EntryMessageStore, **intent: object) -> None:
        self._state.now = msgspec.structs.replace(self._state.now, **intent)

    return [(EntryMessageStore, "_begin", note)]


def set_aside_from_zero() -> list[Patch]:
    """While a log is set aside, the limits say that it begins at 0."""
    restart = LimitsPage.restart

    def from_zero(self: LimitsPage, offset: int) -> None:
        restart(self, 0 if offset == self.now.first_offset else offset)

    return [(LimitsPage, "restart", from_zero)]


def backup_unsettled() -> list[Patch]:
    """A backup counts as taken before the names of its pieces are synced."""
    return [(LocalTarget, "settle", nothing)]


FIRST_SEEDS = {"removed_in_one_go": 50, "limits_later": 1, "archive_unsynced": 1}  # others: 0
# Each with the workload that finds it, and the seed to begin with.
MISTAKES: dict[str, tuple[Callable[[], list[Patch]], str, int]] = {
    one.__name__: (one, workload, FIRST_SEEDS.get(one.__name__, 0))
    for one, workload in (
        (name_unsynced, "small files"),
        (content_unsynced, "small files"),
        (written_in_place, "small files"),
        (vote_before_sync, "dledger"),
        (checkpoint_first, "classic"),
        (sync_error_swallowed, "classic"),
        (log_name_unsynced, "classic"),
        (removed_in_one_go, "retention"),
        (limits_later, "classic"),
        (archive_unsynced, "classic"),
        (positions_not_kept, "retention"),
        (queues_unsynced, "classic"),
        (cut_unnoted, "dledger"),
        (set_aside_from_zero, "resync"),
        (backup_unsettled, "backup"),
    )
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Let the product make one mistake."""
    with contextlib.ExitStack() as stack:
        for target, attribute, made in MISTAKES[name][0]():
            stack.enter_context(patch.object(target, attribute, made))
        yield


def hunt_planted(name: str, *, most: int) -> tuple[int, Finding | None]:
    """Hunt for a planted mistake; return after how many states it was found, and how."""
    _, workload, seed = MISTAKES[name]
    states = 0
    while states < most:
        with planted(name):
            report = hunt(
                WORKLOADS[workload], seed, Budget(2, 2), share=0.12, most=400, second=0.0, stop_at=1
            )
        states, seed = states + report.states, seed + 1
        if report.findings:
            return states, report.findings[0]
    return states, None
