"""Finds the queues that a topic gets while a consumer reads all of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from hastore.client.connections.requester import Requester
from hastore.client.connections.transport import Arrival
from hastore.client.messages import Position
from hastore.clock import Clock
from hastore.protocol import api

LOOK_MS = 5_000.0  # between two looks

Ranges = Mapping[int, tuple[int, int]]  # by queue its first and its next queue offset


class NewQueues:
    """Ask the master now and then which queues the topic has; `found` is told."""

    def __init__(
        self,
        requester: Requester,
        clock: Clock,
        topic: str,
        group: str | None,
        known: Callable[[], Collection[int]],
        found: Callable[[Ranges, Mapping[int, Position]], None],
    ) -> None:
        """Prepare; `known` returns the queues that are read, `found` gets the others, too.

        It also gets what the group has committed: it may have read a queue before.
        """
        self._requester = requester
        self._clock = clock
        self._topic = topic
        self._group = group
        self._known = known
        self._found = found
        self._ranges: Ranges = {}  # while the group's positions are asked for
        self._rid: int | None = None
        self._asked = ""
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
            self._asked = master

    def on_arrival(self, arrival: Arrival) -> None:
        """Take an arrival, if it is the answer."""
        reply = arrival.reply
        if reply is not None and reply.rid == self._rid:
            self._rid = None
            if isinstance(reply, api.Topics):
                self._ranges = reply.topics.get(self._topic, {})
                if self._group is None:
                    self._found(self._ranges, {})
                elif self._ranges.keys() - set(self._known()):
                    rid = self._requester.next_rid()
                    ask = api.Fetch(rid, self._group, self._topic)
                    self._rid = rid if self._requester.transport.send(self._asked, ask) else None
            elif isinstance(reply, api.Positions):  # else it is asked again at the next look
                self._found(self._ranges, reply.positions)
