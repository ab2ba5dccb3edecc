"""Merge small files of a target: each run and each task leaves some, and readers open them all.

A merge is a commit of its own: the new file becomes visible and the small ones are removed. Whoever
lists the folder at that very moment may see both or miss some; Delta has no such moment.
"""

import contextlib
import functools
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from hastore.errors import StoreBrokenError
from hastore.pipeline.export.writing import parquet_writer, row_groups
from hastore.pipeline.progress import Progress
from hastore.pipeline.running import run_tasks
from hastore.pipeline.target import StagedFile, Target, sync_file

GROUPS_PER_COMMIT = 16


@dataclass(frozen=True)
class Group:
    """Files of one folder that become one file."""

    names: tuple[str, ...]  # relative to the target


@dataclass(frozen=True)
class Place:
    """Where a merging task reads and writes."""

    target: str
    staging: str  # relative to the target
    compression: str


def merge_files(
    spark: SparkSession, target: Target, compression: str, file_bytes: int, progress: Progress
) -> tuple[int, int]:
    """Merge files of less than half of `file_bytes`; return how many became how many."""
    groups = small_files(target.files(), file_bytes)
    place = Place(str(target.path), os.path.relpath(target.staging, target.path), compression)
    progress.begin("merge", sum(len(group.names) for group in groups), "files")
    merged = made = 0
    done: list[tuple[Group, StagedFile]] = []

    def commit() -> None:
        if done:
            removed = [name for group, _ in done for name in group.names]
            target.commit(target.state, [file for _, file in done], removed=removed)
            done.clear()

    work = functools.partial(merge_group, place)
    with contextlib.closing(run_tasks(spark, "merge", work, groups)) as results:
        for group, file in results:
            done.append((group, file))
            merged, made = merged + len(group.names), made + 1
            progress.advance(len(group.names))
            if len(done) >= GROUPS_PER_COMMIT:
                commit()
    commit()
    return merged, made


def small_files(files: Mapping[str, int], file_bytes: int) -> list[Group]:
    """Return groups of two or more small files in one folder, of `file_bytes` at most together."""
    groups: list[Group] = []
    waiting: dict[str, tuple[list[str], int]] = {}
    for name, size in files.items():
        if size >= file_bytes // 2 or not os.path.basename(name).startswith("part-"):
            continue
        folder = os.path.dirname(name)
        names, total = waiting.get(folder, ([], 0))
        if names and total + size > file_bytes:
            groups.append(Group(tuple(names)))
            names, total = [], 0
        waiting[folder] = ([*names, name], total + size)
    groups += [Group(tuple(names)) for names, _ in waiting.values()]
    return [group for group in groups if len(group.names) > 1]


def merge_group(place: Place, group: Group) -> StagedFile:
    """Write one file with the rows of a group. Runs on an executor."""
    folder = os.path.dirname(group.names[0])
    name = f"part-{uuid.uuid4().hex[:16]}-merged.parquet"
    path = Path(place.target, place.staging, name)
    schema = pq.read_schema(Path(place.target, group.names[0]))
    expected = written = 0
    with contextlib.closing(parquet_writer(path, schema, place.compression)) as writer:
        for table in row_groups(_batches(place, group)):
            writer.write_table(table, row_group_size=table.num_rows)
            written += table.num_rows
    for one in group.names:
        expected += pq.read_metadata(Path(place.target, one)).num_rows
    if written != expected:
        raise StoreBrokenError(
            f"{place.target}: the files of {folder} have {expected} rows, but {written} were read"
        )
    sync_file(path)
    return StagedFile(
        os.path.join(place.staging, name), os.path.join(folder, name), written, path.stat().st_size
    )


def _batches(place: Place, group: Group) -> Iterator[pa.RecordBatch]:
    for name in group.names:
        with pq.ParquetFile(Path(place.target, name)) as file:
            yield from file.iter_batches(batch_size=65_536)
