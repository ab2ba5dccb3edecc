"""Kafka as a peer: two brokers; every message is on both before it is acknowledged.

The brokers run in KRaft mode, the first is also the controller. The client uses `acks=all`, the
topic `min.insync.replicas=2`; nothing is synced to a disk. The client is confluent-kafka
(librdkafka) in this process, like hastore's.
"""

import os
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.common import BODY_BYTES, Cost, free_ports
from benchmarks.maven import NoPeer, class_path

TOPIC = "bench"
PARTITIONS = 4
CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qk"
START_S = 60.0
# As in Kafka's own start script; the heap is large for these loads.
FLAGS = (
    *("-server", "-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
    *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"),
)
BODY = os.urandom(BODY_BYTES)


class KafkaPair:
    """Two brokers on loopback."""

    flags: Sequence[str] = FLAGS  # of the JVMs

    def __init__(self, folder: pathlib.Path) -> None:
        """Choose ports; raise NoPeer without Java or confluent-kafka."""
        try:
            import confluent_kafka
        except ImportError:
            raise NoPeer("no confluent-kafka here: pip install 'hastore[bench]'") from None
        self._client = confluent_kafka
        self._class_path = class_path("kafka")
        self.folder = folder / "kafka"
        self.folder.mkdir()
        self._ports = free_ports(3)
        self.bootstrap = f"127.0.0.1:{self._ports[0]},127.0.0.1:{self._ports[1]}"
        self._brokers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "KafkaPair":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def start(self) -> "KafkaPair":
        """Format the storage of both brokers, start them, create the topic."""
        files = [self._configure(number) for number in (1, 2)]
        tool = ("kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c")
        for running in [self._java("format", [*tool, str(file)]) for file in files]:
            if running.wait(START_S):
                raise RuntimeError(f"Kafka's storage tool failed: {self._said('format')}")
        for number, file in enumerate(files, 1):
            self._brokers[f"broker {number}"] = self._java(
                f"broker {number}", ["kafka.Kafka", str(file)]
            )
        self._create_topic()
        return self

    def _configure(self, number: int) -> pathlib.Path:
        own, controller = self._ports[number - 1], self._ports[2]
        lines = {
            "node.id": number,
            "process.roles": "broker,controller" if number == 1 else "broker",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listeners": f"PLAINTEXT://127.0.0.1:{own}"
            + (f",CONTROLLER://127.0.0.1:{controller}" if number == 1 else ""),
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{own}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": self.folder / f"store{number}",
            "num.network.threads": 2,
            "num.io.threads": 4,
            "min.insync.replicas": 2,
            "default.replication.factor": 2,
            "offsets.topic.replication.factor": 2,
            "transaction.state.log.replication.factor": 2,
            "transaction.state.log.min.isr": 2,
            "group.initial.rebalance.delay.ms": 0,
        }
        path = self.folder / f"broker{number}.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        return path

    def _java(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                ["java", *self.flags, "-cp", self._class_path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def _said(self, name: str) -> str:
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return " | ".join(text.strip().splitlines()[-5:])

    def _create_topic(self) -> None:
        from confluent_kafka.admin import AdminClient

        deadline = time.monotonic() + START_S
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        while True:
            try:
                if len(admin.list_topics(timeout=2.0).brokers) == 2:
                    break
            except self._client.KafkaException:
                pass  # the brokers are not ready yet
            if time.monotonic() > deadline:
                raise RuntimeError(f"Kafka did not start: {self._said('broker 1')}")
            time.sleep(0.1)
        self.add_topic(TOPIC)
        self.blocking(1)

    def add_topic(self, name: str) -> None:
        """Create a topic of PARTITIONS partitions on both brokers."""
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        topic = NewTopic(name, num_partitions=PARTITIONS, replication_factor=2)
        admin.create_topics([topic])[name].result(START_S)

    # ---- loads

    def _producer(self, **more: Any) -> Any:
        return self._client.Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "compression.type": "none",  # the bodies are random
                "sticky.partitioning.linger.ms": 100,  # twice the rate of 10 ms, at 64 in flight
                "socket.nagle.disable": True,
                "log_level": 0,
                **{key.replace("_", "."): value for key, value in more.items()},
            }
        )

    def blocking(self, count: int) -> list[float]:
        """Return the duration of each of `count` synchronous puts, in ms, with a warm producer."""
        producer, clock = self._producer(linger_ms=0), time.perf_counter
        failures, note = self._noting()
        took = []
        for number in range(count + count // 10 + 1):
            began = clock()
            producer.produce(TOPIC, BODY, on_delivery=note)
            producer.flush()
            if number > count // 10:
                took.append((clock() - began) * 1_000.0)
        self._check(failures)
        return took

    def in_flight(self, limit: int, count: int, linger_ms: float = 0.0) -> float:
        """Return the messages per second with at most `limit` unacknowledged messages."""
        producer = self._producer(linger_ms=linger_ms)
        failures, note = self._noting()
        pending = 0

        def delivered(failure: Any, message: Any) -> None:
            nonlocal pending
            pending -= 1
            note(failure, message)

        producer.produce(TOPIC, BODY, on_delivery=note)
        producer.flush()
        began = time.perf_counter()
        for _ in range(count):
            while pending >= limit:
                producer.poll(1.0)
            producer.produce(TOPIC, BODY, on_delivery=delivered)
            pending += 1
            producer.poll(0)
        producer.flush()
        seconds = time.perf_counter() - began
        self._check(failures)
        return count / seconds

    def batching(self, count: int) -> float:
        """Return the messages per second with a linger of 5 ms and no limit in flight."""
        producer = self._producer(
            linger_ms=5,
            batch_size=1024**2,
            queue_buffering_max_messages=1_000_000,
            queue_buffering_max_kbytes=2 * 1024**2,
        )
        failures, note = self._noting()
        producer.produce(TOPIC, BODY, on_delivery=note)
        producer.flush()
        produce = producer.produce
        began = time.perf_counter()
        for number in range(count):
            produce(TOPIC, BODY, on_delivery=note)
            if not number % 1_000:
                producer.poll(0)
        producer.flush()
        seconds = time.perf_counter() - began
        self._check(failures)
        return count / seconds

    def fill(self, topic: str, messages: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Append messages (partition, key, body) to a topic, in order."""
        producer = self._producer(linger_ms=5, batch_size=1024**2)
        failures, note = self._noting()
        for partition, key, body in messages:
            while True:
                try:
                    producer.produce(topic, body, key, partition, on_delivery=note)
                    break
                except BufferError:  # the queue of the producer is full
                    producer.poll(0.1)
            producer.poll(0)
        producer.flush()
        self._check(failures)

    @staticmethod
    def _noting() -> tuple[list[Any], Callable[[Any, Any], None]]:
        """Return a list, and a delivery callback that appends failures to it."""
        failures: list[Any] = []

        def note(failure: Any, _message: Any) -> None:
            if failure is not None:
                failures.append(failure)

        return failures, note

    @staticmethod
    def _check(failures: list[Any]) -> None:
        if failures:
            raise RuntimeError(f"Kafka: {failures[0]}")

    def costs(self) -> dict[str, Cost]:
        """Return the CPU and memory of each broker."""
        return {name: Cost.of(process.pid) for name, process in self._brokers.items()}

    def close(self) -> None:
        """Kill both brokers at once."""
        for process in self._brokers.values():
            process.kill()
        for process in self._brokers.values():
            process.wait()
        self._brokers.clear()
