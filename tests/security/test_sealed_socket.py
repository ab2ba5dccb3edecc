"""SealedSocket: real sockets; what a man in the middle may do; short sends, timeouts, ends."""

import contextlib
import errno
import os
import socket
import struct
import threading

import pytest

from hastore.dledger.links.channel import PROGRESS_BYTES
from hastore.errors import TamperedError
from hastore.security import sealed_socket
from hastore.security.sealed_socket import (
    HEAD_BYTES,
    PAYLOAD_BYTES_MAX,
    SealedSocket,
    send_whole,
)

ONE, OTHER = b"1" * 32, b"2" * 32
MOMENT = struct.pack("@ll", 0, 20_000)


@pytest.fixture
def ends():
    """Two sealed ends, connected."""
    with contextlib.ExitStack() as stack:
        made = []
        for sock, keys in zip(socket.socketpair(), ((ONE, OTHER), (OTHER, ONE)), strict=True):
            stack.callback(sock.close)
            sock.settimeout(60)
            made.append(SealedSocket(sock, *keys))
        yield made


@pytest.fixture
def wire():
    """Return (a function that seals, the bare end that takes it, a sealed receiver's feed)."""
    with contextlib.ExitStack() as stack:
        out, tap = socket.socketpair()
        feed, into = socket.socketpair()
        for sock in (out, tap, feed, into):
            stack.callback(sock.close)
            sock.settimeout(60)
        sender, receiver = SealedSocket(out, ONE, OTHER), SealedSocket(into, OTHER, ONE)

        def seal(data):
            sender.sendall(data)
            return tap.recv(len(data) + HEAD_BYTES, socket.MSG_WAITALL)

        yield seal, feed.sendall, receiver


def receive(sock, size):
    got = bytearray()
    while len(got) < size:
        piece = sock.recv(size - len(got))
        assert piece
        got += piece
    return bytes(got)


@pytest.mark.parametrize(
    "size", [1, 100, 16_384, 16_385, PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_MAX + 1, 3_000_000]
)
def test_bytes_arrive_as_they_were_sent_both_ways(ends, size):
    data = os.urandom(size)
    threads = [threading.Thread(target=one.sendall, args=(data,)) for one in ends]
    for one in threads:
        one.start()
    assert [receive(one, size) for one in ends] == [data, data]
    for one in threads:
        one.join(60)


def test_many_small_frames_are_read_together(ends):
    one, other = ends
    for number in range(50):
        one.sendall(b"%04d" % number)
    assert other.recv(1_000) == b"".join(b"%04d" % number for number in range(50))


def test_writers_in_several_threads_do_not_mix_their_messages(ends):
    one, other = ends
    texts = [bytes((n,)) * 40_000 for n in range(4)]
    threads = [threading.Thread(target=one.sendall, args=(text,)) for text in texts]
    for each in threads:
        each.start()
    got = receive(other, 160_000)
    for each in threads:
        each.join(60)
    assert sorted(got[at : at + 40_000] for at in range(0, 160_000, 40_000)) == texts


def flip(frame, at):
    return frame[:at] + bytes((frame[at] ^ 1,)) + frame[at + 1 :]


@pytest.mark.parametrize(
    "tamper",
    [
        lambda a, b, c: flip(a, 0), lambda a, b, c: flip(a, 3), lambda a, b, c: flip(a, 4),
        lambda a, b, c: flip(a, HEAD_BYTES), lambda a, b, c: flip(a, len(a) - 1),
        lambda a, b, c: b,  # the first is left out
        lambda a, b, c: b + a,
        lambda a, b, c: a + a,
        lambda a, b, c: a + c,
        lambda a, b, c: a + b + b,
        lambda a, b, c: a[:-1] + b,
        lambda a, b, c: bytes(100),
        lambda a, b, c: b"\xff" * 100,
    ],
    ids=range(13),
)  # fmt: skip
def test_what_was_changed_repeated_left_out_or_moved_is_not_handed_on(wire, tamper):
    seal, feed, receiver = wire
    texts = [b"one" * 30, b"two" * 30, b"ten" * 30]
    frames = [seal(text) for text in texts]
    feed(tamper(*frames) + bytes(300))  # the rest of a frame that now seems longer
    got = b""
    with pytest.raises(TamperedError, match="bytes were changed between both nodes"):
        while True:
            got += receiver.recv(90)
    assert b"".join(texts).startswith(got) and len(got) % 90 == 0


def test_a_frame_of_the_other_direction_does_not_fit(ends):
    one, other = ends
    one.sendall(b"mine")
    raw = other._sock.recv(100)
    other._sock.sendall(raw)  # reflected
    with pytest.raises(TamperedError):
        one.recv(100)


