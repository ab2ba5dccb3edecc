"""Which messages of an archive a log lacks: they are known again by what their producers gave them.

A producer of hastore numbers its messages, and repeats number and name (HS_PID, HS_SEQ) when it
sends one again; a RocketMQ client repeats its id (UNIQ_KEY). A message that was sent again from an
archive has that in RESCUED_FROM. So a message that the log has is found, however it came there. A
name counts in its topic only: a consumer may pass a message on with its properties, and a retry has
the id of its message.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.preparer import plain_properties
from hastore.client.security import SecurityLike
from hastore.errors import ClientError, HastoreError
from hastore.protocol.api import PRODUCER_ID, SEQUENCE
from hastore.record.compression import decompress
from hastore.record.layout import FLAG_INNER_BATCH
from hastore.record.topic_records import OWN_PREFIX, RESERVED
from hastore.store.offline import inspect
from hastore.store.offline.log_files import LogFiles

RESCUED_FROM = "RESCUED_FROM"
_UNIQUE = "UNIQ_KEY"
EARLIER_MS = 3_600_000  # the search in a topic begins so long before the first message was stored
_POLL_S = 1.0
TopicName = tuple[str, str]  # a topic, and the name of a message there


class Rescued(NamedTuple):
    """A message of an archive: what to send, and by which names it is known again."""

    offset: int
    topic: str
    queue_id: int
    store_ms: int
    body: bytes
    properties: Mapping[str, str]
    problem: str | None  # why it cannot be sent again

    @property
    def names(self) -> set[str]:
        """The names by which a copy of it in the log is known."""
        return names_of(self.properties) | {self.own_name}

    @property
    def own_name(self) -> str:
        """The name that a copy which is sent now gets."""
        given = self.properties.get(RESCUED_FROM)
        if given:
            return given
        found = sorted(names_of(self.properties))
        return found[0] if found else f"at {self.topic} {self.store_ms} {self.offset}"

    @property
    def places(self) -> set[TopicName]:
        """The names, in the topic of the message."""
        return {(self.topic, name) for name in self.names}

    @property
    def options(self) -> dict[str, Any]:
        """What `Producer.send` takes beside topic and body."""
        plain = {**plain_properties(self.properties), RESCUED_FROM: self.own_name}
        return {
            "key": self.properties.get("KEYS"), "tags": self.properties.get("TAGS"),
            "properties": plain,
        }  # fmt: skip


def names_of(properties: Mapping[str, str]) -> set[str]:
    """Return the names by which a message is known again."""
    found = set()
    producer, sequence = properties.get(PRODUCER_ID), properties.get(SEQUENCE)
    if producer and sequence:
        found.add(f"{producer}/{sequence}")
    if properties.get(_UNIQUE):
        found.add(f"id {properties[_UNIQUE]}")
    if properties.get(RESCUED_FROM):
        found.add(properties[RESCUED_FROM])
    return found


def read_archive(
    folder: str,
    start: int | None,
    end: int | None,
    on_gap: Callable[[int, int], None] = lambda _start, _end: None,
) -> Iterator[Rescued]:
    """Yield the messages of an archive in the order of its log; raises StoreError.

    hastore's own records are left out. Behind bytes that are no whole records it goes on; `on_gap`
    is told of them.
    """
    stop = _known_begin(folder, start)
    begin: int | None = start
    while True:
        moved = False
        for item in inspect.dump(folder, begin, end, bodies=True):
            place = inspect.place_of(item)
            if stop is not None and place > stop:
                on_gap(stop, place)
            stop, moved = place + int(item["size"]), True
            yield from _messages_of(item)
        if stop is None or (end is not None and stop >= end):
            return
        if not moved and begin != start:  # nothing follows
            if end is not None:
                on_gap(stop, end)
            return
        begin = stop + 1


def _known_begin(folder: str, start: int | None) -> int | None:
    """Return where a record must begin, so that other bytes there are damage; None: nowhere.

    What was cut from `start` on begins with a record. But a log that was set aside as a whole may
    have been confirmed up to the middle of one, and a tail of mode dledger begins with its leader's
    empty entry. Without `start` all of the archive is read.
    """
    with contextlib.closing(LogFiles(folder, bare_too=True)) as files:
        if start is None:
            return files.stated_begin()
        return start if files.is_bare and not files.form.lead else None


def _messages_of(item: Mapping[str, Any]) -> Iterator[Rescued]:
    """Yield the message that an item of the log holds, unless it is hastore's own."""
    fields = item.get("record", item)
    if "topic" not in fields or fields["topic"].startswith(OWN_PREFIX):
        return
    body, problem = _body_of(fields)
    if fields["topic"] in RESERVED:
        problem = "it waits for its delay, or for the end of its transaction"
    elif fields["sys_flag"] & FLAG_INNER_BATCH:  # its body is not that of one message
        problem = "its record is a batch of RocketMQ's, which clients may not send"
    yield Rescued(
        fields["offset"], fields["topic"], fields["queue_id"], fields["store_ms"], body,
        dict(fields["properties"]), problem,
    )  # fmt: skip


