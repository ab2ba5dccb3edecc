"""Send messages to whichever node is the master.

    with Producer(["tcp://127.0.0.1:10911", "tcp://127.0.0.1:10921"]) as producer:
        future = producer.send("flights", b"...", key="UA1545")
        print(future.result().offset)
"""

from __future__ import annotations

import secrets
import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from hastore.client.addresses import parse_bootstrap
from hastore.client.encoding import RecordEncoder
from hastore.client.futures import SendFuture
from hastore.client.outbox import Entry, SendOptions, Window
from hastore.client.results import SendResult
from hastore.client.sender import MAX_FRAME_RECORDS, Sender
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import MessageIllegalError, UnreachableError, UsageError
from hastore.protocol.api import MAX_MESSAGE_BYTES, PRODUCER_ID, SEQUENCE, WINDOW
from hastore.store.host import NO_HOST, Host
from hastore.store.properties import check_topic

Properties = Mapping[str, str] | Sequence[tuple[str, str]]
Acks = Literal[0, 1, "all"] | None
_ACKS = {None: None, 0: 0, 1: 1, "all": -1}
_RESERVED = (PRODUCER_ID, SEQUENCE)
_TOPICS_KEPT = 1_024


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message for `send_batch`."""

    body: bytes
    key: str | None = None
    tags: str | None = None
    properties: Properties = ()
    queue: int | None = None


class Producer:
    """Send messages; safe to share between threads.

    Each message carries the producer's random id and a sequence number, so a message that is sent
    again, also to another master, is stored once (`idempotent`). At most `max_in_flight` (1 to
    1 024) are unsettled; `send` waits beyond. What is not settled within `delivery_timeout_s` ends
    with the last status heard, or as OutcomeUnknown.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] | None = None,
        *,
        acks: Acks = None,
        sync_flush: bool = False,
        linger_ms: float = 0.0,
        batch_bytes: int = 256 * 1024,
        max_in_flight: int = WINDOW,
        delivery_timeout_s: float = 30.0,
        idempotent: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start the sending thread; connects by itself, raises UsageError only.

        `acks`: 0 nobody answers, 1 the master, "all" the group's `acks` slaves, None the master's
        own default (all under a SYNC_MASTER). `sync_flush`: confirmed by disks. `linger_ms`: how
        long a message may wait for company while a frame is not full (`batch_bytes`, 256 messages).
        """
        if acks not in _ACKS or isinstance(acks, bool):
            raise UsageError(f'acks={acks!r}: 0, 1, "all" or None')
        if not 1 <= max_in_flight <= WINDOW:
            raise UsageError(f"max_in_flight={max_in_flight}: from 1 to {WINDOW}")
        if not 1 <= batch_bytes <= MAX_MESSAGE_BYTES:
            raise UsageError(f"batch_bytes={batch_bytes}: from 1 to {MAX_MESSAGE_BYTES}")
        if linger_ms < 0 or delivery_timeout_s <= 0:
            raise UsageError("linger_ms is not negative, delivery_timeout_s is positive")
        addresses = parse_bootstrap(bootstrap)
        self.producer_id = secrets.token_hex(8)
        self._clock = clock
        self._batch_bytes = batch_bytes
        self._timeout_ms = delivery_timeout_s * 1000.0
        self._window = Window(max_in_flight)
        options = SendOptions(
            _ACKS[acks], sync_flush, linger_ms, batch_bytes, self._timeout_ms, idempotent
        )
        self._sender = Sender(addresses, options, self._window, clock)
        self._encoder = RecordEncoder(
            self.producer_id if idempotent else None, _own_host(addresses[0])
        )
        self._topics: set[str] = set()
        self._next_queue: dict[str, int] = {}
        self._sender.start()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        """The greatest epoch met in a writable node; 0 before the first."""
        return self._sender.cluster.epoch

    @property
    def master(self) -> str | None:
        """The address of the master, None while it is being looked for."""
        return self._sender.cluster.master

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        key: str | None = None,
        tags: str | None = None,
        properties: Properties = (),
        queue: int | None = None,
    ) -> Future[SendResult]:
        """Send a message; the Future ends with its SendResult or an exception of hastore.errors.

        The same key always goes to the same queue; without key and `queue` the queues take turns.
        Raises MessageIllegalError at once for what no master would take, UnreachableError when no
        master was found within the delivery timeout (the number of queues is not known then).
        """
        future = self._send(topic, body, key, tags, properties, queue)
        self._sender.attend()
        return future

    def send_sync(
        self,
        topic: str,
        body: bytes,
        *,
        key: str | None = None,
        tags: str | None = None,
        properties: Properties = (),
        queue: int | None = None,
    ) -> SendResult:
        """Send a message and wait for its result; raises what the Future would."""
        future = self._send(topic, body, key, tags, properties, queue)
        self._sender.carry(future)
        return future.result()

    def send_batch(
        self,
        topic: str,
        messages: Iterable[OutgoingMessage | bytes],
        *,
        queue: int | None = None,
    ) -> Future[list[SendResult]]:
        """Send messages in their order, as few frames as they need; the Future has all results.

        `queue` is for the messages that name none. A batch is not atomic: when the Future ends with
        an exception, others of its messages may be stored.
        """
        outgoing = [m if isinstance(m, OutgoingMessage) else OutgoingMessage(m) for m in messages]
        checked = [(self._checked(topic, each.body), each) for each in outgoing]
        parts: list[Future[list[SendResult]]] = []
        limit = min(MAX_FRAME_RECORDS, self._window.limit)
        at = 0
        while at < len(checked):
            count = self._fitting(checked[at:at + limit])
            parts.append(self._send_part(topic, checked[at:at + count], queue))
            self._sender.attend()
            at += count
        return _joined(parts)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was sent so far is settled; False when the time is up first."""
        self._sender.flushing = True
        self._sender.attend()
        try:
            return self._window.wait_settled(self._window.next_seq, timeout_s)
        finally:
            self._sender.flushing = False

    def close(self, timeout_s: float | None = None) -> None:
        """Settle what is under way, within the delivery timeout or `timeout_s`, and end."""
        limit_s = self._timeout_ms / 1000.0 + 1.0 if timeout_s is None else timeout_s
        if not self._window.closed:
            self.flush(limit_s)
        self._sender.stop()

    # -- behind the scenes

    def _send(
        self,
        topic: str,
        body: bytes,
        key: str | None,
        tags: str | None,
        properties: Properties,
        queue: int | None,
    ) -> SendFuture[SendResult]:
        """Submit a message; the sender is still to be told."""
        body = self._checked(topic, body)
        queue_id = self._choose_queue(topic, key) if queue is None else queue
        pairs = _pairs(key, tags, properties)
        future: SendFuture[SendResult] = SendFuture()
        with self._window.lock:
            seq = self._window.wait_room(1)
            born_ms = self._clock.wall_ms()
            payload = self._encoder.encode(topic, body, queue_id, pairs, seq, born_ms)
            self._submit(topic, seq, 1, payload, future, is_batch=False)
        return future

    def _checked(self, topic: str, body: bytes) -> bytes:
        if topic not in self._topics:
            check_topic(topic)
            if len(self._topics) < _TOPICS_KEPT:
                self._topics.add(topic)
        if type(body) is not bytes:
            if not isinstance(body, (bytes, bytearray, memoryview)):
                raise UsageError(f"a body is bytes, not {type(body).__name__}")
            body = bytes(body)
        if len(body) > MAX_MESSAGE_BYTES:
            raise MessageIllegalError(
                f"a body of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} fit in a message"
            )
        return body

    def _choose_queue(self, topic: str, key: str | None) -> int:
        sender = self._sender
        if not sender.found.is_set() and not sender.found.wait(self._timeout_ms / 1000.0):
            raise UnreachableError(f"no master was found: {sender.cluster.reason()}")
        queues = sender.cluster.default_queues
        if key is not None:
            return zlib.crc32(key.encode("utf-8", "surrogateescape")) % queues
        turn = self._next_queue.get(topic, 0)
        self._next_queue[topic] = turn + 1
        return turn % queues

    def _submit(
        self,
        topic: str,
        seq: int,
        count: int,
        payload: bytes,
        future: SendFuture[SendResult] | SendFuture[list[SendResult]],
        *,
        is_batch: bool,
    ) -> None:
        """Hand over, the window's lock still held: the numbers' order is that of sending."""
        now = self._clock.monotonic_ms()
        entry = Entry(seq, count, topic, payload, future, is_batch, now, now + self._timeout_ms)
        self._window.admit(entry)
        self._sender.submit(entry)

    def _fitting(self, checked: list[tuple[bytes, OutgoingMessage]]) -> int:
        """Return how many of the messages go into one frame; at least one."""
        size = 0
        for count, (body, _) in enumerate(checked):
            size += len(body)
            if size > self._batch_bytes and count:
                return count
        return len(checked)

    def _send_part(
        self, topic: str, checked: list[tuple[bytes, OutgoingMessage]], queue: int | None
    ) -> Future[list[SendResult]]:
        prepared = []
        for body, each in checked:
            named = queue if each.queue is None else each.queue
            queue_id = self._choose_queue(topic, each.key) if named is None else named
            prepared.append((body, queue_id, _pairs(each.key, each.tags, each.properties)))
        future: SendFuture[list[SendResult]] = SendFuture()
        with self._window.lock:
            seq = self._window.wait_room(len(prepared))
            encode, born_ms = self._encoder.encode, self._clock.wall_ms()
            records = [
                encode(topic, body, queue_id, pairs, seq + place, born_ms)
                for place, (body, queue_id, pairs) in enumerate(prepared)
            ]
            payload = b"".join(records)
            self._submit(topic, seq, len(records), payload, future, is_batch=True)
        return future


