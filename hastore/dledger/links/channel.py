"""PeerChannel: one open link to another node of the group, in both directions.

    out   `send`, from any thread, never blocks: it hands small frames to the kernel at once if
          nothing waits before them; the rest waits in a queue for the thread PeerWriter
    in    `receive`, in the thread that owns the connection: bytes to messages, to the driver

What waits in the queue are messages. The bytes of an append are read from the log when they are
sent, so a follower that reads slowly holds no memory. A link is closed, with the reason in the log,
if the other end breaks the protocol, sends no whole frame or 64 KiB of one for `silence_ms`, takes
no bytes for so long, or leaves too many messages waiting.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hastore.clock import Clock
from hastore.errors import HastoreError
from hastore.ha.hello.peer import break_link, wait_in_kernel
from hastore.ha.master.link_writer import PUSH_BYTES_MAX, LinkWriter, LogBytes
from hastore.protocol.dledger import AppendRequest, Message
from hastore.protocol.dledger_link import (
    KEEP_ALIVE,
    FrameReceiver,
    Received,
    append_frames,
    message_frame,
)
from hastore.security.sealed_socket import send_whole
from hastore.security.tls_socket import LinkSocket
from hastore.service import OnFailure

QUEUE_MESSAGES_MAX = 4_096
QUEUE_LOG_BYTES_MAX = 32 << 20  # bytes of the log that the queued appends name
PROGRESS_BYTES = 64 * 1024
LEAST_SILENCE_MS = 3_000.0
SILENT_ELECTIONS = 6  # election timeouts


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """The times of a link, in milliseconds; all nodes of a group should have the same."""

    silence_ms: float = LEAST_SILENCE_MS  # a link is closed after so long without a sign of life
    hello_ms: float = 2_000  # a call and its HELLO end within this time
    retry_least_ms: float = 50
    retry_most_ms: float = 500

    @classmethod
    def of_election(cls, election_timeout_ms: float) -> "LinkTimes":
        """Return the times for a group: a link outlives whatever its elections wait for."""
        return cls(silence_ms=max(LEAST_SILENCE_MS, SILENT_ELECTIONS * election_timeout_ms))

    @property
    def keep_alive_ms(self) -> float:
        """A link is never silent for longer, whatever silence the other end bears."""
        return min(self.silence_ms, LEAST_SILENCE_MS) / 4


DEFAULT_TIMES = LinkTimes()


class PeerChannel(LinkWriter):
    """An open link; any thread may call `send`, `cut` and `close`. Its own thread is PeerWriter."""

    def __init__(
        self,
        sock: LinkSocket,
        peer: int,
        address: str,
        source: LogBytes,
        clock: Clock,
        times: LinkTimes,
        *,
        name: str,
        on_failure: OnFailure,
    ) -> None:
        super().__init__(sock, source, clock, name=f"PeerWriter-{name}", on_failure=self._failed)
        self.peer = peer
        self.address = address
        self.reason: str | None = None  # why it was closed
        self._times = times
        self._note_failure = on_failure
        self._wakeup = threading.Condition(self._lock)
        self._queue: deque[Message | bytes] = deque()
        self._queued_bytes = 0
        self._sending_end = 0  # the end of the log bytes that the writer is sending; 0: none
        self._busy = False  # the writer is sending
        self._closed = False
        wait_in_kernel(sock, receive_ms=times.keep_alive_ms / 4, send_ms=times.silence_ms)

    # -- out ---------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message, an append with its bytes; does nothing on a closed link."""
        if isinstance(message, AppendRequest):
            self._send_append(message)
        else:
            self._send_frame(message_frame(message))

    def _send_frame(self, frame: bytes) -> None:
        with self._lock:
            if self._waiting():
                self._enqueue(frame, 0)
            elif not self._closed and not self._hand_over([frame], len(frame)):
                self._wakeup.notify()

    def _send_append(self, request: AppendRequest) -> None:
        size = request.size
        with self._lock:
            if size > PUSH_BYTES_MAX or self._waiting():
                self._enqueue(request, size)
                return
            if self._closed:
                return
            try:
                with self._source.view(request.pos, size) as view:
                    if len(view) == size:
                        head = append_frames(request)
                        if not self._hand_over([head, view], len(head) + size):
                            self._wakeup.notify()
                        return
            except (HastoreError, OSError) as error:
                reason = f"the log cannot be read at {request.pos}: {error}"
            else:
                reason = f"the log has no {size} bytes at {request.pos}"
        self.close(reason)

    def _waiting(self) -> bool:
        return self._busy or bool(self._rest) or bool(self._queue)

    def _enqueue(self, item: Message | bytes, log_bytes: int) -> None:
        if self._closed:
            return
        if log_bytes and self._queued_bytes + log_bytes > QUEUE_LOG_BYTES_MAX:
            return  # the core sends it again
        if len(self._queue) >= QUEUE_MESSAGES_MAX:
            self._shut(f"node {self.peer} reads too slowly: {len(self._queue)} messages wait")
            return
        self._queue.append(item)
        self._queued_bytes += log_bytes
        self._wakeup.notify()

    def cut(self, pos: int) -> None:
        """Close the link if it may still send bytes of the log beyond `pos`, which are cut next.

        An append that waits would else be sent with the bytes that come after the cut.
        """
        with self._lock:
            ends = [one.pos + one.size for one in self._queue if isinstance(one, AppendRequest)]
            if max([self._sending_end, *ends]) > pos:
                self._shut("the log was cut while it was being sent")

    def run(self) -> None:
        """Send what waits, until the link is closed."""
        while True:
            with self._wakeup:
                while not self._closed and not self._rest and not self._queue:
                    self._busy = False
                    self._sending_end = 0
                    self._wakeup.wait()
                if self._closed:
                    return
                self._busy = True
                rest, self._rest = self._rest, b""
                items, self._queue = self._queue, deque()
                self._queued_bytes = 0
                ends = [one.pos + one.size for one in items if isinstance(one, AppendRequest)]
                self._sending_end = max(ends, default=0)
            try:
                self._write(rest, items)
            except BlockingIOError:
                self.close(
                    f"node {self.peer} took no bytes for {self._times.silence_ms / 1000:g} s"
                )
                return
            except (OSError, HastoreError) as error:
                self.close(f"sending to node {self.peer} failed: {error}")
                return

    def _write(self, rest: bytes, items: deque[Message | bytes]) -> None:
        buffer = bytearray(rest)
        for item in items:
            if isinstance(item, AppendRequest):
                if buffer:
                    send_whole(self._sock, buffer)
                    buffer = bytearray()
                self._write_append(item)
            else:
                buffer += item if isinstance(item, bytes) else message_frame(item)
        if buffer:
            send_whole(self._sock, buffer)
        self._last_send_ms = self._clock.monotonic_ms()

    def _write_append(self, request: AppendRequest) -> None:
        self._last_send_ms = self._clock.monotonic_ms()
        self._send_range(request.pos, request.size, partial(_append_head, request))

    # -- in ----------------------------------------------------------------------------------------

    def receive(self, on_messages: Callable[[int, list[Received]], None]) -> None:
        """Receive until the link is closed, and pass on what was received together.

        Raises ProtocolError or OSError if the link broke; `close` gives other reasons.
        """
        self.start()
        clock, times = self._clock, self._times
        receiver = FrameReceiver()
        heard_ms = clock.monotonic_ms()
        progress = 0
        while not self._closed:
            try:
                size = self._sock.recv_into(receiver.room())
            except BlockingIOError:
                now = clock.monotonic_ms()
                if now - heard_ms > times.silence_ms:
                    self.close(f"node {self.peer} was silent for {times.silence_ms / 1000:g} s")
                    return
                self._keep_alive(now)
                continue
            if not size:
                self.close(f"closed by node {self.peer}")
                return
            now = clock.monotonic_ms()
            got = receiver.received(size)
            progress += size
            if got or progress >= PROGRESS_BYTES:
                heard_ms, progress = now, 0
                messages = [one for one in got if one.message is not None]
                if messages:
                    on_messages(self.peer, messages)
            elif now - heard_ms > times.silence_ms:
                self.close(f"no whole message of node {self.peer} in {times.silence_ms / 1000:g} s")
                return
            self._keep_alive(now)

    def _keep_alive(self, now_ms: float) -> None:
        if now_ms - self._last_send_ms >= self._times.keep_alive_ms:
            self._send_frame(KEEP_ALIVE)

    # -- end ---------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """End the link, from any thread; the first reason counts."""
        with self._lock:
            self._shut(reason)

    def _shut(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self.reason = reason
        self._queue.clear()
        self._rest = b""
        self._wakeup.notify()
        break_link(self._sock, f"node {self.peer}")

    def wake(self) -> None:
        """End the wait of the thread; the link is closed already."""
        self.close("the link ends")

    def release(self) -> None:
        """Wait for the writer, then close the socket; the thread of `receive` calls it last."""
        self.close("its thread has ended")
        self.stop()
        self._sock.close()

    def _failed(self, name: str, failure: BaseException) -> None:
        """End the link, not the node."""
        self._note_failure(name, failure)
        self.close(repr(failure))


def _append_head(request: AppendRequest, size: int) -> bytes:
    if size != request.size:
        raise OSError(f"the log has {size} of {request.size} bytes at {request.pos}")
    return append_frames(request)
