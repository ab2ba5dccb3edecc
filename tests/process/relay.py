"""A relay between a ZeroMQ client and a node, which records the bytes of both.

    with Relay(node.api) as relay:
        dealer.connect(relay.address)
        ...
        [said] = relay.connections
        assert said.client.commands("PING")

It shares no code with hastore's ZMTP implementation.
"""

from __future__ import annotations

import socket
import threading
from typing import NamedTuple

from tests.process.wire import COMMAND, GREETING_BYTES, Frame, read_frames


class Side:
    """The bytes that one end of a connection has sent so far."""

    def __init__(self) -> None:
        self.raw = b""
        self.ended = False

    def __repr__(self) -> str:
        return f"{self.raw[-300:]!r}{', ended' if self.ended else ''}"

    @property
    def greeting(self) -> bytes:
        """The first 64 bytes."""
        return self.raw[:GREETING_BYTES]

    @property
    def frames(self) -> list[Frame]:
        """The complete frames after the greeting."""
        return read_frames(self.raw[GREETING_BYTES:])

    def commands(self, name: str) -> list[bytes]:
        """Return the data of each command with this name."""
        start = bytes((len(name),)) + name.encode()
        return [
            frame.body[len(start) :]
            for frame in self.frames
            if frame.flags & COMMAND and frame.body.startswith(start)
        ]


class Said(NamedTuple):
    """One connection: the bytes of the client and those of the node."""

    client: Side
    node: Side


class Relay:
    """Forwards every connection to one node; a context manager that closes everything."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections: list[Said] = []
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and threads."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._threads[0].join()
        for each in self._sockets:
            _end(each, socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # `close` shut it down
                return
            try:
                node = socket.create_connection(self._target, timeout=60)
            except OSError:  # the node is down: refuse, as its port would
                client.close()
                continue
            said = Said(Side(), Side())
            for each in (client, node):
                each.settimeout(None)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, node]
            self.connections.append(said)
            ways = ((client, node, said.client), (node, client, said.node))
            for way in ways:
                thread = threading.Thread(target=_forward, args=way)
                self._threads.append(thread)
                thread.start()


def _forward(source: socket.socket, sink: socket.socket, side: Side) -> None:
    try:
        while piece := source.recv(1 << 20):
            side.raw += piece
            sink.sendall(piece)
    except OSError:  # reset, or closed by `close`
        _end(source, socket.SHUT_RDWR)
    side.ended = True
    _end(sink, socket.SHUT_WR)


def _end(one: socket.socket, how: int) -> None:
    try:
        one.shutdown(how)
    except OSError:  # it has ended already
        return
