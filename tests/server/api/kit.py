"""Helpers of the API's tests: records, a bare client, and waiting."""

from __future__ import annotations

import time
from typing import Any

import zmq

from hastore.protocol import api
from hastore.record.codec import NO_HOST, build_record


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
