"""Traces: the span of a send and that of the message's processing, over a real pair."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import hastore.aio
from hastore import Consumer, Decision, Message, OutgoingMessage, Producer, SendResult, Status
from hastore.client.producer.cluster_producer import ClusterProducer
from hastore.errors import MessageIllegalError, NotStoredError, UsageError
from hastore.otel import AsyncTracedProducer, TracedProducer, context_of, processing
from hastore.testing import Group, group

FOREIGN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with group() as made:
        yield made


class Traces:
    """A provider that keeps its spans."""

    def __init__(self) -> None:
        self.kept = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.kept))

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans that have ended, in this order."""
        return list(self.kept.get_finished_spans())


@pytest.fixture
def traces() -> Traces:
    return Traces()


def read(pair: Group, topic: str, count: int) -> list[Message]:
    found: list[Message] = []
    with Consumer(topic, pair.bootstrap) as consumer:
        while len(found) < count:
            found += consumer.poll(timeout_s=60)
    return sorted(found, key=lambda one: one.offset)


def id_of(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def test_a_trace_goes_on_from_the_producer_to_who_processes_the_message(
    pair: Group, traces: Traces
) -> None:
    tracer = trace.get_tracer("test", tracer_provider=traces.provider)
    with TracedProducer(Producer(pair.bootstrap), traces.provider) as producer:
        with tracer.start_as_current_span("order"):
            producer.send("one", b"1", key="k", properties={"a": "b"}).result(60)
            result = producer.send_sync("one", b"22", queue=0)
        assert producer.flush(60) and producer.master, "the rest is the producer's own"
    messages = read(pair, "one", 2)
    assert messages[0].properties["a"] == "b" and messages[0].key == "k"
    for message in messages:
        with processing(message, group="billing", tracer_provider=traces.provider) as span:
            assert trace.get_current_span() is span
    named = {one.name: one for one in traces.spans}
    assert set(named) == {"order", "send one", "process one"}
    sends = [one for one in traces.spans if one.name == "send one"]
    done = [one for one in traces.spans if one.name == "process one"]
    for send in sends:
        assert send.parent is not None
        assert (send.parent.trace_id, send.parent.span_id) == id_of(named["order"])
        assert send.kind is SpanKind.PRODUCER and send.status.status_code is StatusCode.UNSET
    parents = [(one.parent.trace_id, one.parent.span_id) for one in done if one.parent is not None]
    assert sorted(parents) == sorted(map(id_of, sends))
    told = dict(sends[-1].attributes or {})
    assert told == {
        "messaging.system": "hastore",
        "messaging.destination.name": "one",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.client.id": producer.producer_id,
        "messaging.message.body.size": 2,
        "messaging.destination.partition.id": "0",
        "messaging.message.id": result.msg_id,
        "hastore.queue_offset": result.queue_offset,
    }
    told = dict(done[-1].attributes or {})
    assert done[-1].kind is SpanKind.CONSUMER
    assert told["messaging.consumer.group.name"] == "billing"
    assert told["messaging.message.id"] == messages[-1].message_id


def test_a_batch_has_one_span_and_keeps_what_its_messages_carry(
    pair: Group, traces: Traces
) -> None:
    batch = [b"1", OutgoingMessage(b"2", key="k"), OutgoingMessage(b"3", None, None,
             {"traceparent": FOREIGN})]  # fmt: skip
    with TracedProducer(Producer(pair.bootstrap), traces.provider) as producer:
        assert len(producer.send_batch("batch", batch, queue=0).result(60)) == 3
    [span] = traces.spans
    assert (span.attributes or {})["messaging.batch.message_count"] == 3
    carried = [
        trace.get_current_span(context_of(one)).get_span_context()
        for one in read(pair, "batch", 3)
    ]
    assert [(one.trace_id, one.span_id) for one in carried[:2]] == [id_of(span)] * 2
    assert carried[2].span_id == 0xB7AD6B7169203331


def test_a_producer_for_a_whole_cluster_is_traced(
    traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no id: each of its groups has one."""
    future: Future[SendResult] = Future()
    future.set_result(SendResult(Status.PUT_OK, "T", 3))
    monkeypatch.setattr(ClusterProducer, "send", lambda *_, **__: future)
    whole = object.__new__(ClusterProducer)
    assert TracedProducer(whole, traces.provider).send("T", b"1").result() == future.result()
    [span] = traces.spans
    assert span.name == "send T" and "messaging.client.id" not in (span.attributes or {})


def test_failures_are_in_the_span_and_raised(pair: Group, traces: Traces) -> None:
    with TracedProducer(Producer(pair.bootstrap), traces.provider) as producer:
        with pytest.raises(MessageIllegalError):
            producer.send("a topic", b"")
        with pytest.raises(UsageError):
            producer.send_sync("T", b"", properties=7)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            producer.send_batch("T", [b"", 7])  # type: ignore[list-item]
        with pytest.raises(MessageIllegalError):
            producer.send("T", b"", properties={"a": "b" * 40_000}).result(60)
    errors = [(one.attributes or {})["error.type"] for one in traces.spans]
    assert errors == ["MessageIllegalError", "UsageError", "UsageError", "MessageIllegalError"]
    assert {one.status.status_code for one in traces.spans} == {StatusCode.ERROR}


def test_an_exception_while_a_message_is_processed_is_recorded(
    pair: Group, traces: Traces
) -> None:
    with Producer(pair.bootstrap) as producer:
        for value in ("no context", FOREIGN):
            producer.send("bad", b"", properties={"traceparent": value}, queue=0).result(60)
    for message in read(pair, "bad", 2):
        with pytest.raises(ZeroDivisionError), processing(message, tracer_provider=traces.provider):
            raise ZeroDivisionError
    new, foreign = traces.spans
    assert new.parent is None, "a bad context is none"
    assert foreign.parent is not None and foreign.parent.span_id == 0xB7AD6B7169203331
    assert (foreign.attributes or {})["error.type"] == "ZeroDivisionError"
    assert [event.name for event in foreign.events] == ["exception"]


def test_baggage_of_others_that_is_no_text_harms_no_consumer() -> None:
    found = {"traceparent": FOREIGN, "baggage": "a=b;c\udcff\udcff"}  # as decoded from bytes
    message: Any = SimpleNamespace(properties=found)
    context = context_of(message)
    assert trace.get_current_span(context).get_span_context().span_id == 0xB7AD6B7169203331


def test_a_span_that_is_current_is_linked(pair: Group, traces: Traces) -> None:
    with TracedProducer(Producer(pair.bootstrap), traces.provider) as producer:
        producer.send_sync("linked", b"")
    [message] = read(pair, "linked", 1)
    tracer = trace.get_tracer("test", tracer_provider=traces.provider)
    with tracer.start_as_current_span("poll"), processing(message, tracer_provider=traces.provider):
        pass
    send, process, poll = traces.spans
    assert [(one.context.trace_id, one.context.span_id) for one in process.links] == [id_of(poll)]
    assert process.parent is not None and process.parent.span_id == id_of(send)[1]


def test_transactions_carry_the_context(pair: Group, traces: Traces) -> None:
    made = Producer(
        pair.bootstrap, transaction_group="g", check=lambda _message: Decision.COMMIT
    )
    with TracedProducer(made, traces.provider) as producer, producer.transaction("tx", b"1"):
        pass
    [message] = read(pair, "tx", 1)
    [span] = traces.spans
    carried = trace.get_current_span(context_of(message)).get_span_context()
    assert (carried.trace_id, carried.span_id) == id_of(span)


def test_asyncio(pair: Group, traces: Traces) -> None:
    tracer = trace.get_tracer("test", tracer_provider=traces.provider)

    async def send() -> None:
        made = hastore.aio.Producer(
            pair.bootstrap, transaction_group="h", check=lambda _message: Decision.COMMIT
        )
        async with AsyncTracedProducer(made, traces.provider) as producer:
            await asyncio.gather(*(producer.send("aio", b"1") for _ in range(3)))
            await producer.send_batch("aio", [b"2", b"3"])
            with tracer.start_as_current_span("order"):
                async with producer.transaction("aio", b"4"):
                    pass
            with pytest.raises(MessageIllegalError):
                await producer.send("a topic", b"")

    asyncio.run(send())
    assert [one.name for one in traces.spans] == ["send aio"] * 4 + ["order", "send a topic"]
    known = {id_of(one) for one in traces.spans}
    for message in read(pair, "aio", 6):
        carried = trace.get_current_span(context_of(message)).get_span_context()
        assert (carried.trace_id, carried.span_id) in known


@pytest.mark.parametrize("kind", [TracedProducer, AsyncTracedProducer])
@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied_or_pickled(kind: Any, use: Callable[[Any], Any]) -> None:
    with Producer(["tcp://127.0.0.1:9"]) as producer:
        with pytest.raises(UsageError, match=f"a {kind.__name__} has connections"):
            use(kind(producer))


def test_without_opentelemetry_the_import_says_what_to_install() -> None:
    script = "import sys; sys.modules['opentelemetry'] = None; import hastore.otel"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        "HastoreError: hastore.otel needs OpenTelemetry: pip install 'hastore[otel]'"
    )


def test_a_trace_does_not_count_as_having_asked_how_a_send_ended(
    traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = Producer("tcp://127.0.0.1:9", delivery_timeout_s=0.2)
    with TracedProducer(nobody, traces.provider) as producer:
        producer.send("t", b"1", queue=0)
        producer.send_batch("t", [b"2"], queue=0)
        with pytest.raises(NotStoredError):
            producer.send("t", b"3", queue=0).result(60)
    assert "whose Futures nobody has asked: 2;" in caplog.text
    assert [span.status.status_code for span in traces.spans] == [StatusCode.ERROR] * 3
