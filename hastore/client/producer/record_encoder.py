"""Encodes a producer's messages as records.

The bytes are those that `build_record` makes. Parts that are the same in every message of a
producer are computed only once.
"""

from __future__ import annotations

import struct

from zlib_ng.zlib_ng import crc32

from hastore.protocol.api import PRODUCER_ID, SEQUENCE
from hastore.record.codec import build_record
from hastore.record.host import Host
from hastore.record.layout import (
    CRC_MASK,
    HEADER_SIZE,
    MAX_PROPERTIES_BYTES,
    V1_MAGIC,
    V1_MAX_TOPIC_BYTES,
    header_struct,
)
from hastore.record.properties import encode_properties

_TOPICS_KEPT = 1_024
_LENGTH = struct.Struct(">H")
# The header between IPv4 hosts. Seven values are packed instead of seventeen; the others are zero.
_FRONT = header_struct(
    *("unsigned_size", "magic", "body_crc", "queue_id", "born_timestamp_ms", "born_host"),
    "body_length",
)


class RecordEncoder:
    """Encode one producer's messages; thread-safe.

    With `producer_id` None, records have no HS_PID and HS_SEQ: a node cannot recognise a retry.
    """

    def __init__(self, producer_id: str | None, born_host: Host) -> None:
        self._producer_id = producer_id
        self._is_ipv6 = False
        self.learn_host(born_host)
        self._numbered = b""
        if producer_id is not None:
            self._numbered = f"{PRODUCER_ID}\x01{producer_id}\x02{SEQUENCE}\x01".encode()
        self._topics: dict[str, bytes] = {}
        # About the last message without properties: its topic, the length of its sequence number,
        # and the bytes between its body and that number. Other threads encode too, so this is one
        # tuple that is replaced in one step.
        self._last: tuple[str | None, int, bytes] = None, 0, b""

    def learn_host(self, born_host: Host) -> None:
        """Set the bornHost of later messages; any thread may call this."""
        self._is_ipv6 |= born_host.is_ipv6  # set first, so that `_FRONT` packs no IPv6 host
        self._born_host = born_host
        self._born = born_host.packed

    def encode(
        self,
        topic: str,
        body: bytes,
        queue_id: int,
        pairs: list[tuple[str, str]],
        sequence: int,
        born_timestamp_ms: int,
    ) -> bytes:
        """Return the record; raises MessageIllegalError if no record can hold the message."""
        number = b"%d\x02" % sequence if self._numbered else b""
        if not pairs:
            known, digits, tail = self._last
            if known == topic and digits == len(number):
                length = len(body)
                front = _FRONT.pack(
                    HEADER_SIZE + length + len(tail) + digits, V1_MAGIC, crc32(body) & CRC_MASK,
                    queue_id, born_timestamp_ms, self._born, length,
                )  # fmt: skip
                return b"".join((front, body, tail, number))
        name = self._topics.get(topic)
        if name is None:
            name = self._learn(topic)
        properties = b"".join((encode_properties(pairs), self._numbered, number))
        if not name or self._is_ipv6 or len(properties) > MAX_PROPERTIES_BYTES:
            if self._producer_id is not None:
                pairs = [*pairs, (PRODUCER_ID, self._producer_id), (SEQUENCE, str(sequence))]
            return build_record(
                topic, body, queue_id=queue_id, properties=pairs,
                born_timestamp_ms=born_timestamp_ms, born_host=self._born_host,
            )  # fmt: skip
        length = len(body)
        size = HEADER_SIZE + length + len(name) + _LENGTH.size + len(properties)
        crc = crc32(body) & CRC_MASK
        front = _FRONT.pack(size, V1_MAGIC, crc, queue_id, born_timestamp_ms, self._born, length)
        if not pairs:
            tail = b"".join((name, _LENGTH.pack(len(properties)), self._numbered))
            self._last = topic, len(number), tail
        return b"".join((front, body, name, _LENGTH.pack(len(properties)), properties))

    def _learn(self, topic: str) -> bytes:
        """Return the length byte and the topic; b"" if it is empty or too long for that byte."""
        raw = topic.encode("utf-8")
        name = bytes((len(raw),)) + raw if 0 < len(raw) <= V1_MAX_TOPIC_BYTES else b""
        if len(self._topics) < _TOPICS_KEPT:
            self._topics[topic] = name
        return name
