"""The recorder around producers and consumers that do what the test says."""

from __future__ import annotations

import pathlib
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from hastore import OutgoingMessage, Position, Producer, SendResult, Status
from hastore.client.consumer.sharing import TopicQueue
from hastore.client.messages import decode_messages
from hastore.errors import (
    FlushSlaveTimeout,
    MessageIllegalError,
    NotAuthenticatedError,
    NotStoredError,
    OutcomeUnknown,
    PositionBehindError,
    UnreachableError,
    UsageError,
)
from hastore.history import Recorder
from hastore.history.rules import events as e
from hastore.record.codec import Record, encode_record
from hastore.record.properties import encode_properties
from tests.history.healthy import check


class FakeProducer:
    """Gives each call the next of its answers: a result, or an exception to raise."""

    producer_id = "pid"

    def __init__(self, *answers: Any) -> None:
        self.hook: Callable[[], object] = lambda: None  # called first by each call
        self.answers = list(answers)
        self.closed = False
        self.futures: list[Future[Any]] = []

    def __enter__(self) -> FakeProducer:
        return self

    def close(self, _timeout_s: float | None = None) -> None:
        self.closed = True

    def send(self, _topic: str, _body: bytes, **_more: Any) -> Future[Any]:
        self.hook()
        if self.answers and isinstance(self.answers[0], UnreachableError):
            raise self.answers.pop(0)
        future: Future[Any] = Future()
        self.futures.append(future)
        return future

    def send_sync(self, *_given: Any, **_more: Any) -> Any:
        self.hook()
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    send_batch = send
    transaction = send_sync


def result(number: int, **more: Any) -> SendResult:
    told = {"level": "SYNC_MEM(1)", "offset": 100 * number, "queue_offset": number, "epoch": 9}
    return SendResult(Status.PUT_OK, "T", 2, **(told | more))


def recorded(*answers: Any, **more: Any) -> tuple[list[e.Event], Any, FakeProducer]:
    events: list[e.Event] = []
    fake = FakeProducer(*answers)
    return events, Recorder(sink=events.append).producer(fake, **more), fake


def test_a_send_is_recorded_with_its_place() -> None:
    events, producer, fake = recorded(result(3), acks="all", sync_flush=True)
    producer.send_sync("T", b"body", key=b"k")
    _, send, ok = events
    assert isinstance(send, e.Send) and isinstance(ok, e.Ok)
    assert (send.client, send.op, send.topic, send.acks) == ("producer-1", 1, "T", "all")
    assert send.digest == e.digest_of("T", "k", b"body") and send.sync_flush
    assert (ok.offset, ok.queue, ok.queue_offset, ok.epoch) == (300, 2, 3, 9)
    assert ok.op == send.op and ok.t >= send.t and ok.level == "SYNC_MEM(1)"
    assert producer.producer_id == "pid", "all else is the producer's"
    with producer:
        future = producer.send("T", bytearray(b"1"))
        assert isinstance(events[-1], e.Send) and not fake.closed
        fake.futures[0].set_result(result(4))
        assert future.result().offset == 400 and isinstance(events[-1], e.Ok)
    assert fake.closed and isinstance(events[-1], e.Closed)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NotStoredError("no", Status.BUSY), e.Fail),
        (MessageIllegalError("no"), e.Fail),
        (OutcomeUnknown("?"), e.Info),
        (FlushSlaveTimeout("?", None), e.Info),
        (ConnectionError("a fault of the client itself"), e.Info),
        (KeyboardInterrupt(), e.Info),
    ],
)
def test_only_what_is_certain_is_a_failure(error: BaseException, kind: type[e.Event]) -> None:
    events, producer, fake = recorded(error)
    with pytest.raises(type(error)):
        producer.send_sync("T", b"body")
    assert type(events[-1]) is kind
    producer.send("T", b"body")
    fake.futures[0].set_exception(error)
    assert type(events[-1]) is kind
    assert [type(one) for one in events].count(e.Send) == 2


