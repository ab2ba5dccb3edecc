"""Spans of OpenTelemetry for messages; needs the extra `otel`. See docs/python-api.md, "Traces".

    producer = TracedProducer(Producer(bootstrap))
    producer.send("orders", b"...")             # a span "send orders"
    for message in consumer.poll():
        with processing(message, group="billing"):  # a span "process orders" in the same trace
            ...

The context of a send's span travels in the message's properties, by the propagator that the
application has set: traceparent, tracestate and baggage by default. Nodes keep properties as they
are, also of delayed messages, of transactions, and of messages that a consumer sends back. So a
trace goes on in every client that reads them, also in one of RocketMQ.

Names and attributes are those of OpenTelemetry's conventions for messaging.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import hastore
from hastore.client.lifecycle import refuse_pickling
from hastore.client.messages import Message, SendResult
from hastore.client.producer.futures import watch
from hastore.client.producer.preparer import NO_PROPERTIES, Body, OutgoingMessage, Properties
from hastore.client.producer.producer import Producer
from hastore.errors import HastoreError, UsageError

try:
    from opentelemetry import propagate, trace
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
except ImportError as failure:
    raise HastoreError(
        "hastore.otel needs OpenTelemetry: pip install 'hastore[otel]'"
    ) from failure

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer, TracerProvider

    import hastore.aio
    from hastore.aio.transactions import Beginning
    from hastore.client.producer.checker import Transaction

__all__ = ["AsyncTracedProducer", "TracedProducer", "context_of", "processing"]

_SYSTEM = {"messaging.system": "hastore"}


def context_of(message: Message) -> Context:
    """Return the context that a message carries; an empty one if it carries none, or a bad one."""
    # Bytes that are no UTF-8 come as lone surrogates, with which a propagator may raise.
    return propagate.extract({
        name: value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
        for name, value in message.properties.items()
    })  # fmt: skip


@contextlib.contextmanager
def processing(
    message: Message, *, group: str | None = None, tracer_provider: TracerProvider | None = None
) -> Iterator[Span]:
    """Be in a span for what a consumer does with a message, a child of its producer's span.

    A span that is current already, as of a loop over messages, is linked. An exception in the block
    is recorded, and goes on. `group`: the consumer group.
    """
    current = trace.get_current_span().get_span_context()
    attributes: dict[str, str | int] = {
        **_about("process", message.topic),
        "messaging.destination.partition.id": str(message.queue_id),
        "messaging.message.id": message.message_id,
        "messaging.message.body.size": len(message.raw_body),
        "hastore.queue_offset": message.queue_offset,
    }
    if group is not None:
        attributes["messaging.consumer.group.name"] = group
    with _tracer(tracer_provider).start_as_current_span(
        f"process {message.topic}", context_of(message), SpanKind.CONSUMER, attributes,
        links=[Link(current)] if current.is_valid else None,
    ) as span:  # fmt: skip
        try:
            yield span
        except BaseException as failure:
            span.set_attribute("error.type", _name_of(failure))
            raise


class _Traced:
    """What both producers need: a span for each call that sends."""

    def __init__(self, producer: Any, tracer_provider: TracerProvider | None = None) -> None:
        """Trace what `producer` sends; `tracer_provider` None: the application's own."""
        self._producer = producer
        self._tracer = _tracer(tracer_provider)

    def __getattr__(self, name: str) -> Any:
        """Return what is not traced as the producer has it."""
        return getattr(self._producer, name)

    def __reduce__(self) -> NoReturn:
        """Raise UsageError: as its producer, it cannot be pickled or copied."""
        refuse_pickling(self)

    def _begin(self, topic: str, **attributes: str | int) -> Span:
        told = dict(attributes)
        with contextlib.suppress(UsageError):  # of a whole cluster: each group has its own id
            told["messaging.client.id"] = self._producer.producer_id
        name = f"send {topic}"
        return self._tracer.start_span(
            name, kind=SpanKind.PRODUCER, attributes={**_about("send", str(topic)), **told}
        )

    def _begin_one(self, topic: str, body: Body, properties: Properties) -> tuple[Span, Any]:
        """Return the span of a message, and its properties with the context."""
        size = len(body) if isinstance(body, bytes | bytearray | memoryview) else 0
        span = self._begin(topic, **{"messaging.message.body.size": size})
        return span, _with_context(span, properties)

    def _begin_batch(
        self, topic: str, messages: Iterable[OutgoingMessage | Body]
    ) -> tuple[Span, Any]:
        """Return the span of a batch, and its messages with the context."""
        if not isinstance(messages, Iterable) or isinstance(messages, str | bytes):
            return self._begin(topic), messages  # the producer refuses them
        given = list(messages)
        span = self._begin(topic, **{"messaging.batch.message_count": len(given)})
        return span, [_message_with_context(span, one) for one in given]


