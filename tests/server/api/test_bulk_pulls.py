"""Bulk pulls: sizes in the reply, no check of bodies, and puts go before them."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

from hastore.protocol import api
from hastore.server.api.server import ApiServer
from tests.api_fakes import FakeBackend, FakePull
from tests.server.api.kit import Client, record, until


def fill(backend: FakeBackend, count: int) -> None:
    for n in range(count):
        backend.store.put_encoded([record(body=b"x" * n)])


def bulk(rid: int, at: int = 0) -> api.Pull:
    return api.Pull(rid, "t", 0, api.Position(at), 10, bulk=True)


def test_the_reply_has_the_sizes_only_if_they_are_asked_for(
    client: Client, backend: FakeBackend
) -> None:
    fill(backend, 20)
    reply = client.ask(bulk(1))
    sizes = [size for _, size in backend.store.units["t", 0][:10]]
    assert struct.unpack(">10i", reply.sizes) == tuple(sizes)
    assert client.ask(api.Pull(2, "t", 0, api.Position(0))).sizes == b""


def test_only_bulk_pulls_leave_the_bodies_unchecked(client: Client, backend: FakeBackend) -> None:
    fill(backend, 5)
    seen: list[bool] = []
    pull = backend.store.pull

    def spied(*args: Any, check_bodies: bool = True, **limits: Any) -> FakePull:
        seen.append(check_bodies)
        found: FakePull = pull(*args, **limits)
        return found

    backend.store.pull = spied
    client.ask(bulk(1))
    client.ask(api.Pull(2, "t", 0, api.Position(0)))
    assert seen == [False, True]


def test_a_put_waits_for_one_bulk_pull_at_most(
    client: Client, backend: FakeBackend, server: ApiServer
) -> None:
    """The node reads all of this input at once, because it is busy with the first pull."""
    fill(backend, 50)
    done: list[str] = []
    begun, go_on = threading.Event(), threading.Event()
    pull, put = backend.store.pull, backend.store.put_encoded

    def pull_spied(topic: str, queue_id: int, queue_offset: int, **limits: Any) -> FakePull:
        begun.set()
        go_on.wait()
        done.append(f"pull {queue_offset}")
        found: FakePull = pull(topic, queue_id, queue_offset, **limits)
        return found

    def put_spied(payloads: Any) -> Any:
        done.append("put")
        return put(payloads)

    backend.store.pull, backend.store.put_encoded = pull_spied, put_spied
    client.send(bulk(1, 1))
    assert begun.wait(60)
    client.send(bulk(2, 2))
    client.send(bulk(3, 3))
    client.send(api.Put(4, 1), record())
    (connection,) = server._connections.all()

    def waiting() -> bytes:
        try:
            return connection.sock.recv(65536, socket.MSG_PEEK)
        except BlockingIOError:  # nothing has arrived yet
            return b""

    try:
        until(lambda: record() in waiting())
    finally:
        go_on.set()
    replies = [client.receive()[0].rid for _ in range(4)]
    assert done == ["pull 1", "put", "pull 2", "pull 3"]
    assert replies == [1, 4, 2, 3]
