"""The second step for the key index: write some of its files, each from its range of keys.

As every file but the last is full, the keys of each file are known by their number as soon as the
pieces are: file n has the keys from n * (entries - 1) on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hastore.fs.filesystem import REAL, FileSystem
from hastore.store.derived.index.index_file import IndexHeader
from hastore.store.derived.index.whole_file import WholeFile
from hastore.store.rebuild.layout import RangeResult, Sizes, attempt, disk_errors
from hastore.store.rebuild.pieces import KEY, Array, Piece

_FILES_PER_TASK_KEYS = 1 << 20  # small files are built several to a task, up to so many keys


@dataclass(frozen=True)
class IndexTask:
    """Consecutive files of the key index."""

    first: int  # number of the first file
    files: int
    end_key: int  # number of the last key of the last file, plus 1
    pieces: tuple[tuple[str, int, int], ...]  # path; numbers of its first key and after its last
    slots: int
    entries: int
    folder: str  # where to write; the files are named by their numbers


@dataclass(frozen=True)
class IndexResult:
    """What a task has written; `full_ms` is the end time of its last full file, 0 without one."""

    folder: str
    files: int
    keys: int
    full_ms: int


def index_tasks(
    results: Sequence[RangeResult], paths: Sequence[str], sizes: Sizes, folder: str
) -> list[IndexTask]:
    """Divide the keys of all ranges into files, and the files into tasks."""
    per_file = sizes.entries - 1
    numbered: list[tuple[str, int, int]] = []
    total = 0
    for result, path in zip(results, paths, strict=True):
        if result.keys:
            numbered.append((path, total, total + result.keys))
        total += result.keys
    files = _file_count(results, total, per_file)
    step = max(1, _FILES_PER_TASK_KEYS // per_file)
    tasks = []
    at = 0
    for first in range(0, files, step):
        count = min(step, files - first)
        # The file before tells where an empty file begins, so its last key is needed too.
        start, end = max(0, first * per_file - 1), min((first + count) * per_file, total)
        while at < len(numbered) and numbered[at][2] <= start:
            at += 1
        stop = at
        while stop < len(numbered) and numbered[stop][1] < end:
            stop += 1
        tasks.append(
            IndexTask(
                first, count, end, tuple(numbered[at:stop]), sizes.slots, sizes.entries,
                f"{folder}/index-{first:06}",
            )
        )  # fmt: skip
    return tasks


def _file_count(results: Sequence[RangeResult], keys: int, per_file: int) -> int:
    """Return how many files replay would have created."""
    if not any(result.records for result in results):
        return 0
    files = max(1, -(-keys // per_file))
    if keys == files * per_file and _record_after_keys(results):
        files += 1  # as in RocketMQ, the first record after a full file opens the next one
    return files


def _record_after_keys(results: Sequence[RangeResult]) -> bool:
    """Whether a record follows the last record that has a key."""
    for result in reversed(results):
        if result.keys:
            return result.last_record > result.last_key_record
        if result.records:
            return True
    return False


def build_index(task: IndexTask, fs: FileSystem = REAL) -> IndexResult:
    """Write the files of a task to a folder of its own. Raises StoreError."""
    with disk_errors():
        return _build(task, fs)


def _build(task: IndexTask, fs: FileSystem) -> IndexResult:
    task = replace(task, folder=attempt(task.folder))
    fs.make_dirs(task.folder, sync=False)
    per_file = task.entries - 1
    keys = _Keys(fs, task.pieces)
    previous = IndexHeader()
    if task.first:
        for part in keys.read(task.first * per_file - 1, task.first * per_file):
            previous = IndexHeader(
                end_timestamp_ms=int(part["stored_ms"][0]), end_offset=int(part["offset"][0])
            )
    full_ms = written = 0
    for number in range(task.first, task.first + task.files):
        file = WholeFile(fs, f"{task.folder}/{number:06}", task.slots, task.entries, previous)
        try:
            end = min((number + 1) * per_file, task.end_key)
            for part in keys.read(number * per_file, end):
                file.add(part["hash"].astype(np.int64), part["offset"], part["stored_ms"])
                written += len(part)
            file.finish()
        finally:
            file.close()
        previous = file.header
        if previous.count == task.entries:
            full_ms = previous.end_timestamp_ms
    return IndexResult(task.folder, task.files, written, full_ms)


class _Keys:
    """The keys of some pieces, by number."""

    def __init__(self, fs: FileSystem, pieces: Sequence[tuple[str, int, int]]) -> None:
        self._fs = fs
        self._pieces = pieces

    def read(self, first: int, end: int) -> Iterator[Array]:
        """Yield the keys with the numbers [first, end), in parts."""
        for path, start, stop in self._pieces:
            if start < end and stop > first:
                keys = Piece(self._fs, path).array("keys")
                assert keys.dtype == KEY
                yield keys[max(first - start, 0) : min(end, stop) - start]
