"""Write the rows of one task, on an executor."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import pyarrow as pa

from hastore.client.connections.bootstrap import parse_bootstrap
from hastore.client.producer.repeatable_sender import RecordsDifferError, RepeatableSender
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    ClientError,
    HastoreError,
    NotStoredError,
    OutcomeUnknown,
    UnreachableError,
    UsageError,
)
from hastore.spark.options.names import BOOTSTRAP
from hastore.spark.sink.options import SinkColumns, SinkOptions
from hastore.spark.sink.records import MAX_ROWS, RecordBuilder, RowError, TaskIdentity, number_of

_CAUSE = (
    "Each attempt must have the same rows in the same order. If the source has lost messages of "
    "this batch (retention, or a failover, with failOnDataLoss=false), set the sink's option "
    "idempotent to false until the batch is done: the rows left are stored, some of them twice. "
    "Otherwise sort the rows within the partitions by columns that no two rows share, or "
    "checkpoint the data before the write"
)


def check_nodes(options: SinkOptions) -> None:
    """Wait for an answer of any node, before a batch write begins; raises UnreachableError."""
    sender = _sender(options, f"spark{uuid.uuid4().hex}")
    try:
        _reach(sender, options)
    finally:
        sender.close()


def write_task(
    options: SinkOptions,
    columns: SinkColumns,
    identity: TaskIdentity,
    partition: int,
    batches: Iterator[pa.RecordBatch],
    *,
    is_new: bool = False,
) -> int:
    """Write the rows that earlier attempts have not written; return how many the task has.

    Returns when all are confirmed. If the query `is_new`, no node may have answered it yet: then it
    does not wait long for a first answer.
    """
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:  # a stream has many such tasks: spare them the connection
        return 0
    if not options.idempotent:
        identity = TaskIdentity(f"spark{uuid.uuid4().hex}", 0)
    sender = _sender(options, identity.producer_id)
    try:
        if is_new:
            _reach(sender, options)
        return _Task(sender, identity, partition).run(options, columns, chain([first], filled))
    finally:
        sender.close()


def _sender(options: SinkOptions, producer_id: str) -> RepeatableSender:
    return RepeatableSender(
        parse_bootstrap(options.bootstrap),
        producer_id,
        acks=options.acks,
        sync_flush=options.sync_flush,
        delivery_timeout_s=options.patience.later_s,
        security=options.security,
    )


def _reach(sender: RepeatableSender, options: SinkOptions) -> None:
    patience = options.patience
    try:
        sender.reach(patience.first_s)
    except UnreachableError as failure:
        raise UnreachableError(
            f"no node of {','.join(options.bootstrap)} answered within {patience.first_s:g} s"
            f"{patience.changed_by}: {failure}; check {options.names.said(BOOTSTRAP)}, that a node "
            "runs there, and that Spark's driver and executors can reach the nodes' API ports"
        ) from failure


class _Task:
    """One attempt of one task."""

    def __init__(self, sender: RepeatableSender, identity: TaskIdentity, partition: int) -> None:
        self._sender = sender
        self._identity = identity
        self._partition = partition

    def run(
        self, options: SinkOptions, columns: SinkColumns, batches: Iterator[pa.RecordBatch]
    ) -> int:
        with self._explained(options):
            self._sender.begin(self._identity.first)
        self._check_not_passed()
        with self._explained(options):
            rows = self._send(options, columns, batches)
            self._sender.finish()
        self._check_not_passed()  # another attempt may have come meanwhile
        self._check_count(rows)
        return rows

    @contextmanager
    def _explained(self, options: SinkOptions) -> Iterator[None]:
        """Say in an error which rows it is about, and what to do."""
        try:
            yield
        except RowError as failure:
            raise UsageError(
                f"row {failure.row} of partition {self._partition}: {failure.problem}"
            ) from failure
        except RecordsDifferError as failure:
            row = failure.number - self._identity.first
            raise UsageError(
                f"row {row} of partition {self._partition} is not the row that an earlier attempt "
                f"has stored in its place. {_CAUSE}"
            ) from failure
        except HastoreError as failure:
            raise self._failure(failure, options) from failure

    def _send(
        self, options: SinkOptions, columns: SinkColumns, batches: Iterator[pa.RecordBatch]
    ) -> int:
        sender, identity = self._sender, self._identity
        builder = RecordBuilder(
            columns,
            topic=options.topic,
            default_topic=options.default_topic,
            partition=self._partition,
            producer_id=identity.producer_id,
            first_number=identity.first,
            queues_of=sender.queues_of,
            born_host=sender.born_host(),
        )
        rows = 0
        for batch in batches:
            end = number_of(identity, rows + batch.num_rows)
            if end > sender.start:  # else all of its rows are stored
                skip = max(0, sender.start - identity.first - rows)
                for chunk in builder.build(
                    batch.slice(skip), rows + skip, int(SYSTEM_CLOCK.wall_ms())
                ):
                    sender.put(
                        chunk.topic, chunk.payload, identity.first + chunk.first_row, chunk.rows
                    )
            rows += batch.num_rows
        return rows

    def _check_not_passed(self) -> None:
        """Raise UsageError if the group has rows of a later batch of the query.

        Spark repeats only the last batch that a checkpoint knows. So this is another checkpoint
        with the id of that query, and its rows may be others, for another topic: without this they
        would be taken for rows that are stored.
        """
        last, identity = self._sender.last_known, self._identity
        if last is None or last < identity.end:
            return
        later = identity.batch + (last - identity.first) // MAX_ROWS
        raise UsageError(
            f"partition {self._partition} of batch {identity.batch} of query {identity.query} is "
            f"not written: the group already has rows of its batch {later}, so it would take these "
            "for rows that are stored, and leave them out. The query's checkpoint was copied, or "
            "set back to an earlier batch. Start the query with a new checkpoint, and the "
            "startingOffsets to go on from; or set the sink's option idempotent to false: then all "
            "rows are written, also those that are stored already"
        )

    def _check_count(self, rows: int) -> None:
        """Raise UsageError if an earlier attempt has stored more rows than this one has."""
        last, identity = self._sender.last_known, self._identity
        if last is not None and identity.first + rows <= last < identity.end:
            raise UsageError(
                f"partition {self._partition} has {rows} rows, but an earlier attempt has stored "
                f"{last - identity.first + 1}. {_CAUSE}. A writeId belongs to one write: another "
                "write needs another one"
            )

    def _failure(self, failure: HastoreError, options: SinkOptions) -> HastoreError:
        kind = UsageError if isinstance(failure, UsageError) else ClientError
        text = f"partition {self._partition}: {failure}"
        if isinstance(failure, UnreachableError | NotStoredError | OutcomeUnknown):
            patience = options.patience
            how = f"the option {patience.option} is how long to wait: " if patience.option else ""
            text += f" ({how}{patience.later_s:g} s)"
        waiting = self._sender.unconfirmed
        if waiting is not None:
            first, end = (number - self._identity.first for number in waiting)
            text = f"rows {first} to {end - 1} of {text}"
        return kind(
            f"{text}. Rows that were confirmed before stay in the log; a repeated task goes on "
            "after them"
        )
