"""A bare client of RocketMQ's protocol, and a server with a door."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
from collections.abc import Callable, Iterator

from hastore.config.model import ApiConfig
from hastore.protocol.remoting import JSON, ONE_WAY, Frame, RemotingWire, encode_frame
from hastore.server.api.backend import ApiBackend
from hastore.server.api.server import ApiParts, ApiServer
from hastore.server.remoting.door import Door
from hastore.service import raise_failure


class RemotingClient:
    """A client that sends frames and reads frames; requests of the node are kept in `pushed`."""

    def __init__(self, endpoint: str, context: ssl.SSLContext | None = None) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.sock = socket.create_connection((host.strip("[]"), int(port)), 60.0)
        if context is not None:
            self.sock = context.wrap_socket(self.sock, server_hostname=host)
        self.wire = RemotingWire()
        self.frames: list[Frame] = []
        self.pushed: list[Frame] = []
        self._opaques = itertools.count(7)

    def send(
        self,
        code: int,
        fields: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        kind: int = JSON,
        one_way: bool = False,
        language: str = "JAVA",
    ) -> int:
        """Send a request; return its opaque."""
        opaque = next(self._opaques)
        flag = ONE_WAY if one_way else 0
        frame = Frame(
            code, opaque, flag, fields or {}, body, language=language, version=479, kind=kind
        )
        self.sock.sendall(encode_frame(frame))
        return opaque

    def next(self) -> Frame:
        """Return the next frame; fails if the connection ends."""
        while not self.frames:
            data = self.sock.recv(65_536)
            assert data, "the node has closed the connection"
            self.frames += self.wire.receive(data)
            assert self.wire.failure is None, self.wire.failure
        return self.frames.pop(0)

    def answer_of(self, opaque: int) -> Frame:
        """Return the answer to a request; the node's own requests before it are kept."""
        while not (frame := self.next()).is_answer:
            self.pushed.append(frame)
        assert frame.opaque == opaque, frame
        return frame

    def ask(
        self,
        code: int,
        fields: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        kind: int = JSON,
    ) -> Frame:
        """Send a request and return its answer."""
        return self.answer_of(self.send(code, fields, body, kind=kind))

    def ended(self) -> bool:
        """Read until the node ends the connection; return True."""
        with contextlib.suppress(ConnectionError):
            while self.sock.recv(1 << 20):
                continue
        return True

    def was_reset(self) -> bool:
        """Read until the node ends the connection; return whether by a reset."""
        try:
            while data := self.sock.recv(1 << 20):
                self.frames += self.wire.receive(data)
        except ConnectionResetError:
            return True
        return False

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


@contextlib.contextmanager
def served(
    backend: ApiBackend,
    fill: Callable[[Door], None],
    *,
    refusal: str | None = None,
    config: ApiConfig | None = None,
    endpoint: str = "tcp://127.0.0.1:0",
) -> Iterator[ApiServer]:
    """Run an API whose door was filled with handlers."""

    def make_door(parts: ApiParts) -> Door:
        door = Door(parts, refusal)
        fill(door)
        return door

    running = ApiServer(
        endpoint, backend, config or ApiConfig(), on_failure=raise_failure, make_door=make_door,
    )  # fmt: skip
    running.start()
    try:
        yield running
    finally:
        assert running.stop(60)
        assert running.failure is None
