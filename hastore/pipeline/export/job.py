"""The job `export`: the messages of topics to Parquet files, each message exactly once.

The driver plans ranges of queues; tasks write them to staged files; the driver commits files and
positions together, in the order of the plan, whenever some time has passed. So a run that is
stopped keeps what was committed, and the next run goes on from there.
"""

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from hastore.errors import PositionLostError, UsageError
from hastore.pipeline.export.planning import TASK_BYTES, Piece, plan
from hastore.pipeline.export.writing import Layout, Source, Written, write_piece
from hastore.pipeline.positions import (
    Position,
    Positions,
    next_ranges,
    positions_as_json,
    positions_from_json,
    read_mark,
)
from hastore.pipeline.progress import NoProgress, Progress
from hastore.pipeline.running import run_tasks
from hastore.pipeline.target import StagedFile, Target
from hastore.pipeline.where import Where, open_backend
from hastore.spark.arrow.schema import KAFKA_COLUMNS, METADATA_COLUMNS, Column
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.source_options import SourceOptions
from hastore.spark.read.backend import Backend
from hastore.spark.read.planning import select

COMPRESSIONS = ("snappy", "zstd", "lz4", "gzip", "none")
COMMIT_EVERY_S = 30.0


@dataclass(frozen=True)
class ExportOptions:
    """What is exported; the columns of a target never change."""

    headers: bool = False
    metadata: bool = False
    compression: str = "snappy"
    fail_on_data_loss: bool = True
    check_crcs: bool = True
    file_bytes: int = TASK_BYTES  # of records in one task: its files have about this size at most
    commit_every_s: float = COMMIT_EVERY_S

    def columns(self) -> tuple[str, ...]:
        """Return the columns of the files; the topic is the name of a folder."""
        columns: tuple[Column, ...] = KAFKA_COLUMNS
        if self.headers:
            columns += (Column.HEADERS,)
        if self.metadata:
            columns += METADATA_COLUMNS
        return tuple(column.value for column in columns if column is not Column.TOPIC)


@dataclass(frozen=True)
class ExportSummary:
    """What a run of `export` did."""

    target: str
    messages: int
    messages_by_topic: dict[str, int]
    files: int
    bytes: int  # of the files
    lost_messages: int  # removed by retention before they were exported
    commits: int
    seconds: float


@dataclass
class _Run:
    """The state of one run: what is committed, and what waits for its turn."""

    target: Target
    positions: Positions
    columns: Sequence[str]
    progress: Progress
    messages: dict[str, int] = field(default_factory=dict)
    files: int = 0
    bytes: int = 0
    commits: int = 0

    def commit(self, backend: Backend, done: Sequence[tuple[Piece, Written]]) -> None:
        """Commit tasks that follow what is committed. Raises PositionLostError after a cut."""
        positions = dict(self.positions)
        for piece, written in done:
            for span, mark in zip(piece.ranges, written.marks, strict=True):
                key = TopicPartition(span.topic, span.partition)
                # Without a mark all messages of the range are lost: the mark before it is too old.
                positions[key] = Position(span.end, mark)
        available = backend.available()
        for key in {
            TopicPartition(s.topic, s.partition) for piece, _ in done for s in piece.ranges
        }:
            self._check_same(backend, key, positions[key], available.get(key))
        files = [file for _, written in done for file in written.files]
        state = {"columns": list(self.columns), "positions": positions_as_json(positions)}
        self.target.commit(state, files)
        self._count(positions, done, files)

    def _check_same(
        self, backend: Backend, key: TopicPartition, position: Position, there: OffsetRange | None
    ) -> None:
        """Raise PositionLostError if the log was cut since the task has read it."""
        if position.mark is None:
            return
        if there is not None and position.next - 1 < there.start:
            return  # retention has removed it since
        gone = there is None or position.next > there.end
        if gone or read_mark(backend, key, position.next - 1) != position.mark:
            raise PositionLostError(
                f"{key} at {backend.where} was cut by a failover while it was exported; nothing "
                "of the cut messages was made visible. Run the job again"
            )

    def _count(
        self, positions: Positions, done: Sequence[tuple[Piece, Written]], files: list[StagedFile]
    ) -> None:
        self.positions = positions
        self.commits += 1
        self.files += len(files)
        self.bytes += sum(file.size for file in files)
        for piece, written in done:
            for span, rows in zip(piece.ranges, written.rows, strict=True):
                self.messages[span.topic] = self.messages.get(span.topic, 0) + rows
        total = sum(self.messages.values())
        self.progress.keep(f"{total:,} messages were exported to {self.target.path}")