def test_what_send_itself_raises_was_not_sent() -> None:
    events, producer, _ = recorded(UnreachableError("no master"))
    with pytest.raises(UnreachableError):
        producer.send("T", b"body")
    assert isinstance(events[-1], e.Fail)


def test_a_cancelled_future_leaves_the_outcome_open() -> None:
    events, producer, fake = recorded()
    producer.send("T", b"body")
    fake.futures[0].cancel()
    fake.futures[0].set_running_or_notify_cancel()
    assert isinstance(events[-1], e.Info)


def test_without_an_answer_nothing_is_known() -> None:
    events, producer, _ = recorded(result(0, level="", offset=None, queue_offset=None))
    producer.send_sync("T", b"body")
    assert isinstance(events[-1], e.Ok) and events[-1].offset is None
    assert check([*events, e.Log(0, 0)]).counts["unknown"] == 1


def test_each_message_of_a_batch_is_a_send() -> None:
    events, producer, fake = recorded()
    given = [b"1", OutgoingMessage(b"2", key="k"), OutgoingMessage(b"3", delay_level=2)]
    producer.send_batch("T", iter(given))
    sends = [one for one in events if isinstance(one, e.Send)]
    assert [one.digest for one in sends[:2]] == [
        e.digest_of("T", None, b"1"), e.digest_of("T", "k", b"2"),
    ]  # fmt: skip
    assert [one.indirect for one in sends] == [False, False, True]
    fake.futures[0].set_result([result(n) for n in range(3)])
    assert [type(one) for one in events[-3:]] == [e.Ok] * 3
    producer.send_batch("T", [b"4", b"5"])
    fake.futures[1].set_exception(NotStoredError("the second", Status.BUSY))
    assert [type(one) for one in events[-2:]] == [e.Info] * 2, "the first may be stored"


def test_a_transaction_and_a_delayed_message_are_indirect() -> None:
    events, producer, _ = recorded(object(), result(1))
    producer.transaction("T", b"body", key="k")
    producer.send_sync("T", b"later", delay_level=3)
    sends = [one for one in events if isinstance(one, e.Send)]
    assert [one.indirect for one in sends] == [True, True]


def test_a_send_and_a_commit_are_in_the_file_before_they_begin(tmp_path: pathlib.Path) -> None:
    """The process may be killed as soon as others see them."""
    path = tmp_path / "h.jsonl"

    def last() -> e.Line:
        return e.decode(path.read_bytes().splitlines(keepends=True)[-1], "h.jsonl")

    recorder = Recorder(path, nodes=2)
    assert e.decode_header(path.read_bytes(), "h.jsonl").nodes == 2
    seen: list[e.Line] = []
    fake = FakeProducer(result(1), object())
    fake.hook = lambda: seen.append(last())
    producer = recorder.producer(fake)
    producer.send_sync("T", b"1")
    producer.transaction("T", b"2")
    producer.send("T", b"3")
    producer.send_batch("T", [b"4", b"5"])
    assert [type(one) for one in seen] == [e.Send] * 4
    assert [getattr(one, "op", 0) for one in seen] == [1, 2, 3, 5]

    consumer = FakeConsumer()
    consumer.polls = [messages(0)]
    consumer.hook = lambda: seen.append(last())
    member = recorder.consumer(consumer)
    member.poll()
    member.commit()
    assert type(seen[-1]) is e.Commit and b'"read"' in path.read_bytes(), "what it got is there"
    recorder.close()


# -- consumers


def messages(*places: int, queue: int = 0, topic: str = "T") -> list[Any]:
    properties = [[("KEYS", "k"), ("HS_PID", "p"), ("HS_SEQ", str(place))] for place in places]
    payload = b"".join(
        encode_record(
            Record(
                b"%d" % place,
                topic,
                queue,
                encode_properties(pairs),
                queue_offset=place,
                physical_offset=100 * place,
                body_crc=zlib.crc32(b"%d" % place) & 0x7FFFFFFF,
            )
        )
        for place, pairs in zip(places, properties, strict=True)
    )
    found, damage = decode_messages(payload, [(7, 0)])
    assert damage is None
    return found


