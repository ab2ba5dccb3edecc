"""Record what an application's producers and consumers see, as a history for `hastore check`."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, Self

from hastore.client.messages import Message, SendResult
from hastore.client.producer.futures import watch
from hastore.client.producer.preparer import Body, OutgoingMessage
from hastore.clock import AWAKE_CLOCK, Clock
from hastore.errors import (
    CorruptRecordError,
    FencedError,
    ForbiddenError,
    NotAuthenticatedError,
    NotStoredError,
    PositionBehindError,
    UnreachableError,
    UsageError,
)
from hastore.history.rules import events as e

# Nothing was sent, or nothing was stored. All other exceptions leave it open.
_CERTAIN = (
    NotStoredError, UsageError, UnreachableError, ForbiddenError, NotAuthenticatedError,
    PositionBehindError, FencedError,
)  # fmt: skip
# Of a commit these two may come after an attempt whose answer was lost.
_OPEN_OF_A_COMMIT = (UnreachableError, NotAuthenticatedError)
# What follows these changes what others see, or may end this process: without them, and the reads
# before a commit, the checker would find messages and positions that are nobody's.
_AT_ONCE = (e.Header, e.Send, e.Commit, e.Fault)
# Queue offset, key, body; as Spark gives them, the key has bytes, and a tombstone no body.
Row = tuple[int, "str | bytes | bytearray | None", "bytes | bytearray | None"]


class Recorder:
    """Writes a history; thread-safe. Close it, or use it in a `with`, before it is checked.

    If its process is killed, the file has all that was sent and committed; of the answers and
    reads the last ones may be missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        mode: Literal["sync", "async", "dledger"] = "sync",
        nodes: int = 0,
        acks: int = 1,
        topics: Collection[str] | None = None,
        sink: Callable[[e.Event], object] | None = None,
        clock: Clock = AWAKE_CLOCK,
    ) -> None:
        """Begin a history in the file `path`, which is replaced; raises OSError.

        `mode`: "sync" for masters with `role: SYNC_MASTER`, "async", or "dledger"; `nodes`: how
        many the group has, 0 if it is not known; `acks`: of the group in mode classic. `topics`:
        those whose messages are all sent by recorded producers; None: those with a send. `sink`
        gets the events instead of a file.
        """
        self._lock = threading.Lock()
        self._clock = clock
        self._file = None if path is None else open(path, "wb")
        self._sink = sink
        self._counts: dict[str, int] = {}
        named = None if topics is None else sorted(topics)
        self.add(e.Header(mode=mode, nodes=nodes, acks=acks, topics=named))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the history; what clients see later is not in it."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = self._sink = None

    def producer(
        self,
        producer: Any,
        name: str | None = None,
        *,
        acks: Literal["all", 1, 0] | None = None,
        sync_flush: bool = False,
    ) -> RecordedProducer:
        """Return a producer that records what `producer` sends, and how it ends.

        `acks` and `sync_flush`: as `producer` has them; then no reply may state a lower level.
        Raises UsageError for a producer of a whole cluster, or of hastore.aio.
        """
        _check_client(producer)
        return RecordedProducer(self, producer, self._named("producer", name), acks, sync_flush)

    def consumer(
        self, consumer: Any, name: str | None = None, *, filtered: bool = False
    ) -> RecordedConsumer:
        """Return a consumer that records what `consumer` gets and commits.

        `filtered`: it reads by `tags` or `sql`, so it need not see all messages. Raises UsageError
        for a consumer of a whole cluster, or of hastore.aio.
        """
        _check_client(consumer)
        return RecordedConsumer(self, consumer, self._named("consumer", name), filtered=filtered)

    def fault(self, name: str, node: int | None = None) -> None:
        """Note a fault of a node, now; docs/testing.md says which ones excuse a loss."""
        self.add(e.Fault(self.now(), name, node))

    def rows(self, topic: str, queue: int, start: int, end: int, rows: Iterable[Row]) -> None:
        """Note what a job got of the queue offsets [start, end), such as a query of Spark."""
        seen = [
            (place, e.digest_of(topic, _as_text(key), bytes(body or b"")))
            for place, key, body in rows
        ]
        digest = e.range_digest(seen)
        self.add(e.Range("job", self.now(), topic, queue, start, end, len(seen), digest))

    def add(self, event: e.Event) -> None:
        """Write any event; nothing after `close`.

        Sends, commits and faults are in the file when this returns, though not synced.
        """
        with self._lock:
            if self._file is not None:
                self._file.write(e.encode(event))
                if isinstance(event, _AT_ONCE):
                    self._file.flush()
            elif self._sink is not None:
                self._sink(event)

    def now(self) -> int:
        """Return the time for an event, in ns, by the clock of other programs' histories."""
        return int(self._clock.monotonic_ms() * 1e6)

    def _named(self, kind: str, name: str | None) -> str:
        with self._lock:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
        return name or f"{kind}-{number}"