class TracedProducer(_Traced):
    """A hastore.Producer whose sends have spans; all else is as with the producer itself.

    A span lasts until the message is confirmed, or has failed.
    """

    def __init__(self, producer: Producer, tracer_provider: TracerProvider | None = None) -> None:
        """Trace what `producer` sends; `tracer_provider` None: the application's own."""
        super().__init__(producer, tracer_provider)

    def __enter__(self) -> TracedProducer:
        """Return itself; the end of the block closes the producer."""
        self._producer.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Close the producer as its own block does."""
        self._producer.__exit__(*raised)

    def send(
        self, topic: str, body: Body, *, properties: Properties = NO_PROPERTIES, **more: Any
    ) -> Future[SendResult]:
        """Send a message as Producer.send does."""
        span, given = self._begin_one(topic, body, properties)
        with _ending(span, only_failures=True):
            future: Future[SendResult] = self._producer.send(topic, body, properties=given, **more)
        watch(future, partial(_end_with, span))
        return future

    def send_sync(
        self, topic: str, body: Body, *, properties: Properties = NO_PROPERTIES, **more: Any
    ) -> SendResult:
        """Send a message as Producer.send_sync does."""
        span, given = self._begin_one(topic, body, properties)
        with _ending(span):
            result: SendResult = self._producer.send_sync(topic, body, properties=given, **more)
            _note(span, result)
            return result

    def send_batch(
        self, topic: str, messages: Iterable[OutgoingMessage | Body], **more: Any
    ) -> Future[list[SendResult]]:
        """Send messages as Producer.send_batch does, with one span for all."""
        span, given = self._begin_batch(topic, messages)
        with _ending(span, only_failures=True):
            future: Future[list[SendResult]] = self._producer.send_batch(topic, given, **more)
        watch(future, partial(_end_with, span))
        return future

    def transaction(
        self, topic: str, body: Body, *, properties: Properties = NO_PROPERTIES, **more: Any
    ) -> Transaction:
        """Begin a transaction as Producer.transaction does; the span is that of its message."""
        span, given = self._begin_one(topic, body, properties)
        with _ending(span):
            begun: Transaction = self._producer.transaction(topic, body, properties=given, **more)
            return begun


class AsyncTracedProducer(_Traced):
    """A hastore.aio.Producer whose sends have spans; see TracedProducer."""

    def __init__(
        self, producer: hastore.aio.Producer, tracer_provider: TracerProvider | None = None
    ) -> None:
        """Trace what `producer` sends; `tracer_provider` None: the application's own."""
        super().__init__(producer, tracer_provider)

    async def __aenter__(self) -> AsyncTracedProducer:
        """Return itself; the end of the block closes the producer."""
        await self._producer.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        """Close the producer as its own block does."""
        await self._producer.__aexit__(*raised)

    async def send(
        self, topic: str, body: Body, *, properties: Properties = NO_PROPERTIES, **more: Any
    ) -> SendResult:
        """Send a message as hastore.aio.Producer.send does."""
        span, given = self._begin_one(topic, body, properties)
        with _ending(span):
            result: SendResult = await self._producer.send(topic, body, properties=given, **more)
            _note(span, result)
            return result

    async def send_batch(
        self, topic: str, messages: Iterable[OutgoingMessage | Body], **more: Any
    ) -> list[SendResult]:
        """Send messages as hastore.aio.Producer.send_batch does, with one span."""
        span, given = self._begin_batch(topic, messages)
        with _ending(span):
            results: list[SendResult] = await self._producer.send_batch(topic, given, **more)
            return results

    def transaction(
        self, topic: str, body: Body, *, properties: Properties = NO_PROPERTIES, **more: Any
    ) -> Beginning:
        """Begin a transaction as hastore.aio.Producer.transaction does.

        Its message carries the context of the current span; it has no span of its own.
        """
        given = _with_context(trace.get_current_span(), properties)
        begun: Beginning = self._producer.transaction(topic, body, properties=given, **more)
        return begun


def _tracer(tracer_provider: TracerProvider | None) -> Tracer:
    return trace.get_tracer("hastore", hastore.__version__, tracer_provider)


def _about(operation: str, topic: str) -> dict[str, str | int]:
    return {
        **_SYSTEM,
        "messaging.destination.name": topic,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }


def _with_context(span: Span, properties: Properties) -> Any:
    """Return properties with the context of a span; one that the caller has put there stays."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    if properties is None:
        properties = NO_PROPERTIES
    if not isinstance(properties, Iterable) or isinstance(properties, str | bytes):
        return properties  # the producer refuses them
    pairs = list(properties.items() if isinstance(properties, Mapping) else properties)
    names = [pair[0] for pair in pairs if isinstance(pair, tuple | list) and pair]
    if any(isinstance(name, str) and name in carrier for name in names):
        return pairs
    return [*pairs, *carrier.items()]


def _message_with_context(span: Span, message: Any) -> Any:
    if isinstance(message, OutgoingMessage):
        return replace(message, properties=tuple(_with_context(span, message.properties)))
    if isinstance(message, bytes | bytearray | memoryview):
        return OutgoingMessage(bytes(message), properties=tuple(_with_context(span, ())))
    return message  # the producer refuses it


def _note(span: Span, result: SendResult) -> None:
    span.set_attribute("messaging.destination.partition.id", str(result.queue_id))
    if result.queue_offset is not None:  # with acks=0 no node answers
        span.set_attribute("hastore.queue_offset", result.queue_offset)
    if result.msg_id is not None:
        span.set_attribute("messaging.message.id", result.msg_id)


def _name_of(failure: BaseException) -> str:
    return type(failure).__qualname__


def _fail(span: Span, failure: BaseException) -> None:
    span.record_exception(failure)
    span.set_attribute("error.type", _name_of(failure))
    span.set_status(Status(StatusCode.ERROR, str(failure)))


@contextlib.contextmanager
def _ending(span: Span, *, only_failures: bool = False) -> Iterator[None]:
    """Make a span current, and end it after the block; `only_failures`: if the block raises."""
    try:
        with trace.use_span(
            span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        ):
            yield
    except BaseException as failure:
        _fail(span, failure)
        span.end()
        raise
    if not only_failures:
        span.end()


def _end_with(span: Span, failure: BaseException | None, result: Any) -> None:
    """End the span of a message, or of a batch, whose Future has ended."""
    if isinstance(result, SendResult):
        _note(span, result)
    elif failure is not None and not isinstance(failure, CancelledError):
        _fail(span, failure)
    span.end()
