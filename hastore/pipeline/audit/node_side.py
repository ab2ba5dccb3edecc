"""A running node as a side of an audit: it computes the digests of its log itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from hastore.client.connections.bootstrap import parse_bootstrap
from hastore.client.connections.requester import Answer, Requester, Steps, UnderWay, error_of
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    ClientError,
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
        reply, _ = link.answer(link.send(api.AskStatus), CONNECT_S, CONNECT_S)
        if not isinstance(reply, api.NodeStatus):
            raise ClientError(
                f"{where} answered {type(reply).__name__} to a question for its status"
            )
        extent = _extent(where, reply.status)
        # An older node closes the connection after a request that it does not know.
        place = extent.min_offset
        asked = link.send(lambda rid: api.AskDigest(rid, place, place))
        link.answer(asked, REACH_S, ANSWER_S, once=True)
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
    """Requests to one node by the client's engine, several under way at a time."""

    def __init__(self, where: str, security: str | None = None) -> None:
        self._where = where
        self._requester = Requester((where,), SYSTEM_CLOCK, security)
        # The address as the transport names it.
        address = self._requester.cluster.addresses[0]
        self._under_way = UnderWay(self._requester.transport, address)

    def close(self) -> None:
        self._requester.close()

    def send(self, make: Callable[[int], api.Request]) -> api.Request:
        """Send a request, or keep it until there is a connection; `answer` waits for its answer."""
        request = make(self._requester.next_rid())
        self._under_way.send(request)
        return request

    def answer(
        self, request: api.Request, reach_s: float, answer_s: float, *, once: bool = False
    ) -> Answer:
        """Wait for the answer to a request that was sent.

        Raises what `_arrival_of` does, and StoreError if the node cannot read its log.
        """
        while True:
            steps = self._arrival_of(request, reach_s, answer_s, once=once)
            reply, payload = self._requester.run_steps(steps)
            if not isinstance(reply, api.Failed):
                return reply, payload
            if reply.status in ("StoreError", "CorruptRecordError"):
                raise StoreError(f"{self._where}: {reply.reason}")
            if reply.status != "BUSY":
                raise ClientError(f"{self._where}: {error_of(reply)}")
            time.sleep(BUSY_S)
            self._under_way.send(request)

    def _arrival_of(
        self, request: api.Request, reach_s: float, answer_s: float, *, once: bool
    ) -> Steps[Answer]:
        """Wait for an answer; other answers count as signs of life.

        Raises UnreachableError if the node has no connection for `reach_s`, or gives no answer for
        `answer_s`; NotAuthenticatedError if it does not accept this client, or this client not the
        node. With `once` an end of the connection means that the node does not know the request.
        """
        requester, under_way = self._requester, self._under_way
        answers, ends = under_way.answers, under_way.ends
        unreachable, silent = requester.deadline(reach_s), requester.deadline(answer_s)
        while request.rid not in answers:
            if requester.transport.is_up(under_way.address):
                unreachable = requester.deadline(reach_s)
            if not requester.left_s(unreachable):
                raise UnreachableError(f"{self._where} is not reachable within {reach_s:g} s")
            if not requester.left_s(silent):
                raise UnreachableError(f"{self._where} did not answer within {answer_s:g} s")
            known = len(answers)
            under_way.note((yield requester.left_s(min(unreachable, silent))))
            if len(answers) > known:
                silent = requester.deadline(answer_s)
            elif once and under_way.ends > ends:
                raise UsageError(
                    f"{self._where} closed the connection when it was asked for a digest: this "
                    "node is too old for an audit; upgrade it, or give its store's folder"
                )
        return answers.pop(request.rid)


class NodeSide:
    """A node that computes digests of its own log."""

    limits_s = REACH_S, ANSWER_S

    def __init__(self, extent: Extent, algorithm: str, security: str | None = None) -> None:
        """Start to connect; `security` is the client's security file, None: HASTORE_SECURITY's."""
        self.where = extent.where
        self._extent = extent
        self._algorithm = algorithm
        self._link = _Link(extent.where, security)
        self._begun: deque[api.Request] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def begin(self, start: int, end: int) -> None:
        """Ask for a digest, without waiting for it."""
        asked = self._link.send(lambda rid: api.AskDigest(rid, start, end, self._algorithm))
        self._begun.append(asked)

    def finish(self) -> bytes | Missing:
        """Wait for the digest of the oldest range that was begun."""
        reply = self._digest(self._begun.popleft())
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
        reply = self._digest(self._link.send(lambda rid: api.AskDigest(rid, start, end)))
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

    def _digest(self, asked: api.Request) -> api.RangeDigest:
        reply, _ = self._link.answer(asked, *self.limits_s)
        if not isinstance(reply, api.RangeDigest):
            raise ClientError(f"{self.where} answered {type(reply).__name__} to AskDigest")
        return reply

    def _bytes(self, start: int, end: int) -> tuple[api.RangeBytes, bytes]:
        asked = self._link.send(lambda rid: api.AskBytes(rid, start, end))
        reply, payload = self._link.answer(asked, *self.limits_s)
        if not isinstance(reply, api.RangeBytes):
            raise ClientError(f"{self.where} answered {type(reply).__name__} to AskBytes")
        if reply.present and len(payload) != end - start:
            raise ClientError(f"{self.where} sent {len(payload)} bytes of [{start}, {end})")
        return reply, payload
