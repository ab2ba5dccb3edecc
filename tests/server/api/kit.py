"""Helpers of the API's tests: records, a bare client, waiting, and pulls without a socket."""

from __future__ import annotations

import time
from typing import Any

import zmq

from hastore.clock import SYSTEM_CLOCK
from hastore.protocol import api
from hastore.record.codec import NO_HOST, build_record
from hastore.server.api.cold_reads import ColdReads
from hastore.server.api.pulls import PullHandler
from hastore.server.api.replies import Failures
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend


def record(topic: str = "t", body: bytes = b"x", queue: int = 0, seq: int | None = None) -> bytes:
    pairs = [] if seq is None else [("HS_PID", "p"), ("HS_SEQ", str(seq))]
    return build_record(
        topic, body, queue_id=queue, properties=pairs, born_timestamp_ms=1, born_host=NO_HOST
    )


class Client:
    """A bare DEALER."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.rid = 0

    def send(self, message: api.Request, payload: bytes | None = None) -> None:
        frames = [api.encode(message)] + ([] if payload is None else [payload])
        self.socket.send_multipart(frames)

    def receive(self, timeout_s: float = 60.0) -> tuple[Any, bytes]:
        assert self.socket.poll(int(timeout_s * 1000)), "no reply"
        frames = self.socket.recv_multipart()
        return api.decode_reply(frames[0]), frames[1] if len(frames) > 1 else b""

    def ask(self, message: api.Request, payload: bytes | None = None) -> Any:
        self.send(message, payload)
        reply, self.payload = self.receive()
        assert reply.rid == message.rid
        return reply

    def silent(self, seconds: float = 0.2) -> bool:
        return not self.socket.poll(int(seconds * 1000))

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def until(condition: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


class Waiting:
    """A connection that only counts its parked pulls."""

    def __init__(self) -> None:
        self.parked = 0
        self.ended = False


class Pulls:
    """A PullHandler whose answers are kept."""

    def __init__(self, backend: FakeBackend) -> None:
        self.answers: dict[int, Any] = {}
        self.connection: Any = Waiting()
        self.handler = PullHandler(
            backend, SYSTEM_CLOCK, self._answer, lambda _: True, Failures(SYSTEM_CLOCK),
            ColdReads(lambda: None, raise_failure),
        )  # fmt: skip

    def _answer(self, _: Any, reply: Any, records: bytes | None) -> None:
        assert reply.rid not in self.answers
        self.answers[reply.rid] = reply

    def wait(self, rid: int, topic: str, at: int, wait_ms: int = 60_000) -> None:
        request = api.Pull(rid, topic, 0, api.Position(at), wait_ms=wait_ms)
        self.handler.answer_or_park(self.connection, request)
        assert rid not in self.answers

    def look_again(self, now_ms: float | None = None) -> None:
        """Wake the parked pulls that have news, or whose wait has ended; answer them."""
        self.handler.try_parked()
        if now_ms is not None:
            self.handler.end_expired(now_ms)
        while self.handler.has_due:
            self.handler.answer_due(*self.handler.next_due())