class FakeConsumer:
    topic, group = "T", "g"

    def __init__(self) -> None:
        self.polls: list[list[Any]] = []
        self.places: Any = {0: Position(0)}
        self.hook: Callable[[], object] = lambda: None  # called first by a commit
        self.error: Exception | None = None

    def __enter__(self) -> FakeConsumer:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self.polls.pop(0))

    def poll(self, _most: int, _timeout_s: float) -> list[Any]:
        return self.polls.pop(0)

    def positions(self) -> Any:
        return self.places

    committed = positions

    def commit(self) -> None:
        self.hook()
        if self.error is not None:
            raise self.error

    def seek(self, *_given: Any) -> None:
        """Move."""

    seek_to_time = seek_to_earliest = seek_to_latest = seek
    close = __enter__


class FakeShared(FakeConsumer):
    def __init__(self) -> None:
        super().__init__()
        self.assignment: list[TopicQueue] = []
        self._handles: dict[TopicQueue, int] = {}


def watched(fake: FakeConsumer, **more: Any) -> tuple[list[e.Event], Any]:
    events: list[e.Event] = []
    return events, Recorder(sink=events.append).consumer(fake, **more)


def test_what_a_consumer_gets_is_recorded_by_queue() -> None:
    fake = FakeConsumer()
    events, consumer = watched(fake, filtered=True)
    begun = events[-1]
    assert isinstance(begun, e.Consumer) and begun.filtered and not begun.shared
    fake.polls = [[*messages(4, 5), *messages(1, queue=3)], [], messages(6)]
    assert len(consumer.poll()) == 3
    one, other = events[-2:]
    assert isinstance(one, e.Read) and isinstance(other, e.Read)
    assert (one.queue, other.queue) == (0, 3) and one.t >= one.began
    seen = e.Seen(4, 400, e.digest_of("T", "k", b"4"), 7, "p", 4)
    assert one.messages[0] == seen
    before = len(events)
    assert consumer.poll() == [] and len(events) == before
    assert [message.queue_offset for message in consumer] == [6]
    with consumer:
        pass
    assert isinstance(events[-2], e.Read) and isinstance(events[-1], e.Closed)


def test_a_commit_is_recorded_with_its_positions() -> None:
    fake = FakeConsumer()
    events, consumer = watched(fake)
    fake.places = {0: Position(5), 2: Position(7)}
    consumer.commit()
    commit, ok = events[-2:]
    assert isinstance(commit, e.Commit) and isinstance(ok, e.Ok) and commit.op == ok.op
    assert commit.places == [e.Place("T", 0, 5), e.Place("T", 2, 7)] and not commit.back
    consumer.seek(0, 3)
    assert isinstance(events[-1], e.Seek) and events[-1].queue == 0
    fake.error = PositionBehindError("another consumer is ahead")
    with pytest.raises(PositionBehindError):
        consumer.commit()
    assert isinstance(events[-1], e.Fail)
    fake.error = None
    consumer.commit()
    assert isinstance(events[-2], e.Commit) and events[-2].back, "the seek still counts"
    consumer.commit()
    assert isinstance(events[-2], e.Commit) and not events[-2].back
    assert consumer.committed() == fake.places
    assert isinstance(events[-1], e.Position) and not events[-1].current
    for move in (consumer.seek_to_earliest, consumer.seek_to_latest):
        move()
        assert isinstance(events[-1], e.Seek) and events[-1].queue is None


@pytest.mark.parametrize("error", [UnreachableError, NotAuthenticatedError])
def test_a_commit_without_an_answer_may_count(error: type[Exception]) -> None:
    """The master did it and was killed; a new consumer goes on from there, and commits less."""
    fake = FakeConsumer()
    events, consumer = watched(fake)
    fake.places = {0: Position(100)}
    consumer.commit()
    consumer.seek(0, 0)
    fake.places, fake.error = {0: Position(0)}, error("did not answer within 5 s")
    with pytest.raises(error):
        consumer.commit()
    assert isinstance(events[-1], e.Info)
    after = FakeConsumer()
    after.places = {0: Position(10)}
    recorder = Recorder(sink=events.append)
    events.pop()  # a second header
    recorder.consumer(after, "another").commit()
    assert not check(events).broken


