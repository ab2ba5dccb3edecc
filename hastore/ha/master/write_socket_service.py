"""WriteSocketService: streams the log to one slave.

    sent_offset     the next byte to send; all bytes below are in the kernel, except `_rest`

The appending thread pushes a small append itself when the slave is caught up and the link is free.
The service's own thread sends everything else: appends that would block or are longer than 128 KiB,
and the log for a slave that catches up (link_writer.py).
"""

import os
import select
import threading
from collections.abc import Callable
from functools import partial

from hastore.clock import Clock
from hastore.errors import HastoreError
from hastore.ha.master.link_writer import PUSH_BYTES_MAX, LinkWriter
from hastore.ha.node.replica_log import ReplicaLog
from hastore.ha.rules.epochs import History
from hastore.protocol.ha_link import confirmed_frame, data_header, limits_and_header
from hastore.security.tls_socket import LinkSocket
from hastore.service import OnFailure

LIMITS_DELAY_MS = 5.0  # limits that moved wait so long for data, to be sent with it
AT_ONCE_MS = 0.5  # while a reader waits they wait so long, if more reports are to come
ACTIVE_MS = 50.0  # for so long after a send the thread wakes up every LIMITS_DELAY_MS

Limits = tuple[int, int]


class WriteSocketService(LinkWriter):
    """Send data frames, heartbeats and, with `tell_limits`, CONFIRMED. Owned by its HAConnection.

    `push`, `note_limits` and `wake` may be called from any thread.
    """

    def __init__(
        self,
        sock: LinkSocket,
        store: ReplicaLog,
        clock: Clock,
        *,
        name: str,
        start_offset: int,
        frame_bytes_max: int,
        heartbeat_ms: float,
        history: History,
        tell_limits: bool,
        on_broken: Callable[[str], None],
        on_failure: OnFailure,
    ) -> None:
        super().__init__(sock, store, clock, name=name, on_failure=on_failure)
        self._store = store
        self._frame_bytes_max = frame_bytes_max
        self._push_bytes_max = min(PUSH_BYTES_MAX, frame_bytes_max)
        self._heartbeat_ms = heartbeat_ms
        self._starts = [entry.start for entry in history if entry.start > start_offset]
        self._tell_limits = tell_limits
        self._limits_sent: Limits | None = None
        self._on_broken = on_broken
        self._eventfd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Held for each wake-up and for the close. After the close the descriptor's number may
        # belong to another file, and no wake-up may write to that file.
        self._eventfd_lock = threading.Lock()
        self._flowing = False  # False until the answer to HELLO is sent: no push may precede it
        self._watching = False  # the thread wakes up within LIMITS_DELAY_MS by itself
        self.at_once = False  # the slave has said that readers wait there
        self.start_offset = start_offset
        self.sent_offset = start_offset
        # The end of all bytes that may have been sent; no true report is beyond it.
        self.reach_offset = start_offset

    def push(self, start: int, end: int, data: bytearray | None = None) -> None:
        """Send [start, end) now if that does not block; otherwise let the thread send it."""
        if not self._lock.acquire(blocking=False):
            self.wake()
            return
        try:
            if (
                self._rest
                or self._broken
                or not self._flowing
                or self.sent_offset != start
                or end - start > self._push_bytes_max
                or (self._starts and self._starts[0] < end)
            ):
                self.wake()
                return
            size = end - start
            if data is not None:
                head = self._head(start, size)
                self.reach_offset = self.sent_offset = end
                done = self._hand_over([head, data], len(head) + size)
            else:
                with self._store.view(start, size) as view:
                    done = len(view) == size  # else the range crosses a file's end
                    if done:
                        head = self._head(start, size)
                        self.reach_offset = self.sent_offset = end
                        done = self._hand_over([head, view], len(head) + size)
            if not done:
                self.wake()
        finally:
            self._lock.release()

    def note_limits(self, reported: int | None) -> None:
        """Send the moved limits with the next data, or alone soon after.

        They are sent at once if a reader waits for them, and the slave has `reported` all that was
        sent. Else more reports are to come: they wait for AT_ONCE_MS.
        """
        if not (self.at_once and self._send_limits(reported)) and not self._watching:
            self.wake()

    def _send_limits(self, reported: int | None) -> bool:
        """Send the limits if that does not block; False if the thread must do it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            limits = self._limits()
            if limits == self._limits_sent:
                return True
            if self._rest or self._broken or not self._flowing:
                return False
            late = self._clock.monotonic_ms() - self._last_send_ms >= AT_ONCE_MS
            if reported != self.sent_offset and not late:
                return False
            self._limits_sent = limits
            frame = confirmed_frame(*limits)
            return self._hand_over([frame], len(frame))
        finally:
            self._lock.release()

    def wake(self) -> None:
        """Wake the thread; does nothing after `release`."""
        with self._eventfd_lock:
            if self._eventfd is None:
                return
            try:
                os.eventfd_write(self._eventfd, 1)
            except BlockingIOError:
                return  # the counter is full: a wake-up is pending

    def run(self) -> None:
        """Send until the link breaks or is closed."""
        eventfd = self._eventfd
        if eventfd is None:  # released before the thread started
            return
        poller = select.poll()
        poller.register(eventfd, select.POLLIN)
        try:
            while not self.stopping.is_set():
                with self._lock:
                    self._flowing = True
                    self._send_all()
                if poller.poll(self._pause_ms()):
                    os.eventfd_read(eventfd)
        except (OSError, HastoreError) as error:  # the link broke, or the log could not be read
            self._broken = True
            self._on_broken(f"sending from offset {self.sent_offset} failed: {error}")

    def release(self) -> None:
        """Close the wake-up descriptor once the thread has ended; later pushes do nothing."""
        with self._lock, self._eventfd_lock:
            self._broken = True
            if self._eventfd is not None:
                os.close(self._eventfd)
                self._eventfd = None

    def _pause_ms(self) -> float:
        now = self._clock.monotonic_ms()
        idle = now - self._last_send_ms
        self._watching = idle < ACTIVE_MS
        if self._watching:
            return LIMITS_DELAY_MS
        if self._tell_limits and self._limits() != self._limits_sent:
            return 0  # the limits have moved since they were last sent
        return max(1.0, self._heartbeat_ms - idle)

    def _send_all(self) -> None:
        if self._rest:
            rest, self._rest = self._rest, b""
            self._sock.sendall(rest)
        while not self.stopping.is_set() and self._send_frame():
            pass
        self._send_limits_or_heartbeat()

    def _send_frame(self) -> bool:
        offset, limit = self.sent_offset, self._frame_bytes_max
        while self._starts and self._starts[0] <= offset:
            self._starts.pop(0)
        # No frame crosses an epoch's start, because the slave takes over the history entry there.
        if self._starts:
            limit = min(limit, self._starts[0] - offset)
        size = min(limit, self._store.max_offset - offset)
        if size <= 0:
            return False
        size = self._send_range(offset, size, partial(self._begin_frame, offset))
        self.sent_offset = offset + size
        self._last_send_ms = self._clock.monotonic_ms()
        return size > 0

    def _begin_frame(self, offset: int, size: int) -> bytes:
        self.reach_offset = offset + size
        return self._head(offset, size)

    def _limits(self) -> Limits:
        """Return the two offsets that slaves are told: confirmed and readable."""
        return self._store.confirmed_offset, self._store.readable_offset

    def _head(self, offset: int, size: int) -> bytes:
        """Return the header of a data frame, after a CONFIRMED frame when the limits moved."""
        if self._tell_limits:
            store = self._store
            limits = store.confirmed_offset, store.readable_offset
            if limits != self._limits_sent:
                self._limits_sent = limits
                return limits_and_header(*limits, offset, size)
        return data_header(offset, size)

    def _send_limits_or_heartbeat(self) -> None:
        now = self._clock.monotonic_ms()
        idle = now - self._last_send_ms
        due = b""
        if self._tell_limits and idle >= LIMITS_DELAY_MS / 2:
            limits = self._limits()
            if limits != self._limits_sent:
                self._limits_sent = limits
                due = confirmed_frame(*limits)
        if idle >= self._heartbeat_ms:
            due = due or (confirmed_frame(*self._limits()) if self._tell_limits else b"")
            due += data_header(self.sent_offset, 0)
            self._last_send_ms = now
        if due:
            self._sock.sendall(due)