def export(
    spark: SparkSession,
    where: Where,
    target: str,
    options: ExportOptions | None = None,
    *,
    progress: Progress | None = None,
) -> ExportSummary:
    """Export the messages that the target does not have yet, up to the end of the log now.

    Raises UsageError for wrong arguments and for a target of other columns or in use, and
    PositionLostError if the log was cut after an earlier run, or messages were removed before they
    were exported. Whatever happens, the target has each message of its committed ranges once.
    """
    began = time.monotonic()
    options = options or ExportOptions()
    progress = progress or NoProgress()
    if options.compression not in COMPRESSIONS:
        raise UsageError(f"compression is {options.compression!r}; use " + ", ".join(COMPRESSIONS))
    parsed = where.parsed()
    columns = options.columns()
    assert parsed.strategy is not None
    with _open(parsed, options) as backend:
        available = select(parsed.strategy, backend.available(), backend.where)
    with Target(target, "export") as opened, _open(parsed, options) as backend:
        _check_columns(opened, columns)
        run = _Run(
            opened, positions_from_json(opened.state.get("positions", {})), columns, progress
        )
        ranges, lost = next_ranges(
            backend, available, run.positions, fail_on_data_loss=options.fail_on_data_loss
        )
        pieces = plan(backend, ranges, spark.sparkContext.defaultParallelism, options.file_bytes)
        progress.keep(f"nothing new was exported to {opened.path}")
        _write_all(spark, run, backend, pieces, parsed, options)
    return ExportSummary(
        target=str(opened.path),
        messages=sum(run.messages.values()),
        messages_by_topic=dict(sorted(run.messages.items())),
        files=run.files,
        bytes=run.bytes,
        lost_messages=sum(one.messages for one in lost),
        commits=run.commits,
        seconds=round(time.monotonic() - began, 3),
    )


def _open(parsed: SourceOptions, options: ExportOptions) -> Backend:
    return open_backend(parsed.path, parsed.bootstrap, fail_on_data_loss=options.fail_on_data_loss)


def _check_columns(target: Target, columns: Sequence[str]) -> None:
    there = target.state.get("columns")
    if there is not None and there != list(columns):
        raise UsageError(
            f"the files in {target.path} have other columns ({', '.join(there)}); use the options "
            "of the first run, or name another folder"
        )


def _write_all(
    spark: SparkSession,
    run: _Run,
    backend: Backend,
    pieces: Sequence[Piece],
    parsed: SourceOptions,
    options: ExportOptions,
) -> None:
    """Run the tasks and commit them in order; on a stop, commit what is complete."""
    source = Source(parsed.path, parsed.bootstrap, options.fail_on_data_loss, options.check_crcs)
    target = run.target
    layout = Layout(
        str(target.path),
        os.path.relpath(target.staging, target.path),
        tuple(run.columns),
        options.compression,
    )
    run.progress.begin("export", sum(piece.messages for piece in pieces), "messages")
    order = {piece: number for number, piece in enumerate(pieces)}
    waiting: dict[int, Written] = {}
    committed = 0
    next_commit_s = time.monotonic() + options.commit_every_s

    def commit() -> int:
        end = committed
        while end in waiting:
            end += 1
        if end > committed:
            run.commit(backend, [(pieces[n], waiting.pop(n)) for n in range(committed, end)])
        return end

    work = functools.partial(write_piece, source, layout)
    try:
        with contextlib.closing(run_tasks(spark, "export", work, pieces)) as results:
            for piece, written in results:
                waiting[order[piece]] = written
                run.progress.advance(piece.messages)
                if time.monotonic() >= next_commit_s:
                    committed = commit()
                    next_commit_s = time.monotonic() + options.commit_every_s
    except KeyboardInterrupt:
        commit()
        raise
    commit()