def _pairs(key: str | None, tags: str | None, properties: Properties) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    if key is not None:
        pairs.append(("KEYS", key))
    if tags is not None:
        pairs.append(("TAGS", tags))
    if properties:
        pairs += properties.items() if isinstance(properties, Mapping) else properties
        if any(name in _RESERVED for name, _ in pairs):
            raise UsageError(f"the properties {' and '.join(_RESERVED)} are hastore's own")
    return pairs


def _joined(parts: list[Future[list[SendResult]]]) -> Future[list[SendResult]]:
    """Return a Future of all parts' results in order, or of the first part's failure."""
    if len(parts) == 1:
        return parts[0]
    whole: SendFuture[list[SendResult]] = SendFuture()
    left = [len(parts)]  # changed by the sending thread alone

    def settled(_: Future[list[SendResult]]) -> None:
        left[0] -= 1
        if left[0]:
            return
        failures = [failure for part in parts if (failure := part.exception()) is not None]
        if failures:
            whole.set_exception(failures[0])
        else:
            whole.set_result([result for part in parts for result in part.result()])

    for part in parts:
        part.add_done_callback(settled)
    if not parts:
        whole.set_result([])
    return whole


def _own_host(address: str) -> Host:
    """Return this machine's address as the first node sees it; zeros when that is not known."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port) or 1, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = found[0]
        with socket.socket(family, kind) as probe:  # no packet is sent
            probe.connect(target)
            own = probe.getsockname()[0]
        return Host(socket.inet_pton(family, own.partition("%")[0]), 0)
    except OSError:
        return NO_HOST
