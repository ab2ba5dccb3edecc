"""The world's sockets do as a kernel's do."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import pytest

from tests.world import network as networks
from tests.world import scheduler as schedulers
from tests.world.network import Stream, join_ends
from tests.world.scheduler import Host, Scheduler
from tests.world.sockets import Socket

BYTES, LIMIT = 100, struct.pack("@ll", 3, 0)


@pytest.mark.parametrize(
    ("then", "got", "at_s"),
    [
        (lambda one: None, 40, 3.0),
        (lambda one: one.send(bytes(60)), BYTES, 1.0),
        (lambda one: one.shutdown(socket.SHUT_WR), 40, 1.0),
    ],
    ids=["half a frame is stuck", "the rest comes", "the end comes"],
)
def test_a_read_of_all_bytes_ends_with_its_time(
    then: Callable[[Socket], object], got: int, at_s: float
) -> None:
    world = Scheduler(0)
    schedulers.activate(world)
    networks.activate(networks.Network(world, 0))
    try:
        host = Host(world, "h", "127.0.0.1")
        networks.of_world().join(host)
        ends = [Stream(host, ("127.0.0.1", n), ("127.0.0.1", 3 - n)) for n in (1, 2)]
        join_ends(*ends)
        for end in ends:
            end.connected = True
        found: list[tuple[int, float]] = []

        def write() -> None:
            one = Socket.over(ends[0])
            one.send(bytes(40))
            world.sleep(1.0)
            then(one)

        def read() -> None:
            other = Socket.over(ends[1])
            other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, LIMIT)
            size = other.recv_into(memoryview(bytearray(BYTES)), 0, socket.MSG_WAITALL)
            found.append((size, world.now))

        world.spawn(host, "write", write)
        world.spawn(host, "read", read)
        began_s = world.now
        assert world.run(lambda: bool(found), 60.0), "it never ended"
        [(size, now_s)] = found
        assert size == got and now_s - began_s == pytest.approx(at_s, abs=0.5)
    finally:
        networks.activate(None)
        schedulers.activate(None)