def _body_of(fields: Mapping[str, Any]) -> tuple[bytes, str | None]:
    """Return a record's body, decompressed; or the one that is stored, and what is wrong."""
    if "body" in fields:
        stored = str(fields["body"]).encode()
    else:
        stored = base64.b64decode(fields["body_base64"])
    try:
        return decompress(stored, fields["sys_flag"], f"offset {fields['offset']}"), None
    except HastoreError as failure:
        return stored, str(failure)


def names_in_log(
    messages: Iterable[Rescued],
    addresses: Sequence[str],
    security: SecurityLike,
    ranges: Mapping[str, Mapping[int, tuple[int, int]]],
    patience_s: float,
) -> set[TopicName]:
    """Return those names of the messages that the log has, each with its topic.

    `ranges` are the topics' queues as the master states them. A topic is read from an hour before
    the first of its messages was stored, up to its end. Raises ClientError if that end does not
    come within `patience_s` without progress.
    """
    wanted: dict[str, set[str]] = {}
    first_ms: dict[str, int] = {}
    for one in messages:
        wanted.setdefault(one.topic, set()).update(one.names)
        first_ms[one.topic] = min(first_ms.get(one.topic, one.store_ms), one.store_ms)
    found: set[TopicName] = set()
    for topic, names in wanted.items():
        ends = {queue: end for queue, (_, end) in ranges.get(topic, {}).items()}
        if not ends:
            continue
        with Consumer(
            topic, addresses, read_from="master", on_lost="earliest", security=security
        ) as consumer:
            _seek(consumer, first_ms[topic] - EARLIER_MS)
            there = names & set(_names(consumer, ends, patience_s))
        found |= {(topic, name) for name in there}
    return found


def _seek(consumer: Consumer, ms: int) -> None:
    with contextlib.suppress(OverflowError, ValueError, OSError):  # no date: from the begin
        consumer.seek_to_time(datetime.datetime.fromtimestamp(max(0, ms) / 1000, datetime.UTC))


def _names(consumer: Consumer, ends: Mapping[int, int], patience_s: float) -> Iterator[str]:
    """Yield the names of all messages from the consumer's place up to `ends`."""
    moved_s = time.monotonic()
    places = consumer.positions()
    while any(place.queue_offset < ends.get(queue, 0) for queue, place in places.items()):
        for message in consumer.poll(timeout_s=min(_POLL_S, patience_s)):
            yield from names_of(message.properties)
        before, places = places, consumer.positions()
        now_s = time.monotonic()
        moved_s = now_s if places != before else moved_s
        if now_s - moved_s > patience_s:
            raise ClientError(
                f"no message came for {patience_s:g} s before the topic's end; nothing was sent: "
                "try again"
            )
