"""The limit of the machine: the same bytes over bare TCP, with as little Python as possible."""

import contextlib
import multiprocessing
import os
import pathlib
import socket
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import BODY_BYTES, MIB, ended

BODY = os.urandom(BODY_BYTES)
REPLY_BYTES = 8
PIECE_BYTES = MIB


def receive(sock: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes, or no bytes at the end of the stream."""
    data = sock.recv(size)
    while data and len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data


def relay(listener: socket.socket, onward: tuple[str, int] | None) -> None:
    """Pass 1 KiB messages to `onward` and the replies back; without `onward` reply at once."""
    sock, _ = listener.accept()
    with contextlib.ExitStack() as stack:
        stack.enter_context(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far = None
        if onward is not None:
            far = stack.enter_context(socket.create_connection(onward))
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := receive(sock, BODY_BYTES):
            reply = data[:REPLY_BYTES]
            if far is not None:
                far.sendall(data)
                reply = receive(far, REPLY_BYTES)
            sock.sendall(reply)


def ping_pong(count: int) -> list[float]:
    """Return the round-trip times, in ms, of `count` messages through three processes."""
    fork = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        last = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        middle = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        processes = [
            fork.Process(target=relay, args=(last, None), daemon=True),
            fork.Process(target=relay, args=(middle, last.getsockname()), daemon=True),
        ]
        for process in processes:
            process.start()
        stack.enter_context(ended(*processes))
        sock = stack.enter_context(socket.create_connection(middle.getsockname()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def once() -> None:
            sock.sendall(BODY)
            receive(sock, REPLY_BYTES)

        return timed(once, count)


def timed(call: Callable[[], Any], count: int) -> list[float]:
    """Return the duration of each call, in ms, after a warm-up with 10 % as many calls."""
    for _ in range(count // 10):
        call()
    clock, took = time.perf_counter, []
    for _ in range(count):
        began = clock()
        call()
        took.append((clock() - began) * 1_000.0)
    return took


def send_file(path: str, listener: socket.socket, size: int) -> None:
    """Send the first `size` bytes of a file to the first connection."""
    sock, _ = listener.accept()
    with sock, open(path, "rb") as file:
        position = 0
        while position < size:
            position += os.sendfile(sock.fileno(), file.fileno(), position, size - position)
        sock.recv(1)  # the receiver answers when it has everything


def bare_copy(path: pathlib.Path, size: int, target: pathlib.Path | None) -> float:
    """Copy a file's bytes over loopback, into memory or into a new file; return the seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        fork = multiprocessing.get_context("fork")
        sender = fork.Process(target=send_file, args=(str(path), listener, size), daemon=True)
        sender.start()
        stack.enter_context(ended(sender))
        sock = stack.enter_context(socket.create_connection(listener.getsockname()))
        descriptor = None
        if target is not None:
            file = stack.enter_context(open(target, "wb", buffering=0))
            descriptor = file.fileno()
            os.posix_fallocate(descriptor, 0, size)
        buffer = memoryview(bytearray(PIECE_BYTES))
        got = 0
        began = time.perf_counter()
        while got < size:
            count = sock.recv_into(buffer)
            if not count:
                raise RuntimeError("the sender ended early")
            if descriptor is not None:
                os.pwrite(descriptor, buffer[:count], got)
            got += count
        seconds = time.perf_counter() - began
        sock.sendall(b"x")
    if target is not None:
        target.unlink()
    return seconds
