"""From what a caller hands to a producer to what its core sends; for threads and for asyncio."""

from __future__ import annotations

import secrets
import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hastore.client.connections.names import Targets, look_up, numeric_targets
from hastore.client.encoding import RecordEncoder
from hastore.client.outbox import SendOptions
from hastore.client.send_core import MAX_FRAME_RECORDS
from hastore.errors import MessageIllegalError, UsageError
from hastore.protocol.api import MAX_MESSAGE_BYTES, PRODUCER_ID, SEQUENCE, WINDOW
from hastore.store.host import NO_HOST, Host
from hastore.store.properties import check_topic

Properties = Mapping[str, str] | Sequence[tuple[str, str]]
Acks = Literal[0, 1, "all"] | None
_ACKS = {None: None, 0: 0, 1: 1, "all": -1}
_RESERVED = (PRODUCER_ID, SEQUENCE)
_TOPICS_KEPT = 1_024
BATCH_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message for `send_batch`."""

    body: bytes
    key: str | None = None
    tags: str | None = None
    properties: Properties = ()
    queue: int | None = None


class Draft(NamedTuple):
    """A checked message that lacks its queue, when nobody named one, and its number."""

    body: bytes
    key: str | None
    pairs: list[tuple[str, str]]
    queue: int | None


def make_options(
    acks: Acks,
    sync_flush: bool,
    linger_ms: float,
    batch_bytes: int,
    max_in_flight: int,
    delivery_timeout_s: float,
    idempotent: bool,
) -> SendOptions:
    """Return the options of a producer; UsageError for what makes no sense."""
    if acks not in _ACKS or isinstance(acks, bool):
        raise UsageError(f'acks={acks!r}: 0, 1, "all" or None')
    if not 1 <= max_in_flight <= WINDOW:
        raise UsageError(f"max_in_flight={max_in_flight}: from 1 to {WINDOW}")
    if not 1 <= batch_bytes <= MAX_MESSAGE_BYTES:
        raise UsageError(f"batch_bytes={batch_bytes}: from 1 to {MAX_MESSAGE_BYTES}")
    if linger_ms < 0 or delivery_timeout_s <= 0:
        raise UsageError("linger_ms is not negative, delivery_timeout_s is positive")
    timeout_ms = delivery_timeout_s * 1000.0
    return SendOptions(
        _ACKS[acks], sync_flush, linger_ms, batch_bytes, max_in_flight, timeout_ms, idempotent
    )


class Preparer:
    """Check and encode one producer's messages; may be shared between threads."""

    def __init__(self, address: str, options: SendOptions) -> None:
        """`address`: of a node; this machine's address as it sees it is each message's bornHost.

        Where the node is given by a name that is looked up first, and messages that are sent before
        it is known have zeros.
        """
        self.producer_id = secrets.token_hex(8)
        encoder = RecordEncoder(self.producer_id if options.idempotent else None, NO_HOST)
        host, _, port = address.partition("://")[2].rpartition(":")
        targets = numeric_targets(host.strip("[]"), int(port))
        if targets:
            encoder.learn_host(_own_host(targets))
        else:
            look_up(host, int(port), lambda found: encoder.learn_host(_own_host(found)))
        self._encoder = encoder
        self._batch_bytes = options.batch_bytes
        self._part_records = min(MAX_FRAME_RECORDS, options.max_in_flight)
        self._topics: set[str] = set()
        self._next_queue: dict[str, int] = {}
        self.encode = self._encoder.encode

    def check(self, topic: str, body: bytes) -> bytes:
        """Return the body; MessageIllegalError for what no master would take."""
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

    def choose_queue(self, topic: str, key: str | None, queues: int) -> int:
        """Return the queue of the key; without a key the queues take turns."""
        if key is not None:
            return zlib.crc32(key.encode("utf-8", "surrogateescape")) % queues
        turn = self._next_queue.get(topic, 0)
        self._next_queue[topic] = turn + 1
        return turn % queues

    def batches(
        self, topic: str, messages: Iterable[OutgoingMessage | bytes], queue: int | None
    ) -> list[list[Draft]]:
        """Return the messages in their order, in pieces that go as one frame each.

        `queue` is for those that name none.
        """
        pieces: list[list[Draft]] = []
        size = 0
        for message in messages:
            each = message if isinstance(message, OutgoingMessage) else OutgoingMessage(message)
            body = self.check(topic, each.body)
            size += len(body)
            if not pieces or len(pieces[-1]) >= self._part_records or size > self._batch_bytes:
                pieces.append([])
                size = len(body)
            named = queue if each.queue is None else each.queue
            pairs = pairs_of(each.key, each.tags, each.properties)
            pieces[-1].append(Draft(body, each.key, pairs, named))
        return pieces


def pairs_of(key: str | None, tags: str | None, properties: Properties) -> list[tuple[str, str]]:
    """Return a message's properties; UsageError for names that are hastore's own."""
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


def _own_host(targets: Targets) -> Host:
    """Return this machine's address as a node sees it; zeros when that is not known."""
    for family, target in targets:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # no packet is sent
                probe.connect((target[0], target[1] or 1, *target[2:]))
                own = probe.getsockname()[0]
            return Host(socket.inet_pton(family, own.partition("%")[0]), 0)
        except OSError:
            continue
    return NO_HOST
