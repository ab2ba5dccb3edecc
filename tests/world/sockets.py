"""What hastore uses of `socket`."""

from __future__ import annotations

import errno
import os as real_os
import socket as real_socket
import struct
from collections.abc import Iterable
from typing import Any

from tests.world.network import (
    IN,
    OUT,
    Address,
    Listener,
    Stream,
    join_ends,
    of_world,
    wait_for_events,
)
from tests.world.scheduler import world

SNDBUF = 64 * 1024
# As plain numbers: an IntFlag's operators are slow.
_DONTWAIT = int(real_socket.MSG_DONTWAIT)
_WAITALL = int(real_socket.MSG_WAITALL)
_PEEK = int(real_socket.MSG_PEEK)


def again() -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, real_os.strerror(errno.EAGAIN))


def error(number: int) -> OSError:
    return OSError(number, real_os.strerror(number))


class Socket:
    """socket.socket of TCP."""

    def __init__(self, family: int = 2, type: int = 1, proto: int = 0, fileno: Any = None) -> None:
        del fileno
        self.family, self.type, self.proto = family, type, proto
        self._end: Stream | Listener | None = None
        self._bound: Address | None = None
        self._timeout: float | None = None
        self._limits: dict[int, float] = {}  # SO_RCVTIMEO, SO_SNDTIMEO
        self._reset_at_close = False
        self._closed = False
        self._host = world().host

    @classmethod
    def over(cls, stream: Stream) -> Socket:
        made = cls()
        made._end, made._host, made._limits = stream, stream.host, stream.limits
        return made

    # -- state

    def fileno(self) -> int:
        if self._closed:
            return -1
        if self._end is None:  # not connected yet: a stream to nowhere
            self._end = self._new_stream((self._host.address, 0), ("", 0))
        return self._end.descriptor

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def settimeout(self, value: float | None) -> None:
        self._timeout = value

    def gettimeout(self) -> float | None:
        return self._timeout

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if level != real_socket.SOL_SOCKET:
            return
        if option == real_socket.SO_LINGER:
            self._reset_at_close = struct.unpack("=ii", value)[0] == 1
        elif option in (real_socket.SO_RCVTIMEO, real_socket.SO_SNDTIMEO):
            seconds, micros = struct.unpack("@ll", value)
            self._limits[option] = seconds + micros / 1e6

    def getsockopt(self, level: int, option: int, size: int = 0) -> int:
        del size
        if (level, option) == (real_socket.SOL_SOCKET, real_socket.SO_ERROR):
            stream = self._stream()
            return stream.error or 0
        return 0

    def getsockname(self) -> Address:
        return self._end.local if self._end is not None else (self._bound or ("0.0.0.0", 0))

    def getpeername(self) -> Address:
        return self._stream().remote

    def _new_stream(self, local: Address, remote: Address) -> Stream:
        stream = Stream(self._host, local, remote)
        stream.limits = self._limits
        return stream

    def _stream(self) -> Stream:
        if self._closed:
            raise error(errno.EBADF)
        if not isinstance(self._end, Stream):
            raise error(errno.ENOTCONN)
        return self._end

    # -- servers

    def bind(self, address: Address) -> None:
        port = address[1] or of_world().free_port()
        if port in self._host.ports:
            raise error(errno.EADDRINUSE)
        self._bound = (address[0], port)

    def listen(self, backlog: int = 0) -> None:
        del backlog
        local = self._bound or (self._host.address, of_world().free_port())
        if local[1] in self._host.ports:
            raise error(errno.EADDRINUSE)
        self._end = Listener(self._host, local)
        self._host.ports[local[1]] = self._end

    def accept(self) -> tuple[Socket, Address]:
        listener = self._end
        if self._closed or not isinstance(listener, Listener):
            raise error(errno.EBADF)
        while not listener.backlog:
            if listener.shut:
                raise error(errno.EINVAL)
            if self._timeout == 0.0:
                raise again()
            if not listener.wait(IN, self._timeout):
                raise TimeoutError("timed out")
        stream = listener.backlog.popleft()
        return Socket.over(stream), stream.remote

    # -- clients

    def connect_ex(self, address: Address) -> int:
        network = of_world()
        local = (self._host.address, network.free_port())
        stream = self._end = self._new_stream(local, (address[0], address[1]))
        network.connect(stream)
        if self._timeout == 0.0:
            return errno.EINPROGRESS
        if not stream.wait(OUT, self._timeout):
            return errno.EAGAIN
        return stream.error or 0

    def connect(self, address: Address) -> None:
        number = self.connect_ex(address)
        if number == errno.EAGAIN:
            raise TimeoutError("timed out")
        if number:
            if isinstance(self._end, Stream):
                self._end.error = None
            raise error(number)

    # -- bytes

    def _wait(self, mask: int, option: int, flags: int) -> None:
        if self._timeout == 0.0 or flags & _DONTWAIT:
            raise again()
        stream = self._stream()
        if self._timeout is not None:
            if not stream.wait(mask, self._timeout):
                raise TimeoutError("timed out")
        elif not stream.wait(mask, self._limits.get(option) or None):
            raise again()

    def _wait_for_more(self, wanted: int, flags: int) -> bool:
        """Wait until there are so many bytes, or no more come; False if there are not in time."""
        stream, limit_s = self._stream(), self._limits.get(real_socket.SO_RCVTIMEO) or None
        if self._timeout is not None:
            limit_s = self._timeout
        if limit_s == 0.0 or flags & _DONTWAIT:
            return False

        def is_over() -> bool:
            ended = stream.ended or stream.error is not None or self._closed
            return len(stream.inbox) >= wanted or ended

        return wait_for_events([stream], is_over, limit_s)

    def recv(self, size: int, flags: int = 0) -> bytes:
        flags = int(flags)
        wanted = size if flags & _WAITALL else 1
        stream = self._stream()
        while True:
            if self._closed:
                raise error(errno.EBADF)
            ended = stream.ended or stream.error is not None
            if len(stream.inbox) >= wanted or (stream.inbox and ended):
                break
            if stream.error is not None and not stream.inbox:
                number, stream.ended = stream.error, True
                raise error(number)
            if stream.ended:
                return b""
            if not stream.inbox:
                self._wait(IN, real_socket.SO_RCVTIMEO, flags)
            elif not self._wait_for_more(wanted, flags):
                break  # as a kernel: a part, once the time is over
        network = of_world()
        if size > 1 and wanted == 1 and network.chance.random() < network.short_reads:
            size = network.chance.randrange(1, size)
        data = bytes(stream.inbox[:size])
        if not flags & _PEEK:
            del stream.inbox[:size]
            stream.took()
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(nbytes or len(view), flags)
        view[: len(data)] = data
        return len(data)

    def send(self, data: Any, flags: int = 0) -> int:
        flags = int(flags)
        stream = self._stream()
        if not len(data):
            return 0
        while True:
            if stream.error is not None:
                raise error(stream.error if stream.error != errno.ECONNRESET else errno.EPIPE)
            if stream.shut or self._closed:
                raise BrokenPipeError(errno.EPIPE, real_os.strerror(errno.EPIPE))
            room = min(stream.room(), SNDBUF) if stream.connected else 0
            if room > 0:
                break
            self._wait(OUT, real_socket.SO_SNDTIMEO, flags)
        piece = bytes(memoryview(data).cast("B")[:room])
        assert stream.outgoing is not None
        stream.outgoing.push(piece)
        return len(piece)

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while view:
            view = view[self.send(view, flags) :]

    def sendmsg(self, parts: Iterable[Any], ancillary: Any = (), flags: int = 0) -> int:
        del ancillary
        return self.send(b"".join(parts), flags)

    def shutdown(self, how: int) -> None:
        if isinstance(self._end, Listener):
            self._end.shut = True
            self._end.changed()
            return
        stream = self._stream()
        if stream.error is not None or not stream.connected:
            raise error(errno.ENOTCONN)
        if how != real_socket.SHUT_RD:
            stream.end_sending()
        if how != real_socket.SHUT_WR:
            stream.ended = True
            stream.changed()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if isinstance(self._end, Stream):
            self._end.close(reset=self._reset_at_close)
        elif self._end is not None:
            self._end.close()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_connection(
    address: Address, timeout: float | None = None, source_address: Any = None
) -> Socket:
    del source_address
    made = Socket()
    made.settimeout(timeout)
    try:
        made.connect(address)
    except BaseException:
        made.close()
        raise
    return made


def create_server(address: Address, *, family: int = 2, backlog: int = 0, **_: Any) -> Socket:
    made = Socket(family)
    made.bind(address)
    made.listen(backlog)
    return made


def socketpair(*_: Any) -> tuple[Socket, Socket]:
    host = world().host
    ends = [Stream(host, (host.address, 0), (host.address, 0)) for _ in range(2)]
    join_ends(*ends)
    for end in ends:
        end.connected = True
    return Socket.over(ends[0]), Socket.over(ends[1])
