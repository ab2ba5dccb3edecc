"""Requests that only read: by key, by offset, by time, topics, the cluster map, the status."""

from __future__ import annotations

from hastore.protocol.api import (
    AskMap,
    AskProducer,
    AskStatus,
    AskTopics,
    Failed,
    FindKey,
    FindOffset,
    FindTime,
    Found,
    Map,
    NodeStatus,
    ProducerKnown,
    Reading,
    Reply,
    TimeFound,
    Topics,
)
from hastore.record.codec import encode_record
from hastore.server.api.backend import ApiBackend

Answer = tuple[Reply, bytes | None]
MAX_FOUND_BYTES = 8 * 1024 * 1024


def answer_query(backend: ApiBackend, request: Reading) -> Answer:
    """Return the reply to a request that only reads, and its payload."""
    if isinstance(request, AskMap):
        return Map(request.rid, backend.master_map()), None
    if isinstance(request, AskStatus):
        return NodeStatus(request.rid, backend.status()), None
    if isinstance(request, AskTopics):
        return _topics(backend, request), None
    if isinstance(request, AskProducer):
        return _producer(backend, request), None
    if isinstance(request, FindKey):
        return _by_key(backend, request)
    if isinstance(request, FindOffset):
        return _by_offset(backend, request)
    return _by_time(backend, request), None


def _topics(backend: ApiBackend, request: AskTopics) -> Reply:
    queues = backend.store.queues
    if request.topic is None:
        topics = queues.topics()
    else:
        one = queues.queues_of(request.topic)
        topics = {request.topic: one} if one else {}
    return Topics(request.rid, topics, backend.master_map().default_queues)


def _producer(backend: ApiBackend, request: AskProducer) -> Reply:
    """Return how far a producer came. Only a master whose window has the whole log answers."""
    reason = backend.writable_reason()
    if reason is not None:
        master = backend.master_map().master_api
        return Failed(request.rid, "SERVICE_NOT_AVAILABLE", reason, master)
    epoch = backend.epoch()
    progress = backend.store.producer_progress(request.producer.encode())
    if progress is None:
        return Failed(request.rid, "BUSY", "replay has not reached the log's end yet")
    return ProducerKnown(request.rid, epoch, progress.last, progress.forgotten)


def _by_key(backend: ApiBackend, request: FindKey) -> Answer:
    offsets = backend.store.reader.query_key(
        request.topic,
        request.key,
        max_messages=request.max_messages,
        begin_ms=request.begin_ms,
        end_ms=request.end_ms,
    )
    limit = backend.store.readable_offset
    records: list[bytes] = []
    size = 0
    for offset in offsets:
        record = backend.store.reader.record_at(offset)
        if record is None or offset + record.size > limit:
            continue
        if record.topic != request.topic or request.key not in record.keys:
            continue  # another key with the same hash
        size += record.size
        if records and size > MAX_FOUND_BYTES:
            break
        records.append(encode_record(record))
    return Found(request.rid, len(records)), b"".join(records)


def _by_offset(backend: ApiBackend, request: FindOffset) -> Answer:
    store = backend.store
    record = None
    if store.min_offset <= request.offset < store.readable_offset:
        record = store.reader.record_at(request.offset)
    if record is None or request.offset + record.size > store.readable_offset:
        return Found(request.rid, 0), b""
    return Found(request.rid, 1), encode_record(record)


def _by_time(backend: ApiBackend, request: FindTime) -> Reply:
    known = backend.store.queues.queue_range(request.topic, request.queue_id)
    if known is None:
        return Failed(request.rid, "NO_SUCH_QUEUE", f"that topic has no queue {request.queue_id}")
    found = backend.store.reader.queue_offset_by_time(
        request.topic, request.queue_id, request.timestamp_ms
    )
    return TimeFound(request.rid, found)
