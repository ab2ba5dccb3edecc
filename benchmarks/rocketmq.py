"""RocketMQ as a peer: a name server, a synchronous master, its slave, and the Java client.

    with RocketPair(folder) as rocket:
        rocket.start()
        rocket.blocking(1_000)      # ms of each put
        rocket.threads(64, 20_000)  # messages per second

Each process is a JVM on loopback. The settings are the best that were found on two cores; those
that differ from RocketMQ's defaults are listed here.
"""

import pathlib
import shutil
from typing import Any

from benchmarks.common import BODY_BYTES, Cost, free_ports
from benchmarks.jvm import Jvm
from benchmarks.maven import class_path

TOPIC = "bench"
QUEUES = 4
STORE: dict[str, Any] = {
    "mappedFileSizeCommitLog": 1024**3,
    "enableCompaction": False,  # its threads are not needed here
    "timerWheelEnable": False,
    "haTransferBatchSize": 1024**2,  # instead of 32 KiB
    "maxTransferBytesOnMessageInMemory": 1024**2,  # per reply, as much as hastore's
    "maxTransferCountOnMessageInMemory": 1_024,
    "maxTransferBytesOnMessageInDisk": 1024**2,
    "maxTransferCountOnMessageInDisk": 1_024,
    "slaveTimeout": 10_000,
    "syncFlushTimeout": 10_000,
    "diskMaxUsedSpaceRatio": 95,
    "fileReservedTime": 24 * 365,
}
BROKER: dict[str, Any] = {
    "brokerName": "rocketmq",
    "brokerIP1": "127.0.0.1",
    "brokerIP2": "127.0.0.1",
    "brokerFastFailureEnable": False,  # a busy broker queues puts instead of refusing them
    "waitTimeMillsInSendQueue": 10_000,
    "slaveReadEnable": True,
}


def broker_port() -> int:
    """Return a free port such that the port minus 2 is free too: a broker needs both."""
    ports = free_ports(8)
    return next(port for port in ports if port - 2 in ports)


def store_settings(root: pathlib.Path, role: str, ha_port: int, **more: Any) -> dict[str, Any]:
    """Return the settings of a store."""
    return {
        **STORE,
        "storePathRootDir": str(root),
        "storePathCommitLog": str(root / "commitlog"),
        "brokerRole": role,
        "haListenPort": ha_port,
        # Without these two, a SYNC_MASTER of 5.x waits for no slave.
        **({"inSyncReplicas": 2, "totalReplicas": 2} if role == "SYNC_MASTER" else {}),
        **more,
    }


class RocketStores:
    """Bare stores of a master and a slave, each in its own JVM, without broker or client."""

    def __init__(self, folder: pathlib.Path, **store: Any) -> None:
        """Choose ports; `store` overrides settings of both stores. Raises NoPeer without Java."""
        self._class_path = class_path("rocketmq")
        self.folder = folder / "rocketmq-stores"
        self.folder.mkdir()
        self._store = store
        self._ports = dict(zip(("master", "slave"), free_ports(2), strict=True))
        self.jvms: dict[str, Jvm] = {}

    def __enter__(self) -> "RocketStores":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def root(self, name: str) -> pathlib.Path:
        """Where the store of `master` or `slave` lies."""
        return self.folder / f"store-{name}"

    def start(self) -> "RocketStores":
        """Start both JVMs; no store is open yet."""
        for name in ("master", "slave"):
            self.jvms[name] = Jvm(self._class_path, self.folder, name)
        return self

    def open(self, name: str) -> None:
        """Open the store of `master` or `slave`; the slave connects to the master."""
        role = "SYNC_MASTER" if name == "master" else "SLAVE"
        settings = store_settings(self.root(name), role, self._ports[name], **self._store)
        broker = {**BROKER, "brokerId": 0 if name == "master" else 1}
        master = None if name == "master" else f"127.0.0.1:{self._ports['master']}"
        self.jvms[name].call("store.open", store=settings, broker=broker, master=master)

    def follow(self, end: int) -> dict[str, Any]:
        """Open a new, empty slave and wait until it has the master's log up to `end`.

        Returns the seconds from the connection to the last byte and until the queues are complete,
        and what both processes used since the opening.
        """
        shutil.rmtree(self.root("slave"), ignore_errors=True)
        before = self.costs()
        self.open("slave")
        result: dict[str, Any] = self.jvms["slave"].call("store.follow", end=end)
        after = self.costs()
        result["cpu_s"] = {name: after[name].cpu_s - before[name].cpu_s for name in after}
        result["costs"] = after
        self.jvms["slave"].call("store.close")
        return result

    def put(self, threads: int, count: int) -> float:
        """Return the messages per second that threads of the master's own process put."""
        seconds = self.jvms["master"].call(
            "store.put", topic=TOPIC, size=BODY_BYTES, threads=threads, count=count
        )
        return count / float(seconds)

    def costs(self) -> dict[str, Cost]:
        """Return the CPU and memory of each process."""
        return {name: jvm.cost() for name, jvm in self.jvms.items()}

    def close(self) -> None:
        """Kill both processes at once."""
        for jvm in self.jvms.values():
            jvm.kill()
        self.jvms.clear()


