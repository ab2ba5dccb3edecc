"""A running node as a side of an audit: it computes the digests of its log itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from hastore.client.connections.addresses import parse_bootstrap
from hastore.client.connections.requester import Requester, failed
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    ClientError,
    NotAuthenticatedError,
    StoreError,
    UnreachableError,
    UsageError,
)
from hastore.pipeline.audit.sides import NODE, READ_BYTES, Extent, Missing, covering
from hastore.protocol import api

REACH_S = 30.0  # a node that cannot be reached for so long ends the audit
ANSWER_S = 300.0  # so does one that can be reached, but gives no answer: its disk may be slow
CONNECT_S = 10.0  # the same, at the beginning
BUSY_S = 0.05  # the pause after BUSY


def node_extent(address: str) -> Extent:
    """Ask a node for its log. Raises UnreachableError, UsageError for a wrong address."""
    (where,) = parse_bootstrap([address])
    if where.startswith("zk://"):
        raise UsageError(f"{address}: an audit compares two nodes; write tcp://HOST:PORT")
    link = _Link(where)
    try:
        reply, _ = link.ask(api.AskStatus, CONNECT_S, CONNECT_S)
        if not isinstance(reply, api.NodeStatus):
            raise ClientError(
                f"{where} answered {type(reply).__name__} to a question for its status"
            )
        extent = _extent(where, reply.status)
        # An older node closes the connection after a request that it does not know.
        place = extent.min_offset
        link.ask(lambda rid: api.AskDigest(rid, place, place), REACH_S, ANSWER_S, once=True)
        return extent
    finally:
        link.close()


def _extent(where: str, status: dict[str, Any]) -> Extent:
    readable, confirmed = status["readable_offset"], status["confirmed_offset"]
    history = tuple((entry["epoch"], entry["start_offset"]) for entry in status["history"])
    begin = status["min_offset"]
    # A RocketMQ master sends no confirmed offset: the log is then compared as far as it is whole.
    classic = not history or history[-1][0] == 0
    end, name = (readable, "readable") if classic else (min(confirmed, readable), "confirmed")
    end = max(begin, end)
    return Extent(
        where, NODE, begin, end, f"{name} offset", max(end, status["max_offset"]), None, history
    )


class _Link:
    """Requests to one node over one connection, several under way at a time."""

    def __init__(self, where: str, security: str | None = None) -> None:
        self.where = where
        self._requester = Requester((where,), SYSTEM_CLOCK, security)
        # The address as the transport names it.
        self._address = self._requester.cluster.addresses[0]
        self._asked: dict[int, api.Request] = {}
        self._answers: dict[int, tuple[api.Reply, bytes]] = {}

    def close(self) -> None:
        self._requester.close()

    def send(self, make: Callable[[int], api.Request]) -> int:
        """Send a request, or keep it until there is a connection; return its number."""
        rid = self._requester.next_rid()
        self._asked[rid] = make(rid)
        self._requester.transport.send(self._address, self._asked[rid])
        return rid

    def ask(
        self,
        make: Callable[[int], api.Request],
        reach_s: float,
        answer_s: float,
        *,
        once: bool = False,
    ) -> tuple[api.Reply, bytes]:
        """Send a request and wait for its answer."""
        return self.wait(self.send(make), reach_s, answer_s, once=once)

    def wait(
        self, rid: int, reach_s: float, answer_s: float, *, once: bool = False
    ) -> tuple[api.Reply, bytes]:
        """Wait for an answer; other answers count as signs of life.

        Raises UnreachableError if the node has no connection for `reach_s`, or gives no answer for
        `answer_s`; NotAuthenticatedError if it does not accept this client, or this client not the
        node; StoreError if it cannot read its log. With `once` the request is not sent again
        over a new connection.
        """
        requester = self._requester
        unreachable, silent = requester.deadline(reach_s), requester.deadline(answer_s)
        while rid not in self._answers:
            if requester.transport.is_up(self._address):
                unreachable = requester.deadline(reach_s)
            left = requester.left_s(min(unreachable, silent))
            if not requester.left_s(unreachable):
                raise UnreachableError(f"{self.where} is not reachable within {reach_s:g} s")
            if not requester.left_s(silent):
                raise UnreachableError(f"{self.where} did not answer within {answer_s:g} s")
            for arrival in requester.note(requester.transport.wait(left)):
                if arrival.reply is None:
                    if arrival.refused is not None:
                        raise NotAuthenticatedError(f"{self.where}: {arrival.refused}")
                    if once and not arrival.up:
                        raise UsageError(
                            f"{self.where} closed the connection when it was asked for a digest: "
                            "this node is too old for an audit; upgrade it, or give its store's "
                            "folder"
                        )
                    if arrival.up:
                        for request in self._asked.values():
                            requester.transport.send(self._address, request)
                elif self._take(arrival.reply, arrival.payload):
                    silent = requester.deadline(answer_s)
        return self._answers.pop(rid)

    def _take(self, reply: api.Reply, payload: bytes) -> bool:
        """Keep an answer; return whether it was one to a request under way."""
        request = self._asked.get(reply.rid)
        if request is None:
            return False
        if isinstance(reply, api.Failed):
            if reply.status == "BUSY":
                time.sleep(BUSY_S)
                self._requester.transport.send(self._address, request)
                return True
            if reply.status in ("StoreError", "CorruptRecordError"):
                raise StoreError(f"{self.where}: {reply.reason}")
            raise ClientError(f"{self.where}: {failed(reply)}")
        del self._asked[reply.rid]
        self._answers[reply.rid] = reply, payload
        return True


class NodeSide:
    """A node that computes digests of its own log."""

    limits_s = REACH_S, ANSWER_S

    def __init__(self, extent: Extent, algorithm: str, security: str | None = None) -> None:
        """Start to connect; `security` is the client's security file, None: HASTORE_SECURITY's."""
        self.where = extent.where
        self._extent = extent
        self._algorithm = algorithm
        self._link = _Link(extent.where, security)
        self._begun: deque[tuple[int, int, int]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def begin(self, start: int, end: int) -> None:
        """Ask for a digest, without waiting for it."""
        rid = self._link.send(lambda rid: api.AskDigest(rid, start, end, self._algorithm))
        self._begun.append((rid, start, end))

    def finish(self) -> bytes | Missing:
        """Wait for the digest of the oldest range that was begun."""
        rid, _, _ = self._begun.popleft()
        reply, _ = self._link.wait(rid, *self.limits_s)
        if not isinstance(reply, api.RangeDigest):
            raise ClientError(f"{self.where} answered {type(reply).__name__} to AskDigest")
        if reply.digest is None:
            return Missing(self.where, reply.min_offset, reply.readable_offset)
        return reply.digest

    def read(self, start: int, end: int) -> bytes | Missing:
        """Return the bytes of a range, in as many requests as it takes."""
        found = bytearray()
        while start + len(found) < end:
            reply, payload = self._bytes(
                start + len(found), min(end, start + len(found) + READ_BYTES)
            )
            if not reply.present:
                return Missing(self.where, reply.min_offset, reply.readable_offset)
            found += payload
        return bytes(found)

    def lost(self, start: int, end: int) -> Missing | None:
        """Return how a cut has changed a range: it is gone, or another epoch wrote it."""
        reply, _ = self._link.ask(lambda rid: api.AskDigest(rid, start, end), *self.limits_s)
        if not isinstance(reply, api.RangeDigest):
            raise ClientError(f"{self.where} answered {type(reply).__name__} to AskDigest")
        limits = reply.min_offset, reply.readable_offset
        if reply.digest is None:
            return Missing(self.where, *limits)
        before, now = covering(self._extent.epochs, start, end), [*map(tuple, reply.epochs)]
        if now == before:
            return None
        return Missing(
            self.where,
            *limits,
            f"{self.where} was cut during the audit and has written these bytes again: epoch "
            f"{before[-1][0]} before, {now[-1][0]} now",
        )

    def _bytes(self, start: int, end: int) -> tuple[api.RangeBytes, bytes]:
        reply, payload = self._link.ask(lambda rid: api.AskBytes(rid, start, end), *self.limits_s)
        if not isinstance(reply, api.RangeBytes):
            raise ClientError(f"{self.where} answered {type(reply).__name__} to AskBytes")
        if reply.present and len(payload) != end - start:
            raise ClientError(f"{self.where} sent {len(payload)} bytes of [{start}, {end})")
        return reply, payload
