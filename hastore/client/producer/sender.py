"""The producer's thread: drives the core, and lets callers wait for it.

Nothing here or below refers to the Producer: when that is dropped the thread goes on with what is
under way until it is settled, at the latest by the delivery timeout, and ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from hastore.client.connections.transport import make_transport
from hastore.client.producer.futures import SendFuture
from hastore.client.producer.io_driver import IoDriver
from hastore.client.producer.lockless_condition import LocklessCondition
from hastore.client.producer.send_core import SendCore
from hastore.client.producer.window import SendOptions, Window
from hastore.clock import Clock
from hastore.errors import ClientError

log = logging.getLogger(__name__)


class Sender:
    """Send what is admitted to the window, in a thread of its own or a caller's."""

    def __init__(
        self, addresses: tuple[str, ...], options: SendOptions, window: Window, clock: Clock
    ) -> None:
        self._window = window
        addresses, self._transport = make_transport(addresses, clock)
        self._transport.open(addresses)
        self.core = SendCore(addresses, options, window, self._transport)
        self._progress = LocklessCondition()  # rung when the window has moved or a master was found
        self._driver = IoDriver(self._transport, self.core, clock, self._progress)
        self._forked = False
        self.wake = self._driver.wake  # to what was admitted; any thread may call this
        self._thread = threading.Thread(target=self._run, name="ProducerSender", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def drive_from_caller(self, future: SendFuture[Any]) -> None:
        """See to it in the calling thread, which waits for this future anyway; may return early."""
        self._driver.drive_from_caller(future)
        if not future.done():
            self._refuse_own_thread()

    def wait_room(self, count: int) -> None:
        """Wait until the window has room or is closed."""
        window = self._window

        def has_room() -> bool:
            with window.lock:
                return window.closed or window.has_room(count)

        self._wait_for(has_room)

    def wait_found(self, timeout_s: float) -> bool:
        """Wait until a master was found; False when the time is up first."""
        self._wait_for(lambda: self.core.master_found or self._window.closed, timeout_s)
        return self.core.master_found

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until all that was admitted so far is settled; False when the time is up first."""
        seq = self._window.next_seq
        self.core.flush_to = max(self.core.flush_to, seq)
        self.wake()
        return self._wait_for(lambda: self._window.has_settled(seq), timeout_s)

    def close_window(self) -> None:
        """Let nothing in any more; who waits for room is told so."""
        self._window.close()
        self._progress.notify_all()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Give up what is unsettled, end the thread and wait for it, at most `timeout_s`."""
        self._driver.stopped = True
        self._driver.wake_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def detach(self) -> str:
        """Let the thread end once all is settled; says what is not. Takes no lock, waits not."""
        if self._forked:
            return ""
        lost = self.core.unacknowledged()
        self._driver.detached = True
        self.core.flush_to = float("inf")
        self._driver.wake_all()
        return lost

    def abandon(self) -> None:
        """Close the descriptors in a forked child, which has no thread; takes no lock."""
        self._driver.stopped = self._forked = True
        self.core.abandon()
        self._transport.abandon()
        self._driver.abandon()

    def _wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        if not is_true():
            self._refuse_own_thread()
        return self._progress.wait_for(is_true, timeout_s)

    def _refuse_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise ClientError("a Future's callback runs in the thread that it would wait for")

    def _run(self) -> None:
        """Send and settle until stopped, or left with nothing under way."""
        try:
            self._driver.run(self._notify)
        except BaseException as failure:  # told to all who wait and all who come: nobody hangs
            log.exception("ProducerSender died")
            self._conclude(failure)
        else:
            self._conclude(None)

    def _conclude(self, failure: BaseException | None) -> None:
        """Settle what is left, with the thread's failure if that ended it."""
        if failure is not None:
            self._driver.stopped = True  # a caller at the wheel lets go of it
            self._driver.wake_all()
        try:
            with self._driver.driving:
                if failure is None:
                    self.core.end("the producer was closed")
                else:
                    self.core.fail(failure)
                self._transport.close()
        finally:
            self._notify()
            self._progress.notify_all()

    def _notify(self) -> None:
        """Tell who waits for what has ended; here, where no signal comes, lest one be forgotten."""
        ended = self.core.ended
        while ended:
            try:
                ended.popleft().notify()
            except BaseException:  # of a callback: the caller's code ends no thread of ours
                log.exception("a Future's callback failed")