def _as_text(key: str | bytes | bytearray | None) -> str | None:
    """Return a key as messages have it, and the records of a log."""
    return key if key is None or isinstance(key, str) else key.decode("utf-8", "surrogateescape")


def _check_client(client: Any) -> None:
    if hasattr(client, "groups"):
        raise UsageError("record the clients of each group: a history is of one group")
    if inspect.iscoroutinefunction(getattr(client, "close", None)):
        raise UsageError("the clients of hastore.aio cannot be recorded")


class _Calls:
    """The calls of a client that begin and end: their numbers, and how they end."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name
        self.next = itertools.count(1).__next__

    def end(self, op: int, result: SendResult | None = None) -> None:
        """Note that a call has succeeded."""
        now = self.recorder.now()
        if result is None:
            self.recorder.add(e.Ok(self.name, op, now))
            return
        queue = None if result.offset is None else result.queue_id
        self.recorder.add(e.Ok(self.name, op, now, result.level, result.offset, queue,
                               result.queue_offset, result.epoch))  # fmt: skip

    def fail(self, op: int, error: BaseException, still_open: tuple[type, ...] = ()) -> None:
        """Note that a call has raised: it was certainly not carried out, or nobody knows.

        Errors of the types `still_open` say nothing of this call.
        """
        is_certain = isinstance(error, _CERTAIN) and not isinstance(error, still_open)
        kind = e.Fail if is_certain else e.Info
        text = f"{type(error).__name__}: {error}"
        self.recorder.add(kind(self.name, op, self.recorder.now(), text))


class RecordedProducer:
    """A hastore.Producer whose sends are recorded; all else is as with the producer itself.

    The outcome of delayed messages, and of transactions, is recorded as not known: the reply names
    the record in which they wait.
    """

    def __init__(
        self,
        recorder: Recorder,
        producer: Any,
        name: str,
        acks: Literal["all", 1, 0] | None,
        sync_flush: bool,
    ) -> None:
        """Record what `producer` sends; Recorder.producer makes it."""
        self._calls = _Calls(recorder, name)
        self._producer = producer
        self._acks: Any = None if acks is None else str(acks)
        self._sync_flush = sync_flush

    def __getattr__(self, name: str) -> Any:
        """Return what is not recorded as the producer has it."""
        return getattr(self._producer, name)

    def __enter__(self) -> Self:
        self._producer.__enter__()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def send(self, topic: str, body: Body, **more: Any) -> Future[SendResult]:
        """Send a message as Producer.send does."""
        op = self._begin(topic, body, more.get("key"), more.get("delay_level") is not None)
        try:
            future: Future[SendResult] = self._producer.send(topic, body, **more)
        except BaseException as failure:
            self._calls.fail(op, failure)
            raise
        watch(future, partial(self._ended, [op]))
        return future

    def send_sync(self, topic: str, body: Body, **more: Any) -> SendResult:
        """Send a message as Producer.send_sync does."""
        op = self._begin(topic, body, more.get("key"), more.get("delay_level") is not None)
        with self._failing([op]):
            result: SendResult = self._producer.send_sync(topic, body, **more)
        self._calls.end(op, result)
        return result

    def send_batch(
        self, topic: str, messages: Iterable[OutgoingMessage | Body], **more: Any
    ) -> Future[list[SendResult]]:
        """Send messages as Producer.send_batch does."""
        given = list(messages)
        ops = []
        for one in given:
            if isinstance(one, OutgoingMessage):
                delayed = one.delay_level is not None
                ops.append(self._begin(topic, one.body, one.key, delayed))
            else:
                ops.append(self._begin(topic, one, None, delayed=False))
        with self._failing(ops):
            future: Future[list[SendResult]] = self._producer.send_batch(topic, given, **more)
        watch(future, partial(self._ended, ops))
        return future

    def transaction(self, topic: str, body: Body, **more: Any) -> Any:
        """Begin a transaction as Producer.transaction does."""
        op = self._begin(topic, body, more.get("key"), delayed=True)
        with self._failing([op]):
            begun = self._producer.transaction(topic, body, **more)
        self._calls.end(op)
        return begun

    def close(self, timeout_s: float | None = None) -> None:
        """Close the producer; each of its sends must have ended then."""
        self._producer.close(timeout_s)
        recorder = self._calls.recorder
        recorder.add(e.Closed(self._calls.name, recorder.now()))

    def _begin(self, topic: str, body: Body, key: str | bytes | None, delayed: bool) -> int:
        op, recorder = self._calls.next(), self._calls.recorder
        try:
            text = key.decode() if isinstance(key, bytes) else key
            digest = e.digest_of(topic, text, bytes(body))
        except (TypeError, ValueError, AttributeError):
            digest = e.digest_of("", None, b"")  # the producer refuses these arguments
        recorder.add(e.Send(self._calls.name, op, recorder.now(), str(topic), digest,
                            acks=self._acks, sync_flush=self._sync_flush,
                            indirect=delayed))  # fmt: skip
        return op

    @contextlib.contextmanager
    def _failing(self, ops: list[int]) -> Iterator[None]:
        try:
            yield
        except BaseException as failure:
            for op in ops:
                self._calls.fail(op, failure)
            raise

    def _ended(self, ops: list[int], error: BaseException | None, results: Any) -> None:
        if error is not None:
            # Of a batch that failed, some messages may be stored.
            known = error if len(ops) == 1 else TimeoutError(str(error))
            for op in ops:
                self._calls.fail(op, known)
            return
        for op, result in zip(ops, [results] if isinstance(results, SendResult) else results,
                              strict=True):  # fmt: skip
            self._calls.end(op, result)


class RecordedConsumer:
    """A hastore.Consumer, shared or not, whose messages and commits are recorded.

    All else is as with the consumer itself. Commits by `auto_commit_s` are not seen.
    """

    def __init__(self, recorder: Recorder, consumer: Any, name: str, *, filtered: bool) -> None:
        """Record what `consumer` gets; Recorder.consumer makes it."""
        self._calls = _Calls(recorder, name)
        self._consumer = consumer
        self._shared = hasattr(consumer, "assignment")
        self._mine: set[tuple[str, int, int]] = set()  # topic, queue, its handle
        self._sought = False
        recorder.add(e.Consumer(name, recorder.now(), consumer.group, filtered, self._shared))

    def __getattr__(self, name: str) -> Any:
        """Return what is not recorded as the consumer has it."""
        return getattr(self._consumer, name)

    def __enter__(self) -> Self:
        self._consumer.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._consumer.__exit__(*raised)
        self._closed()

    def __iter__(self) -> Iterator[Message]:
        began = self._calls.recorder.now()
        for message in self._consumer:
            self._note(began, [message])
            yield message
            began = self._calls.recorder.now()

    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[Message]:
        """Return messages as Consumer.poll does."""
        began = self._calls.recorder.now()
        found: list[Message] = self._consumer.poll(max_messages, timeout_s)
        self._note(began, found)
        return found

    def seek(self, queue: Any, position: Any) -> None:
        """Move a queue as Consumer.seek does."""
        topic, number = queue if self._shared else (self._consumer.topic, queue)
        self._move(topic, number)
        self._consumer.seek(queue, position)

    def seek_to_earliest(self) -> None:
        """Move all queues as Consumer.seek_to_earliest does."""
        self._move()
        self._consumer.seek_to_earliest()

    def seek_to_latest(self) -> None:
        """Move all queues as Consumer.seek_to_latest does."""
        self._move()
        self._consumer.seek_to_latest()

    def seek_to_time(self, timestamp_ms: Any) -> None:
        """Move all queues as Consumer.seek_to_time does."""
        self._move()
        self._consumer.seek_to_time(timestamp_ms)

    def commit(self) -> None:
        """Commit as Consumer.commit does."""
        places = self._places(self._consumer.positions())
        op, recorder, group = self._calls.next(), self._calls.recorder, self._consumer.group
        recorder.add(e.Commit(self._calls.name, op, recorder.now(), str(group), places,
                              self._sought))  # fmt: skip
        try:
            self._consumer.commit()
        except BaseException as failure:
            self._calls.fail(op, failure, _OPEN_OF_A_COMMIT)
            raise
        self._sought = False
        self._calls.end(op)

    def committed(self) -> Any:
        """Return the group's positions as Consumer.committed does."""
        recorder = self._calls.recorder
        began, found = recorder.now(), self._consumer.committed()
        recorder.add(e.Position(self._calls.name, began, recorder.now(),
                                str(self._consumer.group), self._places(found)))  # fmt: skip
        return found

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()
        self._closed()

    def _closed(self) -> None:
        self._calls.recorder.add(e.Closed(self._calls.name, self._calls.recorder.now()))

    def _move(self, topic: str | None = None, queue: int | None = None) -> None:
        self._sought = True
        recorder = self._calls.recorder
        recorder.add(e.Seek(self._calls.name, recorder.now(), topic, queue))

    def _places(self, positions: Any) -> list[e.Place]:
        named = (
            (*queue, place) if self._shared else (self._consumer.topic, queue, place)
            for queue, place in positions.items()
        )
        return [e.Place(topic, queue, place.queue_offset) for topic, queue, place in named]

    def _note(self, began: int, messages: list[Message]) -> None:
        recorder, now = self._calls.recorder, self._calls.recorder.now()
        if self._shared:
            # A queue may have gone and come back within one call: it has another handle then.
            mine = {(*name, handle) for name, handle in self._consumer._handles.items()}
            for kind, moved in ((e.Revoked, self._mine - mine), (e.Assigned, mine - self._mine)):
                for topic, queue, _ in sorted(moved):
                    recorder.add(kind(self._calls.name, now, topic, queue))
            self._mine = mine
        queues: dict[tuple[str, int], list[e.Seen]] = {}
        for one in messages:
            queues.setdefault((one.topic, one.queue_id), []).append(_seen(one))
        for (topic, queue), seen in queues.items():
            recorder.add(e.Read(self._calls.name, began, now, topic, queue, seen))


def _seen(message: Message) -> e.Seen:
    properties = message.properties
    number = properties.get("HS_SEQ", "")
    try:
        body = message.body
    except (CorruptRecordError, UsageError):  # it does not decompress, or not here
        body = message.raw_body
    return e.Seen(
        message.queue_offset,
        message.offset,
        e.digest_of(message.topic, message.key, body),
        message.epoch,
        properties.get("HS_PID"),
        int(number) if number.isdigit() else None,
        message.next_position.queue_offset - message.queue_offset,
    )