def test_a_frame_of_another_session_does_not_fit(wire):
    seal, feed, _ = wire
    with contextlib.ExitStack() as stack:
        left, right = socket.socketpair()
        stack.callback(left.close)
        stack.callback(right.close)
        later = SealedSocket(right, OTHER, b"3" * 32)
        left.sendall(seal(b"text"))
        with pytest.raises(TamperedError):
            later.recv(100)


@pytest.mark.parametrize("size", [30, 50_000, 2 * PAYLOAD_BYTES_MAX + 5])
def test_a_short_send_is_finished_by_the_next_one(ends, size):
    """Whatever the kernel took: bytes that were not sent are offered again, before others."""
    one, other = ends
    one.settimeout(None)  # else Python waits, whatever the flags say
    expected = bytearray()
    for _ in range(3):
        while True:
            part = os.urandom(size)
            expected += part
            try:
                sent = one.sendmsg([part[:10], part[10:]], [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            if sent < size:
                break
        with pytest.raises(BlockingIOError):
            one.sendmsg([b"other"], [], socket.MSG_DONTWAIT)
        more = os.urandom(1_000)
        expected += more
        thread = threading.Thread(target=one.sendall, args=(part[sent:] + more,))
        thread.start()
        assert receive(other, len(expected)) == bytes(expected)
        thread.join(60)
        expected.clear()
    assert one.sendmsg([b"a", b"bc"], [], socket.MSG_DONTWAIT) == 3
    assert receive(other, 3) == b"abc"


def test_a_frame_in_pieces_times_out_and_is_kept(wire):
    seal, feed, receiver = wire
    frame = seal(b"x" * 1_000)
    receiver.settimeout(None)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, MOMENT)
    feed(frame[:500])
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            receiver.recv(2_000)
    feed(frame[500:])
    assert receiver.recv(2_000) == b"x" * 1_000


def test_a_long_message_is_handed_on_as_it_comes(wire):
    """A slow link must show that it is alive as often as one without MACs."""
    _, feed, receiver = wire
    data = os.urandom(3 * PROGRESS_BYTES)
    with contextlib.ExitStack() as stack:
        out, tap = socket.socketpair()
        for sock in (out, tap):
            stack.callback(sock.close)
        sender = SealedSocket(out, ONE, OTHER)
        thread = threading.Thread(target=sender.sendall, args=(data,))
        thread.start()
        for at in range(0, len(data), PROGRESS_BYTES):
            feed(tap.recv(HEAD_BYTES + PROGRESS_BYTES, socket.MSG_WAITALL))
            if at + PROGRESS_BYTES == len(data):
                feed.__self__.close()
            assert receive(receiver, PROGRESS_BYTES) == data[at : at + PROGRESS_BYTES]
        thread.join(60)


def test_the_end_of_the_connection_is_an_end(wire):
    """Also in the middle of a frame: nothing of it is handed on."""
    seal, feed, receiver = wire
    frame = seal(b"whole")
    feed(frame + seal(b"half")[:-2])
    feed.__self__.close()
    assert receiver.recv(100) == b"whole"
    assert receiver.recv(100) == b""


class SlowSocket:
    """A socket whose buffer is full; `kept` is what the kernel has at each look."""

    def __init__(self, *kept):
        self.kept, self.sent = list(kept), b""

    def gettimeout(self):
        return None

    def send(self, data, flags=0):
        del flags
        if len(self.kept) > 1:
            raise BlockingIOError(errno.EAGAIN, "SO_SNDTIMEO")
        self.sent += bytes(data[:3])
        return len(data[:3])


def test_a_slow_link_is_not_broken_while_the_other_end_takes_bytes(monkeypatch):
    """The kernel wakes a sender once a third of its buffer is free: SO_SNDTIMEO may come before."""

    def kept(sock):
        return sock.kept.pop(0) if len(sock.kept) > 1 else sock.kept[0]

    monkeypatch.setattr(sealed_socket, "_kept", kept)
    slow = SlowSocket(900, 800, 800, 700, 600)
    send_whole(slow, bytearray(b"seven .."))
    assert slow.sent == b"seven .."
    for stuck in (SlowSocket(900, 900, 900), SlowSocket(900, 800, 800, 800, 800)):
        data = bytearray(b"x")
        with pytest.raises(BlockingIOError):
            send_whole(stuck, data)
        data.clear()  # nothing holds it


def test_a_real_link_whose_other_end_takes_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0]:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, MOMENT)
            with pytest.raises(BlockingIOError):
                while True:
                    send_whole(one, bytes(1 << 20))
            assert sealed_socket._kept(one) > 0
