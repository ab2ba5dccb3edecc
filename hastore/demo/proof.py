"""The demo's proofs, and its producer, which records the history that they need."""

import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from hastore.client.messages import SendResult
from hastore.client.producer.producer import Producer
from hastore.demo.flights import Flight
from hastore.errors import HastoreError
from hastore.history.recorder import Recorder
from hastore.record.codec import check_record
from hastore.store.offline.reader import StoreReader

_CHUNK = 1 << 20


class ProofError(HastoreError):
    """A proof failed, so the demo fails."""


def prove_history(
    history: pathlib.Path,
    store: pathlib.Path,
    rows: int,
    kills: int,
    on_progress: Callable[[int], None],
) -> int:
    """Check what the producer has seen, as `hastore check` does, beside the log of a store.

    Returns the number of messages. Raises ProofError for a broken promise, such as a message that
    is missing, duplicate, changed, unknown or not at its acknowledged offset; and unless all `rows`
    were acknowledged, by more than one master, and `kills` nodes were killed before the last one.
    """
    from hastore.history.files import Lines, check  # here: it needs numpy

    lines = Lines()
    report = check(
        [history], store=store, expect=("flip", "kill"), lines=lines, on_progress=on_progress
    )
    if report.vacuous:
        raise ProofError(f"{history} proves nothing: {report.vacuous[0]}")
    if report.findings:
        raise ProofError(report.findings[0].named(lines.name))
    if report.faults["kill"] != kills:
        met = report.faults["kill"]
        raise ProofError(f"{history} has {met} of {kills} kills: all was sent before the others")
    found = report.counts["acknowledged_and_found"]
    if not found == report.counts["records"] == rows:
        raise ProofError(f"{found} messages are found, {rows} were sent")
    return found


def prove_identical_logs(left: pathlib.Path, right: pathlib.Path) -> int:
    """Compare the commit logs of two unused stores byte by byte; return the bytes compared.

    Raises ProofError with the offset of the first difference.
    """
    with StoreReader(str(left)) as one, StoreReader(str(right)) as other:
        ends = one.limit_offset, other.limit_offset
        if ends[0] != ends[1]:
            raise ProofError(f"the logs end at {ends[0]} and {ends[1]}")
        files = [(file.start, file.path, file.size) for file in one.files()]
        there = {file.start: file.path for file in other.files()}
    total = 0
    for start, path, size in files:
        end = min(size, ends[0] - start)
        if end <= 0:
            break  # a file that was allocated ahead and is still empty
        if start not in there:
            raise ProofError(f"{right} has no file that starts at {start}")
        for position, (a, b) in zip(
            range(0, end, _CHUNK),
            zip(_chunks(path, end), _chunks(there[start], end), strict=True),
            strict=True,
        ):
            if a != b:
                at = next(i for i in range(len(a)) if a[i : i + 1] != b[i : i + 1])
                raise ProofError(f"the logs differ at offset {start + position + at}")
        total += end
    return total


def prove_identical_queues(left: pathlib.Path, right: pathlib.Path, topic: str) -> int:
    """Compare a topic's consume queues, which each node builds by itself; return the unit count."""
    units = 0
    with StoreReader(str(left)) as one, StoreReader(str(right)) as other:
        ranges = one.topics()[topic]
        if ranges != other.topics()[topic]:
            raise ProofError(f"the queues of {topic} differ: {ranges}, {other.topics()[topic]}")
        for queue_id, (low, high) in ranges.items():
            a = one.queue_units(topic, queue_id)
            b = other.queue_units(topic, queue_id)
            if list(a.offsets) != list(b.offsets) or list(a.sizes) != list(b.sizes):
                raise ProofError(f"queue {queue_id} of {topic} differs")
            units += high - low
    return units


def count_archived(store: pathlib.Path) -> tuple[int, int]:
    """Return how many records the node has cut off its log, and how many bytes they have."""
    records = size = 0
    folder = store / "rescued"
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if path.is_file() and path.name.isdigit():
            data = path.read_bytes()
            start = int(path.name)
            for _, length in _records(data, start):
                records += 1
                size += length
    return records, size


def _records(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    at = next((i for i in range(len(data)) if data[i]), len(data)) if data[:1] == b"\0" else 0
    at = max(0, at - 3)  # the first three bytes of a record's size may be zeros
    while at < len(data):
        length = check_record(data, at, len(data), start + at)
        if not length:
            at += 1
            continue
        yield at, length
        at += length


def _chunks(path: str, end: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        left = end
        while left > 0:
            data = file.read(min(_CHUNK, left))
            if not data:
                raise ProofError(f"{path} ends early")
            left -= len(data)
            yield data


# -- the producer ----------------------------------------------------------------------------------

DELIVERY_TIMEOUT_S = 120.0  # longer than any flip, so the producer retries until the flip is over


@dataclass(frozen=True, slots=True)
class Silence:
    """The longest time without an acknowledgement; `after` is the number of earlier ones."""

    seconds: float
    after: int


class FlightProducer(threading.Thread):
    """Send flights in a thread of its own, many at a time; each waits for the slave too."""

    def __init__(
        self,
        addresses: list[str],
        topic: str,
        flights: Iterable[Flight],
        rows: int,
        recorder: Recorder,
    ) -> None:
        """Record what is sent with `recorder`, which is closed when all is settled."""
        super().__init__(name="flights", daemon=True)
        self.recorder = recorder
        self.levels: dict[str, int] = {}
        self.failure: Exception | None = None
        self.count = 0  # acknowledged so far
        self.silence = Silence(0.0, 0)
        self._topic = topic
        self._flights = flights
        self._rows = rows
        self._addresses = addresses
        self._last_ack = 0.0
        self._held: dict[int, threading.Event] = {}  # by row
        self._moved = threading.Condition()

    def run(self) -> None:
        """Send all flights and wait until all are settled; keep a failure in `failure`."""
        try:
            own = Producer(self._addresses, acks="all", delivery_timeout_s=DELIVERY_TIMEOUT_S)
            with self.recorder, self.recorder.producer(own, acks="all") as producer:
                self._last_ack = time.monotonic()
                for flight in self._flights:
                    if (go_on := self._held.get(flight.row)) is not None:
                        go_on.wait()
                        self._last_ack = time.monotonic()  # nothing was sent meanwhile
                    future = producer.send(self._topic, flight.body, key=flight.key)
                    future.add_done_callback(self._settle(flight.row))
                    if self.failure is not None:
                        break
                producer.flush()
        except HastoreError as failure:
            self._fail(failure)

    def hold_at(self, row: int) -> threading.Event:
        """Send the flights from `row` on only when the returned event is set."""
        return self._held.setdefault(row, threading.Event())

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

    def _settle(self, row: int) -> Callable[[Future[SendResult]], None]:
        def settled(future: Future[SendResult]) -> None:
            failure = future.exception()
            if failure is not None:
                self._fail(HastoreError(f"row {row} was not acknowledged: {failure}"))
                return
            result = future.result()
            now = time.monotonic()
            if now - self._last_ack > self.silence.seconds:
                self.silence = Silence(now - self._last_ack, self.count)
            self._last_ack = now
            self.levels[result.level] = self.levels.get(result.level, 0) + 1
            self.count += 1
            if self.count % 256 == 0 or self.count == self._rows:
                with self._moved:
                    self._moved.notify_all()

        return settled

    def _fail(self, failure: Exception) -> None:
        with self._moved:
            self.failure = self.failure or failure
            self._moved.notify_all()
