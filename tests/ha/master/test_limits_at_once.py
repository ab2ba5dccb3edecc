"""What a slave is told of the limits, and when: at once if readers wait there."""

import contextlib
import socket

import pytest

from hastore.errors import ProtocolError
from hastore.ha.master.ha_service import ReadSocketService
from hastore.ha.master.write_socket_service import AT_ONCE_MS, WriteSocketService
from hastore.ha.rules.acks import Intake
from hastore.protocol.ha_link import NO_READERS, READERS_WAIT, confirmed_frame
from hastore.service import raise_failure


class Clock:
    """A clock that stands still."""

    def __init__(self):
        self.now_ms = 1_000.0

    def monotonic_ms(self):
        return self.now_ms


class Log:
    """A log as a writer sees it."""

    def __init__(self):
        self.max_offset = self.confirmed_offset = self.readable_offset = 0

    @property
    def view(self):
        return self._view

    @contextlib.contextmanager
    def _view(self, offset, size):
        yield memoryview(bytes(min(size, self.max_offset - offset)))


class Link:
    """A writer that is caught up and whose thread does not run, and the slave's end."""

    def __init__(self):
        self.clock, self.log, self.woken = Clock(), Log(), 0
        ours, self.slave = socket.socketpair()
        self.slave.setblocking(False)
        self.writer = WriteSocketService(
            ours, self.log, self.clock, name="w", start_offset=0, frame_bytes_max=4096,
            heartbeat_ms=5_000.0, history=(), tell_limits=True, on_broken=pytest.fail,
            on_failure=raise_failure,
        )  # fmt: skip
        self.writer._flowing = True
        self.writer.wake = self._wake
        self.sock = ours

    def _wake(self):
        self.woken += 1

    def append(self, size):
        """Push an append, and confirm it."""
        start = self.log.max_offset
        self.log.max_offset += size
        self.writer.push(start, start + size)
        self.received()
        self.log.confirmed_offset = self.log.readable_offset = self.log.max_offset

    def received(self):
        """Return the bytes that have come to the slave."""
        with contextlib.suppress(BlockingIOError):
            return self.slave.recv(1 << 16)
        return b""

    def close(self):
        self.writer.release()
        self.sock.close()
        self.slave.close()


@pytest.fixture
def link():
    made = Link()
    yield made
    made.close()


def test_nobody_is_told_at_once_without_readers(link):
    link.append(10)
    link.writer.note_limits(10)
    assert link.received() == b"" and link.woken == 1  # the thread sends them later


def test_where_readers_wait_the_limits_come_at_once(link):
    link.writer.at_once = True
    link.append(10)
    link.writer.note_limits(10)
    assert link.received() == confirmed_frame(10, 10) and not link.woken
    link.writer.note_limits(10)  # nothing has moved
    assert link.received() == b"" and not link.woken


def test_while_more_reports_are_to_come_the_limits_wait_for_them(link):
    link.writer.at_once = True
    link.append(10)
    link.append(10)
    link.writer.note_limits(10)
    assert link.received() == b"" and link.woken == 1
    link.clock.now_ms += AT_ONCE_MS  # no data has gone out for so long
    link.writer.note_limits(10)
    assert link.received() == confirmed_frame(20, 20)


def test_a_full_socket_blocks_nobody(link):
    link.writer.at_once = True
    link.append(10)
    link.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            link.sock.send(bytes(1 << 16))
    link.writer.note_limits(10)
    assert link.woken == 1 and link.writer._rest == confirmed_frame(10, 10)


class Hello:
    def __init__(self, readers):
        self.readers = readers


class Connection:
    """A slave's connection, and what was counted on it."""

    connection_id, ack_offset = 1, None
    thread_failed = staticmethod(raise_failure)

    def __init__(self, writer, hello):
        self.writer, self.hello, self.owner, self.counted = writer, hello, self, []
        self.intake, self.stalled = Intake(), []
        writer.reach_offset = 100

    def on_report(self, _connection, offset):
        self.counted.append((offset, self.writer.at_once))

    def on_stalled(self, _connection):
        self.stalled.append(self.intake.stalled)


def test_reports_say_whether_readers_wait(link):
    connection = Connection(link.writer, Hello(readers=True))
    count = ReadSocketService(connection)._count_reports
    count([10])
    count([READERS_WAIT, 20])
    count([30])
    count([NO_READERS, 30])
    assert connection.counted == [(10, False), (20, True), (30, True), (30, False)]
    assert connection.stalled == [True], "30 again, and 100 was on the way"
    count([READERS_WAIT])
    assert connection.stalled == [True], "no report"
    count([40])
    assert connection.stalled == [True, False]
    with pytest.raises(ProtocolError, match="went back from 40 to -3"):
        count([-3])


@pytest.mark.parametrize("hello", [None, Hello(readers=False)], ids=["RocketMQ", "version before"])
def test_only_a_slave_of_this_version_says_it(link, hello):
    connection = Connection(link.writer, hello)
    with pytest.raises(ProtocolError, match="went back"):
        ReadSocketService(connection)._count_reports([READERS_WAIT])
    assert not link.writer.at_once