class RocketPair:
    """Name server, master, slave and client; without the slave if `slave` is false."""

    def __init__(
        self, folder: pathlib.Path, *, slave: bool = True, role: str = "SYNC_MASTER", **store: Any
    ) -> None:
        """Choose ports; `store` overrides store settings. Raises NoPeer without Java."""
        self._class_path = class_path("rocketmq")
        self.folder = folder / "rocketmq"
        self.folder.mkdir()
        self._role, self._store = role, store
        ports = free_ports(3)
        self._ha = {"master": ports[0], "slave": ports[1]}
        self._listen = {"master": broker_port(), "slave": broker_port()}
        self._name_server_port = ports[2]
        self.name_server = f"127.0.0.1:{ports[2]}"
        self._names = ("master", "slave") if slave else ("master",)
        self.jvms: dict[str, Jvm] = {}

    def __enter__(self) -> "RocketPair":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def master(self) -> str:
        """The address of the master's broker."""
        return f"127.0.0.1:{self._listen['master']}"

    def root(self, name: str) -> pathlib.Path:
        """Where the store of `master` or `slave` lies."""
        return self.folder / f"store-{name}"

    def jvm(self, name: str, heap: str = "1g") -> Jvm:
        """Start a JVM that has no task yet."""
        jvm = self.jvms[name] = Jvm(self._class_path, self.folder, name, heap)
        return jvm

    def start(self) -> "RocketPair":
        """Start all processes; wait until the slave is in sync and the client can put."""
        self.jvm("name server", "256m").call("namesrv.start", port=self._name_server_port)
        for name in self._names:
            self.jvm(name)
        for name in self._names:
            self.begin_broker(name)
        for name in self._names:
            self.jvms[name].finish()
        if "slave" in self._names:
            self.jvms["master"].wait_slaves(1)
        self.add_topic(TOPIC, QUEUES)
        self.start_client()
        return self

    def begin_broker(self, name: str) -> None:
        """Start the broker in its JVM; the JVM's `finish` returns when it has started."""
        role = "SLAVE" if name == "slave" else self._role
        store = store_settings(self.root(name), role, self._ha[name], **self._store)
        if name == "slave":
            store["haMasterAddress"] = f"127.0.0.1:{self._ha['master']}"
        broker = {
            **BROKER,
            "brokerId": 1 if name == "slave" else 0,
            "namesrvAddr": self.name_server,
            "listenPort": self._listen[name],
        }
        self.jvms[name].begin("broker.start", store=store, broker=broker)

    def add_topic(self, topic: str, queues: int) -> None:
        """Create a topic on all brokers."""
        for name in self._names:
            self.jvms[name].call("broker.topic", topic=topic, queues=queues)

    def start_client(self) -> None:
        """Start the producer, and wait for its first acknowledgement."""
        client = self.jvm("client")
        client.call("load.start", topic=TOPIC, size=BODY_BYTES, namesrv=self.name_server)
        client.call("load.until_acknowledged", limit_s=30)

    # ---- loads

    def blocking(self, count: int) -> list[float]:
        """Return the duration of each of `count` synchronous puts, in ms."""
        took: list[float] = self.jvms["client"].call("load.blocking", count=count)
        return took

    def threads(self, threads: int, count: int) -> float:
        """Return the messages per second of `threads` threads that put synchronously."""
        seconds = self.jvms["client"].call("load.threads", threads=threads, count=count)
        return count / float(seconds)

    def batched(self, batch: int, in_flight: int, count: int) -> float:
        """Return the messages per second of batches, sent by `in_flight` threads."""
        seconds = self.jvms["client"].call(
            "load.batched", batch=batch, threads=in_flight, count=count
        )
        return count / float(seconds)

    def asynchronous(self, in_flight: int, count: int) -> float:
        """Return the messages per second with callbacks, to an ASYNC_MASTER.

        The running master changes its role meanwhile: its store checks the role for each put.
        """
        master, client = self.jvms["master"], self.jvms["client"]
        master.call("broker.role", role="ASYNC_MASTER")
        try:
            seconds = client.call("load.asynchronous", in_flight=in_flight, count=count)
        finally:
            master.wait_slaves(1)
            master.call("broker.role", role=self._role)
        return count / float(seconds)

    def consume(self, topic: str, count: int, queues: int, batch: int) -> tuple[float, int]:
        """Read a topic from its beginning with a pull consumer; return seconds and bytes of bodies.

        One thread per queue pulls `batch` messages at a time.
        """
        answer = self.jvms["client"].call(
            "consume.pull",
            topic=topic,
            count=count,
            queues=queues,
            batch=batch,
            namesrv=self.name_server,
        )
        return float(answer["seconds"]), int(answer["bytes"])

    # ---- processes

    def kill_master(self) -> None:
        """Send SIGKILL to the master's process."""
        self.jvms.pop("master").kill()

    def costs(self) -> dict[str, Cost]:
        """Return the CPU and memory of each process."""
        return {name: jvm.cost() for name, jvm in self.jvms.items()}

    def close(self) -> None:
        """Kill all processes at once."""
        for jvm in self.jvms.values():
            jvm.kill()
        self.jvms.clear()
