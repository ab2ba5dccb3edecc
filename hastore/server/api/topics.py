"""Changes of topics that clients ask for: checked, then put as records of the log.

Both protocols use this. A change is an ordinary put of the node itself, and is confirmed as one. A
node that is not the master refuses it as it refuses a put. The API's lock is held in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from hastore.clock import Clock
from hastore.errors import Status
from hastore.protocol.api import DropTopic, Put, PutDone, SetTopic
from hastore.record.topic_records import (
    TopicChange,
    TopicConfig,
    build_change,
    check_config,
    check_name,
)
from hastore.server.api.backend import ApiBackend
from hastore.server.api.puts import PutHandler
from hastore.store.append.results import own_records

Respond = Callable[[PutDone], None]


def described(
    request: SetTopic | DropTopic, find: Callable[[str], TopicConfig | None]
) -> tuple[str, str]:
    """Return a change's action for the audit log, and what it is about."""
    if isinstance(request, DropTopic):
        return "topic delete", request.topic
    topic = request.topic
    action = "topic create" if find(topic.name) is None else "topic set"
    queues = f"{topic.read_queues} queues to read, {topic.write_queues} to write"
    return action, f"{topic.name}: {queues}, perm {topic.perm}"


class TopicChanges:
    """Take changes of topics."""

    def __init__(self, backend: ApiBackend, puts: PutHandler, clock: Clock) -> None:
        self._backend = backend
        self._puts = puts
        self._clock = clock

    def take(self, request: SetTopic | DropTopic, respond: Respond) -> None:
        """Take a client's request. Raises MessageIllegalError, as `set` and `delete`."""
        put = Put(request.rid, None, timeout_ms=request.timeout_ms)
        if isinstance(request, DropTopic):
            self.delete(request.topic, put, respond)
            return
        asked = request.topic
        config = TopicConfig(
            asked.name, asked.read_queues, asked.write_queues, asked.perm, asked.order,
            asked.sys_flag, asked.attributes,
        )  # fmt: skip
        self.set(config, put, respond)

    def set(self, config: TopicConfig, put: Put, respond: Respond) -> None:
        """Create a topic, or change it. Raises MessageIllegalError for what no topic can be.

        `respond` gets the outcome, as that of a put.
        """
        check_config(config)
        table = self._backend.store.topic_table
        reason = table.no_room_for(config.name)
        if reason is not None:
            respond(PutDone(put.rid, Status.BUSY, 0, reason=reason))
            return
        if table.recorded(config.name) == config and self._is_settled(config.name):
            respond(PutDone(put.rid, Status.PUT_OK, self._backend.epoch()))
            return
        self._append([TopicChange(config)], put, respond)

    def delete(self, name: str, put: Put, respond: Respond) -> None:
        """Delete a topic; one that does not exist is no error. Raises MessageIllegalError.

        The settings of a group stay, though they are kept with the topic of its retries.
        """
        check_name(name)
        table = self._backend.store.topic_table
        config = table.recorded(name)
        kept = None if config is None else config.kept
        if kept is not None:
            changes = TopicChange(deleted=name), TopicChange(kept)
            self._append(changes, put, lambda done: respond(_as_one(done)))
            return
        if self._backend.store.find_topic(name) is None and self._is_settled(name):
            respond(PutDone(put.rid, Status.PUT_OK, self._backend.epoch()))
            return
        reason = table.no_room_to_delete(name)
        if reason is not None:
            respond(PutDone(put.rid, Status.BUSY, 0, reason=reason))
            return
        self._append([TopicChange(deleted=name)], put, respond)

    def _is_settled(self, name: str) -> bool:
        """Whether what this node knows of a topic is true for the group, and stays so."""
        backend = self._backend
        offset = backend.store.topic_table.offset_of(name)
        return backend.writable_reason() is None and offset < backend.store.readable_offset

    def _append(self, changes: Sequence[TopicChange], put: Put, respond: Respond) -> None:
        now_ms = self._clock.wall_ms()
        records = b"".join([build_change(change, now_ms) for change in changes])
        self._puts.admit_own_record(put, records, respond, own_records)


def _as_one(done: PutDone) -> PutDone:
    """Return the outcome of records that are one change: that of the first that is not stored."""
    statuses = done.statuses
    if statuses is not None:
        statuses = [next((one for one in statuses if not one.is_stored), statuses[0])]
    return msgspec.structs.replace(
        done, statuses=statuses, offsets=done.offsets[:1], queue_ids=done.queue_ids[:1],
        queue_offsets=done.queue_offsets[:1],
    )  # fmt: skip
