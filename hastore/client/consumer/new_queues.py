"""Finds the queues that a topic gets while a consumer reads all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hastore.client.connections.requester import Requester
from hastore.client.connections.transport import Arrival
from hastore.clock import Clock
from hastore.protocol import api

LOOK_MS = 5_000.0  # between two looks

Ranges = Mapping[int, tuple[int, int]]  # by queue its first and its next queue offset


class NewQueues:
    """Ask the master now and then which queues the topic has; `found` is told."""

    def __init__(
        self, requester: Requester, clock: Clock, topic: str, found: Callable[[Ranges], None]
    ) -> None:
        """Prepare."""
        self._requester = requester
        self._clock = clock
        self._topic = topic
        self._found = found
        self._rid: int | None = None
        self._next_ms = clock.monotonic_ms() + LOOK_MS

    def look(self) -> None:
        """Ask if it is time; does not wait."""
        now = self._clock.monotonic_ms()
        if now < self._next_ms:
            return
        self._next_ms = now + LOOK_MS
        master = self._requester.cluster.master
        if master is not None:
            rid = self._requester.next_rid()
            sent = self._requester.transport.send(master, api.AskTopics(rid, self._topic))
            self._rid = rid if sent else None

    def on_arrival(self, arrival: Arrival) -> None:
        """Take an arrival, if it is the answer."""
        reply = arrival.reply
        if reply is not None and reply.rid == self._rid:
            self._rid = None
            if isinstance(reply, api.Topics):
                self._found(reply.topics.get(self._topic, {}))