def test_the_queues_of_a_member_come_and_leave() -> None:
    fake = FakeShared()
    events, consumer = watched(fake)
    fake._handles = {TopicQueue("T", 0): 1, TopicQueue("T", 1): 2}
    fake.polls = [messages(0), messages(0, queue=1), messages(0, queue=1)]
    consumer.poll()
    assert [type(one) for one in events[-3:]] == [e.Assigned, e.Assigned, e.Read]
    fake._handles = {TopicQueue("T", 1): 2}
    consumer.poll()
    assert [type(one) for one in events[-2:]] == [e.Revoked, e.Read]
    fake._handles = {TopicQueue("T", 1): 3}
    consumer.poll()
    found = [type(one) for one in events[-3:]]
    assert found == [e.Revoked, e.Assigned, e.Read], "it went and came back meanwhile"
    fake.places = {TopicQueue("T", 1): Position(1)}
    consumer.commit()
    assert isinstance(events[-2], e.Commit) and events[-2].places == [e.Place("T", 1, 1)]
    consumer.seek(TopicQueue("T", 1), 0)
    assert isinstance(events[-1], e.Seek) and events[-1].queue == 1


def test_clients_that_cannot_be_recorded_are_refused() -> None:
    class OfCluster(FakeProducer):
        groups = ("g0", "g1")

    class OfAsyncio(FakeConsumer):
        async def close(self) -> None:  # type: ignore[override]
            """Close."""

    recorder = Recorder(sink=lambda _event: None)
    with pytest.raises(UsageError, match="a history is of one group"):
        recorder.producer(OfCluster())
    with pytest.raises(UsageError, match="hastore.aio cannot be recorded"):
        recorder.consumer(OfAsyncio())


def test_faults_and_rows_are_recorded() -> None:
    events: list[e.Event] = []
    recorder = Recorder(mode="dledger", nodes=3, topics=["T", "A"], sink=events.append)
    assert events[0] == e.Header(mode="dledger", nodes=3, topics=["A", "T"])
    recorder.fault("kill", 2)
    assert isinstance(events[1], e.Fault) and (events[1].fault, events[1].node) == ("kill", 2)
    recorder.rows("T", 1, 10, 12, [(10, "k", b"a"), (11, None, b"b")])
    digest = e.range_digest([
        (10, e.digest_of("T", "k", b"a")), (11, e.digest_of("T", None, b"b")),
    ])  # fmt: skip
    found = events[2]
    assert isinstance(found, e.Range) and (found.count, found.digest) == (2, digest)
    # As Spark gives them: bytes for a key, which need not be UTF-8, and None for a tombstone.
    recorder.rows("T", 1, 10, 13, [(10, b"k", bytearray(b"a")), (11, bytearray(b"\xff"), None)])
    digest = e.range_digest([
        (10, e.digest_of("T", "k", b"a")), (11, e.digest_of("T", "\udcff", b"")),
    ])  # fmt: skip
    found = events[3]
    assert isinstance(found, e.Range) and found.digest == digest
    recorder.close()
    recorder.fault("kill", 1)
    assert len(events) == 4, "nothing after the end"


def test_a_recorder_does_not_count_as_having_asked_how_a_send_ended(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Recorder(tmp_path / "history") as recorder:
        nobody = Producer("tcp://127.0.0.1:9", delivery_timeout_s=0.2)
        with recorder.producer(nobody) as producer:
            producer.send("t", b"1", queue=0)
            producer.send_batch("t", [b"2"], queue=0)
    assert "whose Futures nobody has asked: 2;" in caplog.text


def test_times_are_those_of_other_programs_on_a_machine_that_was_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Java's nanoTime and Python's monotonic_ns do not count a suspend; one history has both."""
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    monkeypatch.setattr(time, "clock_gettime", lambda _which: 3_605.0)
    events: list[e.Event] = []
    Recorder(sink=events.append).fault("kill")
    assert isinstance(events[-1], e.Fault) and events[-1].t == 5_000_000_000
