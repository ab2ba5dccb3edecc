"""The demo's producer: sends every flight, and records acknowledgements and the longest gap."""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from hastore.client.producer.producer import Producer
from hastore.client.results import SendResult
from hastore.demo.data import Flight
from hastore.demo.proof import Acknowledged
from hastore.errors import HastoreError

DELIVERY_TIMEOUT_S = 120.0  # longer than any flip, so the producer retries until the flip is over


@dataclass(frozen=True, slots=True)
class Silence:
    """The longest time without an acknowledgement; `after` is the number of earlier ones."""

    seconds: float
    after: int


class FlightProducer(threading.Thread):
    """Send flights in a thread of its own, many at a time; each waits for the slave too."""

    def __init__(
        self, addresses: list[str], topic: str, flights: Iterable[Flight], rows: int
    ) -> None:
        super().__init__(name="flights", daemon=True)
        self.acknowledged: list[Acknowledged | None] = [None] * rows
        self.levels: dict[str, int] = {}
        self.failure: Exception | None = None
        self.count = 0  # acknowledged so far
        self.silence = Silence(0.0, 0)
        self._topic = topic
        self._flights = flights
        self._addresses = addresses
        self._last_ack = 0.0
        self._held_row = -1
        self._go_on = threading.Event()
        self._moved = threading.Condition()

    def run(self) -> None:
        """Send all flights and wait until all are settled; keep a failure in `failure`."""
        try:
            with Producer(
                self._addresses, acks="all", delivery_timeout_s=DELIVERY_TIMEOUT_S
            ) as producer:
                self._last_ack = time.monotonic()
                for flight in self._flights:
                    if flight.row == self._held_row:
                        self._go_on.wait()
                        self._last_ack = time.monotonic()  # nothing was sent meanwhile
                    future = producer.send(self._topic, flight.body, key=flight.key)
                    future.add_done_callback(self._settle(flight.row, flight.digest))
                    if self.failure is not None:
                        break
                producer.flush()
        except HastoreError as failure:
            self._fail(failure)

    def hold_at(self, row: int) -> threading.Event:
        """Send the flights from `row` on only when the returned event is set."""
        self._held_row = row
        return self._go_on

    def wait_for(self, count: int, on_progress: Callable[[int], None]) -> None:
        """Wait until `count` messages are acknowledged; raises the producer's failure."""
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self.count >= count or self.failure, timeout=0.2)
            on_progress(self.count)
            if self.failure is not None:
                raise self.failure
            if self.count >= count:
                return
            if not self.is_alive():
                raise HastoreError(f"the producer ended after {self.count} of {count} messages")

    def _settle(self, row: int, digest: int) -> Callable[[Future[SendResult]], None]:
        def settled(future: Future[SendResult]) -> None:
            failure = future.exception()
            if failure is not None:
                self._fail(HastoreError(f"row {row} was not acknowledged: {failure}"))
                return
            result = future.result()
            assert result.offset is not None  # every acknowledged put has an offset
            now = time.monotonic()
            if now - self._last_ack > self.silence.seconds:
                self.silence = Silence(now - self._last_ack, self.count)
            self._last_ack = now
            self.acknowledged[row] = Acknowledged(result.offset, digest)
            self.levels[result.level] = self.levels.get(result.level, 0) + 1
            self.count += 1
            if self.count % 256 == 0 or self.count == len(self.acknowledged):
                with self._moved:
                    self._moved.notify_all()

        return settled

    def _fail(self, failure: Exception) -> None:
        with self._moved:
            self.failure = self.failure or failure
            self._moved.notify_all()
