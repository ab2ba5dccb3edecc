"""The job `export`: the messages of topics to Parquet files, each message exactly once.

The driver plans ranges of queues; tasks write them to staged files; the driver commits files and
positions together, in the order of the plan, whenever some time has passed. So a run that is
stopped keeps what was committed, and the next run goes on from there.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa
from pyspark.sql import SparkSession

from hastore.errors import StoreFullError, UsageError
from hastore.pipeline.delta import DeltaTarget
from hastore.pipeline.delta_objects import DeltaObjectTarget
from hastore.pipeline.export_options import INFER, check_options, shape_of, take_over
from hastore.pipeline.export_options import ExportOptions as ExportOptions
from hastore.pipeline.json_columns import infer_schema
from hastore.pipeline.object_target import ObjectTarget, target_of
from hastore.pipeline.orc_files import check_orc
from hastore.pipeline.parquet_files import (
    ExportLayout,
    ExportPiece,
    Shape,
    WrittenFiles,
    merge_files,
    plan,
    write_piece,
)
from hastore.pipeline.places import is_bucket
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.read_positions import (
    ReadPosition,
    ReadPositions,
    check_unchanged,
    end_positions,
    positions_as_state,
    unread,
)
from hastore.pipeline.running import Start, Stopwatch, check_session, run_tasks
from hastore.pipeline.target import StagedFile, Target, check_folders
from hastore.pipeline.where import Where, as_option
from hastore.spark.options.names import Names
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.source_options import SourceOptions
from hastore.spark.read.backend import Backend
from hastore.spark.read.planning import open_backend, select
from hastore.spark.worker import interrupted_later

log = logging.getLogger(__name__)


class ExportTarget(Protocol):
    """Where an export writes, and what it has committed there."""

    state: dict[str, Any]  # of the last commit
    flat: bool
    in_place: bool

    @property
    def path(self) -> Path | str:
        """Return the name of the target for people."""
        ...

    @property
    def root(self) -> str:
        """Return where the tasks write, after `prepare`: a path, or s3://BUCKET/FOLDER."""
        ...

    @property
    def staging_name(self) -> str:
        """Return the folder in it where they write."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def look(self) -> dict[str, Any]:
        """Return the state of the last commit, and change nothing; {} without a commit."""
        ...

    def prepare(self, schema: pa.Schema) -> pa.Schema | None:
        """Take the files' schema; return one with topic and date if they are to have these."""
        ...

    def commit(
        self,
        state: Mapping[str, Any],
        files: Sequence[StagedFile],
        *,
        removed: Sequence[str] = (),
    ) -> None:
        """Make files visible and the state durable, as one step that no crash divides."""
        ...


@dataclass(frozen=True)
class ExportSummary:
    """What a run of `export` did."""

    target: str
    messages: int
    messages_by_topic: dict[str, int]
    files: int
    bytes: int  # of the files
    lost_messages: int  # removed by retention before they were exported
    corrupt_bodies: int  # not JSON of the schema: they are in the column _corrupt
    merged_files: int  # how many small files became how many
    merged_into: int
    commits: int
    taken_over: tuple[str, ...]  # options of the command that were not given: as in the first run
    seconds: float


