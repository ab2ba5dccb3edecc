"""What hastore uses of `os` and `fcntl` on descriptors that the world has made."""

from __future__ import annotations

import errno
import fcntl as real_fcntl
import os as real_os
import struct
from typing import Any

from tests.world.network import FIRST_DESCRIPTOR, IN, OUT, Pollable, Stream, of_world
from tests.world.polls import pollable
from tests.world.sockets import SNDBUF, Socket, again, error


class Counter(Pollable):
    """An eventfd."""

    value = 0

    def events(self) -> int:
        return OUT | (IN if self.value else 0)


class Pipe(Pollable):
    """A pipe for splice, one end for both descriptors."""

    def __init__(self) -> None:
        super().__init__()
        self.content = bytearray()

    def events(self) -> int:
        return OUT | (IN if self.content else 0)


def eventfd(value: int = 0, flags: int = 0) -> int:
    del flags
    made = Counter()
    made.value = value
    return made.descriptor


def _counter(descriptor: int) -> Counter:
    found = pollable(descriptor)[1]
    assert isinstance(found, Counter)
    return found


def eventfd_write(descriptor: int, value: int) -> None:
    counter = _counter(descriptor)
    counter.value += value
    counter.changed()


def eventfd_read(descriptor: int) -> int:
    counter = _counter(descriptor)
    if not counter.value:
        raise again()
    value, counter.value = counter.value, 0
    return value


def close(descriptor: int) -> None:
    if descriptor < FIRST_DESCRIPTOR:
        real_os.close(descriptor)
        return
    found = of_world().table.get(descriptor)
    if found is not None:
        found.forget()


def pipe2(flags: int) -> tuple[int, int]:
    del flags
    made = Pipe()
    return made.descriptor, made.descriptor


def splice(src: int, dst: int, count: int, offset_dst: int | None = None) -> int:
    if src < FIRST_DESCRIPTOR:
        raise error(errno.EINVAL)
    source = pollable(src)[1]
    if isinstance(source, Pipe):
        assert offset_dst is not None
        done = real_os.pwrite(dst, source.content[:count], offset_dst)
        del source.content[:done]
        return done
    target = pollable(dst)[1]
    assert isinstance(source, Stream) and isinstance(target, Pipe)
    got = Socket.over(source).recv(count)
    target.content += got
    return len(got)


def sendfile(out: int, source: int, offset: int, count: int) -> int:
    stream = pollable(out)[1]
    assert isinstance(stream, Stream)
    data = real_os.pread(source, min(count, SNDBUF), offset)
    return Socket.over(stream).send(data) if data else 0


def ioctl(descriptor: int, request: int, arg: Any = 0) -> Any:
    """Return how many bytes the kernel has not sent: it is asked for nothing else."""
    if descriptor < FIRST_DESCRIPTOR:
        return real_fcntl.ioctl(descriptor, request, arg)
    found = pollable(descriptor)[1]
    flow = found.outgoing if isinstance(found, Stream) else None
    return struct.pack("=i", flow.waiting_bytes if flow is not None else 0)


def fcntl_call(target: Any, command: int, arg: Any = 0) -> Any:
    descriptor = target if isinstance(target, int) else target.fileno()
    return 0 if descriptor >= FIRST_DESCRIPTOR else real_fcntl.fcntl(descriptor, command, arg)
