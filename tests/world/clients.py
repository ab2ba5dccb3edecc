"""The clients of a walk: the product's own Producer, Consumer and RangeReader, each on its host."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from hastore.client.consumer.consumer import Consumer
from hastore.client.consumer.range_reader import RangeReader
from hastore.client.producer.producer import Producer
from hastore.errors import (
    ClientError,
    CorruptRecordError,
    HastoreError,
    NotStoredError,
    PositionLostError,
)
from hastore.history.recorder import Row
from hastore.record.codec import decode_record
from tests.world.history import TOPIC, History, Sent
from tests.world.judged import Notes
from tests.world.network import Network
from tests.world.scheduler import Host, Scheduler

GROUP = "group"
GIVE_UP_S = 20.0  # of a reader of ranges; a node that runs has damaged bytes of another by then


class ClientHost(Host, ABC):
    """A host with one client, whose process may be killed and started again."""

    sends = False  # it is asked to stop before those that only read

    def __init__(
        self, world: Scheduler, network: Network, name: str, address: str, history: History,
        notes: Notes, boot: Sequence[str], seed: int,
    ) -> None:  # fmt: skip
        super().__init__(world, name, address)
        network.join(self)
        self.network = network
        self.history = history
        self.notes = notes
        self.boot = list(boot)
        self.chance = random.Random(f"{name} {seed}")
        self.stopping = False
        self.finished = True
        self.run_number = 0

    def start(self) -> None:
        self.run_number += 1
        self.finished = False
        self.world.spawn(self, "client", self._guarded)

    @property
    def run_name(self) -> str:
        """The name of this run of the client."""
        return f"{self.name}.{self.run_number}"

    def kill(self) -> None:
        self.world.end_process(self)
        self.network.process_ends(self)
        self.finished = True

    def _guarded(self) -> None:
        self.work()
        self.finished = True

    @abstractmethod
    def work(self) -> None:
        """Be the client until `stopping` is set."""

    def pause(self, mean_s: float) -> None:
        self.world.sleep(mean_s * self.chance.random() * 2)


class ProducerHost(ClientHost):
    """Sends messages, several in flight; each is sent once and repeated by the client itself."""

    sends = True
    rate_s = 0.15

    def work(self) -> None:
        producer = self.notes.producer(
            Producer(self.boot, delivery_timeout_s=15.0), self.run_name
        )
        number = 0
        while not self.stopping:
            number += 1
            body = Sent(self.name, self.run_number, number).body
            self.history.note_sent(body)
            try:
                future = producer.send(TOPIC, body, queue=self.chance.randrange(2))
            except HastoreError:
                self.history.refused.add(body)
                self.pause(1.0)
                continue
            future.add_done_callback(partial(self._ended, body))
            self.pause(self.rate_s)
        producer.close(20.0)

    def _ended(self, body: bytes, future: Any) -> None:
        failure = future.exception()
        if failure is None:
            self.history.note_acked(body, future.result())
        elif isinstance(failure, NotStoredError):
            self.history.refused.add(body)
        elif not isinstance(failure, ClientError):
            self.history.violate(f"{self.name}: a send ended with {failure!r}")


class MemberHost(ClientHost):
    """A member of a consumer group, which shares the queues with the other members."""

    def work(self) -> None:
        consumer: Any = self.notes.consumer(
            Consumer(TOPIC, self.boot, group=GROUP, share=True, timeout_s=5.0, on_lost="common"),
            self.run_name,
        )
        while not self.stopping:
            try:
                for message in consumer.poll(20, timeout_s=0.5):
                    self.history.note_delivered(self.name, message)
                if self.chance.random() < 0.5:
                    places = {q: p.queue_offset for (_, q), p in consumer.positions().items()}
                    consumer.commit()
                    for queue, offset in places.items():
                        self.history.note_committed(queue, offset)
            except (HastoreError, TimeoutError) as failure:
                self._note(failure)
                self.pause(0.3)
            self.pause(0.1)
        try:
            consumer.close()
        except HastoreError as failure:
            self._note(failure)

    def _note(self, failure: Exception) -> None:
        if isinstance(failure, PositionLostError):
            self.history.lost_positions.append(f"{self.name}: {failure}")


class ReaderHost(ClientHost):
    """Reads every message of one replica, in order."""

    def work(self) -> None:
        consumer: Any = self.notes.consumer(
            Consumer(TOPIC, self.boot, start="earliest", timeout_s=5.0), self.run_name
        )
        last: dict[int, int] = {}
        while not self.stopping:
            try:
                for message in consumer.poll(20, timeout_s=0.5):
                    queue, offset = message.queue_id, message.queue_offset
                    self.history.note_read(self.name, queue, offset, message.body)
                    if queue in last and offset != last[queue] + 1 and self.history.strict:
                        self.history.violate(
                            f"{self.name} read {offset} of queue {queue} after {last[queue]}"
                        )
                    last[queue] = offset
            except PositionLostError as lost:
                self.history.lost_positions.append(f"{self.name}: {lost}")
                last.clear()
                self._from_start(consumer)
            except (HastoreError, TimeoutError):
                self.pause(0.3)
            self.pause(0.1)
        consumer.close()

    def _from_start(self, consumer: Any) -> None:
        try:
            consumer.seek_to_earliest()
        except (HastoreError, TimeoutError):
            self.pause(0.5)


class RangeHost(ClientHost):
    """Reads ranges of queues in bulk, as Spark's tasks do."""

    def work(self) -> None:
        while not self.stopping:
            self.pause(1.5)
            known = sorted(self.history.at)
            if not known:
                continue
            queue, last = self.chance.choice(known)
            first = max(0, last - self.chance.randrange(8))
            try:
                self._read(queue, first, last + 1)
            except (HastoreError, TimeoutError, OSError) as failure:
                alone = self.world.now - self.history.refused_s < 2 * GIVE_UP_S
                mends = self.history.strict and not self.history.expires and not alone
                if mends and isinstance(failure, CorruptRecordError):
                    self.history.violate(f"{self.name}: {failure}")

    def _read(self, queue: int, first: int, end: int) -> None:
        reader = RangeReader(tuple(self.boot), TOPIC, queue, first, end, give_up_s=GIVE_UP_S)
        rows: list[Row] = []
        for chunk in reader.chunks():
            sizes, at = chunk.sizes, 0
            for i in range(0, len(sizes), 4):
                record = decode_record(chunk.payload, at)
                at += int.from_bytes(sizes[i : i + 4])
                self.history.note_read(self.name, queue, record.queue_offset, record.body)
                rows.append((record.queue_offset, None, record.body))
        self.history.ranges += 1
        self.notes.rows(TOPIC, queue, first, end, rows)