@dataclass
class _Run:
    """The state of one run: what is committed, and what waits for its turn."""

    target: ExportTarget
    positions: ReadPositions
    topics: frozenset[str]  # see Unread
    progress: JobProgress
    ends: ReadPositions  # of the ranges of the run, with the marks that were there before its tasks
    may_lose: bool
    shape: dict[str, Any] = field(default_factory=dict)  # see shape_of; it never changes
    schema: pa.Schema | None = None  # see ExportLayout
    json_ddl: str | None = None  # the schema as the first run was given it
    corrupt: int = 0
    missing: int = 0  # queue offsets of the ranges without a message
    messages: dict[str, int] = field(default_factory=dict)
    files: int = 0
    bytes: int = 0
    commits: int = 0

    def commit(self, backend: Backend, done: Sequence[tuple[ExportPiece, WrittenFiles]]) -> None:
        """Commit tasks that follow what is committed. Raises PositionLostError after a cut.

        The end of a queue's range must be what it was before the tasks began. The last record that
        a task has read is not enough: tasks before it may have read what was cut since.
        """
        positions = dict(self.positions)
        for piece, written in done:
            for span, mark in zip(piece.ranges, written.marks, strict=True):
                key = TopicPartition(span.topic, span.partition)
                # Without a mark all messages of the range are lost: the mark before it is too old.
                positions[key] = ReadPosition(span.end, mark)
        read = {TopicPartition(s.topic, s.partition) for piece, _ in done for s in piece.ranges}
        check_unchanged(backend, {key: self.ends[key] for key in read})
        files = [file for _, written in done for file in written.files]
        state = {
            "shape": self.shape,
            "json_ddl": self.json_ddl,
            **positions_as_state(positions, self.topics),
        }
        with interrupted_later():  # a stop reports all that is committed
            try:
                self.target.commit(state, files)
            finally:
                if self.target.state == state:  # also if the disk became full behind the commit
                    self._count(positions, done, files)

    def _count(
        self,
        positions: ReadPositions,
        done: Sequence[tuple[ExportPiece, WrittenFiles]],
        files: list[StagedFile],
    ) -> None:
        self.positions = positions
        self.commits += 1
        self.files += len(files)
        self.bytes += sum(file.size for file in files)
        self.corrupt += sum(written.corrupt for _, written in done)
        for piece, written in done:
            for span, rows, missing in zip(
                piece.ranges, written.rows, written.missing, strict=True
            ):
                self.messages[span.topic] = self.messages.get(span.topic, 0) + rows
                self.missing += missing
                if missing and self.may_lose:  # the tasks' own warnings are in the logs of Spark
                    log.warning(
                        "%d of the messages [%d, %d) of %s were removed while they were read",
                        missing, span.start, span.end, span.name,
                    )  # fmt: skip
        total = sum(self.messages.values())
        self.progress.keep(f"{total:,} messages were exported to {self.target.path}")


def export(
    spark: SparkSession,
    where: Where,
    target: str | None,
    options: ExportOptions | None = None,
    *,
    progress: JobProgress | None = None,
) -> ExportSummary:
    """Export the messages that the target does not have yet, up to the end of the log now.

    `target` is a folder's path, or s3://BUCKET/FOLDER; committed.py reads the latter. With a
    catalog of Iceberg it is where a new table lies, and may be None.
    Raises UsageError for wrong arguments and for a target of other columns or in use, and
    PositionLostError if the log was cut after an earlier run, or messages were removed before they
    were exported, and StoreFullError, which says how much is exported. Whatever happens, the target
    has each message of its committed ranges once.
    """
    check_session(spark)
    return export_with(lambda: spark, where, target, options, progress=progress)


def export_with(
    start: Start,
    where: Where,
    target: str | None,
    options: ExportOptions | None = None,
    *,
    progress: JobProgress | None = None,
) -> ExportSummary:
    """Export as `export` does; call `start` only if there is something to export or to merge.

    The positions of the target are compared with the ends of the queues first, which takes no
    Spark. So a run that finds nothing new ends at once.
    """
    watch = Stopwatch(start)
    options, progress = options or ExportOptions(), progress or JobProgress()
    check_options(options)
    parsed = where.parsed(
        {
            "failOnDataLoss": as_option(options.fail_on_data_loss),
            "checkCrcs": as_option(options.check_crcs),
            "decompress": as_option(options.decompress),
        },
        Names.LOSING_COMMAND,
    )
    assert parsed.strategy is not None
    with open_backend(parsed) as backend:
        # Before the target is made, for its errors; then again, because another run may have ended
        # meanwhile, and have exported more than there was.
        select(parsed.strategy, backend)
        with _target(target, options) as opened:
            positions, topics, ranges, lost = unread(
                backend,
                parsed.strategy,
                opened.state,
                fail_on_data_loss=options.fail_on_data_loss,
                patience=parsed.patience,
            )
            progress.keep(f"nothing new was exported to {opened.path}")
            options, taken = take_over(opened.path, opened.state, options)
            ends, may_lose = end_positions(backend, ranges), not options.fail_on_data_loss
            run = _Run(opened, positions, topics, progress, ends, may_lose)
            if ranges or lost:
                spark = watch.start()
                run.shape, run.schema = _settle(spark, opened, options, backend, ranges)
                given = None if options.json_schema == INFER else options.json_schema
                run.json_ddl = opened.state.get("json_ddl", given)
                cores = spark.sparkContext.defaultParallelism
                pieces = plan(backend, ranges, cores, options.file_bytes)
                _write_all(spark, run, backend, pieces, parsed, options)
                if not ranges:
                    run.commit(backend, [])  # so that what is lost is counted once
            merged = _merge(watch.start, opened, options, progress) if options.merge else (0, 0)
    return ExportSummary(
        target=str(opened.path),
        messages=sum(run.messages.values()),
        messages_by_topic=dict(sorted(run.messages.items())),
        files=run.files,
        bytes=run.bytes,
        lost_messages=sum(one.messages for one in lost)
        + (0 if options.fail_on_data_loss else run.missing),
        corrupt_bodies=run.corrupt,
        merged_files=merged[0],
        merged_into=merged[1],
        commits=run.commits,
        taken_over=taken,
        seconds=watch.seconds,
    )


def check_export(where: Where, target: str | None, options: ExportOptions) -> None:
    """Check what needs no Spark. Raises UsageError, StoreError, UnreachableError.

    Two JSON schemas are compared later: Spark parses DDL.
    """
    check_options(options)
    opened = _target(target, options)
    take_over(opened.path, opened.look(), options)
    where.check()


def _target(path: str | None, options: ExportOptions) -> ExportTarget:
    form = options.format
    if form == "iceberg":
        try:
            from hastore.pipeline.iceberg import IcebergTarget
        except ImportError as missing:
            raise UsageError(
                f'an export to Iceberg needs pyiceberg: pip install "hastore[iceberg]" ({missing})'
            ) from missing
        return IcebergTarget(path, options.catalog, options.table)
    if path is None:
        raise UsageError("give a target: a folder, or s3://BUCKET/FOLDER")
    if form == "delta":
        return DeltaObjectTarget(path) if is_bucket(path) else DeltaTarget(path)
    kind = "export" if form == "parquet" else f"export --format {form}"
    return target_of(path, kind)


def _settle(
    spark: SparkSession,
    target: ExportTarget,
    options: ExportOptions,
    backend: Backend,
    ranges: Mapping[TopicPartition, OffsetRange],
) -> tuple[dict[str, Any], pa.Schema | None]:
    """Return what never changes for the target: shape and schema. Raises UsageError."""
    finds = options.json_schema == INFER and not target.state
    inferred = None
    if finds:
        inferred = infer_schema(spark, backend, ranges, decompress=options.decompress)
    shape = shape_of(target.path, target.state, options, inferred)
    schema = Shape(shape["columns"], shape["json_schema"], shape["keep_value"]).schema()
    if options.format == "orc":
        check_orc(schema)
    prepared = target.prepare(schema)
    if not target.flat and not is_bucket(target.root):
        check_folders(target.root, {key.topic for key in ranges})
    return shape, prepared


def _merge(
    start: Start, target: ExportTarget, options: ExportOptions, progress: JobProgress
) -> tuple[int, int]:
    if isinstance(target, DeltaTarget | DeltaObjectTarget):
        return target.merge(options.file_bytes)
    assert isinstance(target, Target | ObjectTarget)
    return merge_files(start, target, options.compression, options.file_bytes, progress)


def _write_all(
    spark: SparkSession,
    run: _Run,
    backend: Backend,
    pieces: Sequence[ExportPiece],
    parsed: SourceOptions,
    options: ExportOptions,
) -> None:
    """Run the tasks and commit them in order; on a stop, commit what is complete."""
    target = run.target
    layout = ExportLayout(
        target.root,
        target.staging_name,
        tuple(run.shape["columns"]),
        options.compression,
        run.shape["json_schema"],
        run.shape["keep_value"],
        target.flat,
        "orc" if options.format == "orc" else "parquet",
        target.in_place,
        run.schema,
    )
    run.progress.begin("export", sum(piece.messages for piece in pieces), "messages")
    order = {piece: number for number, piece in enumerate(pieces)}
    waiting: dict[int, WrittenFiles] = {}
    committed = 0
    next_commit_s = time.monotonic() + options.commit_every_s

    def commit() -> int:
        end = committed
        while end in waiting:
            end += 1
        if end > committed:
            run.commit(backend, [(pieces[n], waiting.pop(n)) for n in range(committed, end)])
        return end

    work = functools.partial(write_piece, parsed, layout)
    try:
        with contextlib.closing(run_tasks(spark, "export", work, pieces)) as results:
            for piece, written in results:
                waiting[order[piece]] = written
                run.progress.advance(piece.messages)
                if time.monotonic() >= next_commit_s:
                    committed = commit()
                    next_commit_s = time.monotonic() + options.commit_every_s
        commit()
    except KeyboardInterrupt:
        commit()
        raise
    except StoreFullError as full:
        with contextlib.suppress(StoreFullError):
            commit()  # what is complete needs hardly any room more
        raise StoreFullError(
            f"{full}. It continues behind the {sum(run.messages.values()):,} messages that this "
            "run has exported, which stay"
        ) from full
