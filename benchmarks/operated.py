"""Systems as an operator has them: three copies of each message, and the usual acts on them.

    with Hastore(folder) as system:
        system.start()
        system.send()        # one message, confirmed by another node
        system.crash()       # kills the node that takes puts, and does what its manual says

Each system runs as real processes on loopback, with its defaults but for what is said there. A send
that fails raises; the caller tries again (tasks.py).
"""

import asyncio
import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import yaml

from benchmarks.bare import BODY
from benchmarks.common import (
    BODY_BYTES,
    ROOT,
    Group,
    Node,
    free_ports,
    loopback_addresses,
    wait_until,
)
from benchmarks.kafka import CLUSTER_ID, FLAGS, KafkaPair
from benchmarks.loads import batched
from benchmarks.maven import NoPeer
from benchmarks.quorum import QuorumGroup
from benchmarks.rocketmq import RocketPair
from hastore.client.producer.producer import Producer

NODES = 3
SETTLE_S = 180.0
TOPIC = "tasks"
RESTORED = 9  # a number that no node of the group had


class Operated:
    """One system; what it cannot do stays as it is here."""

    name = ""
    note: dict[str, str] = {}  # by task: what was done, or why there is no figure
    planned_stops = False  # a planned switch leaves a node stopped, which `heal` starts

    def __init__(self, folder: pathlib.Path) -> None:
        """Prepare in a folder that is not there yet. Raises NoPeer if the system is missing."""
        raise NotImplementedError

    def __enter__(self) -> "Operated":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def start(self) -> None:
        """From nothing to the first confirmed message."""
        raise NotImplementedError

    def send(self) -> None:
        """Send a message; another node has it when this returns."""
        raise NotImplementedError

    def fill(self, size: int) -> None:
        """Put so many bytes of messages of 1 KiB."""
        raise NotImplementedError

    def planned(self) -> None:
        """Let another node take the puts, while all run."""
        raise NotImplementedError

    def crash(self) -> None:
        """Kill the node that takes the puts, and do at once what the operator has to."""
        raise NotImplementedError

    def heal(self) -> None:
        """Start the killed node again; return when all have all messages."""
        raise NotImplementedError

    def lose_disk(self) -> None:
        """Kill a node that takes no puts, and its disk; return when the others have noticed."""
        raise NotImplementedError

    def empty_disk(self) -> None:
        """Let a node with an empty disk come in its place; return when that has all."""
        raise NotImplementedError

    def backup(self, target: pathlib.Path) -> None:
        """Back up one node while it runs."""
        raise NotImplementedError

    def restore(self, target: pathlib.Path) -> None:
        """Start a new node from a backup, the old ones being lost; return when it serves."""
        raise NotImplementedError

    def close(self) -> None:
        """Kill all processes."""
        raise NotImplementedError


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and reap it."""
    process.kill()
    process.wait()


def until(right: Callable[[], Any], failure: type[Exception], text: str) -> None:
    """Wait until a function returns something true; while it fails so, it is not right yet."""

    def found() -> bool:
        with contextlib.suppress(failure):
            return bool(right())
        return False

    wait_until(found, SETTLE_S, text)


# ---- hastore


def command(*arguments: str) -> None:
    """Run `hastore`; raise RuntimeError if it fails."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bin" / "hastore"), *arguments],
        capture_output=True, text=True, timeout=SETTLE_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"hastore {arguments[0]}: {done.stdout} {done.stderr}")


class Hastore(Operated):
    """Three nodes of mode classic, `acks: 1`."""

    name = "hastore"
    note = {
        "planned": "`hastore flip --to N`",
        "crash": "`hastore promote`, at once",
        "empty_disk": "`hastore node replace`, a start, `hastore promote`",
        "backup": "`hastore backup take`",
        "restore": "`hastore restore --as-only`, a start",
    }

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._group = self._make()
        self._producer: Producer | None = None
        self._dead: Node | None = None
        self._more: list[Node] = []

    def _make(self) -> Group:
        return Group(self._folder, NODES)

    def start(self) -> None:
        self._group.start()
        self._producer = Producer(self._group.bootstrap)
        self.send()

    def send(self) -> None:
        assert self._producer is not None
        self._producer.send_sync(TOPIC, BODY)

    def fill(self, size: int) -> None:
        batched(self._group.bootstrap, batch=100, in_flight=8, count=size // BODY_BYTES)
        self._wait_all()

    def planned(self) -> None:
        other = next(node for node in self._group.running() if node is not self._master())
        command("flip", "-c", str(other.config), "--to", str(other.number))

    def crash(self) -> None:
        self._dead = self._master()
        heir = next(node for node in self._group.running() if node is not self._dead)
        self._dead.kill()
        command("promote", "-c", str(heir.config))

    def heal(self) -> None:
        assert self._dead is not None
        self._dead.become("SLAVE")
        self._dead.start()
        self._dead = None
        self._wait_all()

    def lose_disk(self) -> None:
        master = self._master()
        self._dead = next(node for node in self._group.running() if node is not master)
        self._dead.kill()
        shutil.rmtree(self._dead.store)

    def empty_disk(self) -> None:
        master, gone = self._master(), self._dead
        assert gone is not None
        (address,) = loopback_addresses(1).values()
        number = NODES + 1
        files = [str(node.config) for node in self._group.running()]
        places = [word for key in ("api", "ha", "http") for word in (f"--{key}", address[key])]
        command(
            "node", "replace", *files, "--node", str(gone.number), "--by", str(number), *places
        )
        node = self._new_node(number, master, role="SLAVE")
        node.start()
        self._group.replace(gone, node)
        self._dead = None
        self._wait_all()
        command("promote", "-c", str(master.config))

    def backup(self, target: pathlib.Path) -> None:
        command("backup", "take", "-c", str(self._master().config), str(target))

    def restore(self, target: pathlib.Path) -> None:
        nodes = {RESTORED: loopback_addresses(1)[1]}
        node = self._new_node(RESTORED, self._master(), nodes=nodes, role="ASYNC_MASTER")
        self._restore(target, node)
        if node.status()["max_offset"] < 1:
            raise RuntimeError("the restored node has no message")

    def _new_node(self, number: int, like: Node, **changes: Any) -> Node:
        """Return a node with an empty store and otherwise the settings of another one's file."""
        settings = yaml.safe_load(like.config.read_text())
        own = {"node": number, "store": {"root": str(self._folder / f"new-store{number}")}}
        return Node(number, self._folder, settings | own | changes)

    def _restore(self, target: pathlib.Path, node: Node) -> None:
        self._more.append(node)
        self._group.close()  # it refuses while another node of the group answers
        command("restore", str(target), "-c", str(node.config), "--as-only", "--accept-loss")
        node.start()

    def _master(self) -> Node:
        def found() -> Node | None:
            return next((node for node in self._group.running() if node.status()["writable"]), None)

        node: Node = wait_until(found, SETTLE_S, "there is no master")
        return node

    def _wait_all(self) -> None:
        due = len(self._group.running()) - 1

        def right() -> bool:
            slaves = self._master().status()["slaves"]
            return due == sum(bool(one["in_sync"]) for one in slaves)

        wait_until(right, SETTLE_S, "the slaves did not get in sync")

    def close(self) -> None:
        if self._producer is not None:
            with contextlib.suppress(Exception):
                self._producer.close(timeout_s=1.0)
        self._group.close()
        for node in self._more:
            node.kill()


class HastoreDLedger(Hastore):
    """Three nodes of mode dledger: what is acknowledged is on two disks."""

    name = "hastore, mode dledger"
    note = {
        "planned": "`hastore flip --to N`",
        "crash": "nothing: they elect",
        "empty_disk": "a start: it copies the log from its leader",
        "backup": "`hastore backup take`",
        "restore": "`hastore restore --as-only`, a start",
    }

    def _make(self) -> Group:
        return QuorumGroup(self._folder, NODES)

    def planned(self) -> None:
        leader = self._master()
        other = next(node for node in self._group.running() if node is not leader)
        command("flip", "-c", str(leader.config), "--to", str(other.number))

    def crash(self) -> None:
        self._dead = self._master()
        self._dead.kill()

    def heal(self) -> None:
        assert self._dead is not None
        self._dead.start()
        self._dead = None
        self._wait_all()

    def empty_disk(self) -> None:
        self.heal()

    def restore(self, target: pathlib.Path) -> None:
        old = self._group[1]
        node = self._new_node(old.number, old)  # only a member may be the one that is left
        self._restore(target, node)
        wait_until(lambda: node.status()["writable"], SETTLE_S, "the restored node leads nothing")

    def _wait_all(self) -> None:
        group = self._group
        assert isinstance(group, QuorumGroup)
        group.wait_in_sync(SETTLE_S)


# ---- RocketMQ


class Rocket(Operated):
    """A name server, a SYNC_MASTER and its slave; RocketMQ 5's settings of benchmarks/rocketmq.py.

    A running slave cannot become the master by a command, without a controller.
    """

    name = "RocketMQ"
    note = {
        "planned": "no command: the master is restarted",
        "crash": "the master is started again, on its disk",
        "empty_disk": "a start of the slave",
        "backup": "none: files are copied while the broker is stopped",
        "restore": "none",
    }

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir()
        self._pair = RocketPair(folder)

    def start(self) -> None:
        self._pair.start()

    def send(self) -> None:
        self._pair.jvms["client"].call("load.until_acknowledged", limit_s=90)

    def fill(self, size: int) -> None:
        self._pair.batched(32, 4, size // BODY_BYTES // 128 * 128)
        self._pair.jvms["master"].wait_slaves(1)

    def planned(self) -> None:
        self._pair.jvms["master"].call("broker.stop")
        self.crash()

    def crash(self) -> None:
        self._pair.kill_master()
        self._pair.jvm("master")
        self._pair.begin_broker("master")
        self._pair.jvms["master"].finish()

    def heal(self) -> None:
        self._pair.jvms["master"].wait_slaves(1)

    def lose_disk(self) -> None:
        self._pair.jvms.pop("slave").kill()
        shutil.rmtree(self._pair.root("slave"))

    def empty_disk(self) -> None:
        self._pair.jvm("slave")
        self._pair.begin_broker("slave")
        self._pair.jvms["slave"].finish()
        self._pair.jvms["master"].wait_slaves(1)

    def close(self) -> None:
        self._pair.close()


# ---- Kafka


class Kafka(KafkaPair, Operated):
    """Three brokers, each a controller too; three copies, `min.insync.replicas: 2`, `acks=all`."""

    name = "Kafka"
    planned_stops = True
    flags = tuple(one.replace("1g", "512m") for one in FLAGS)
    note = {
        "planned": "a clean stop of the leader's broker",
        "crash": "nothing: the controllers choose another leader",
        "empty_disk": "the disk is formatted, a start",
        "backup": "none: another cluster is kept by MirrorMaker",
        "restore": "none",
    }

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir()
        super().__init__(folder)
        ports = free_ports(2 * NODES)
        self._at = {n: (ports.pop(), ports.pop()) for n in range(1, NODES + 1)}
        self.bootstrap = ",".join(f"127.0.0.1:{own}" for own, _ in self._at.values())
        self._warm: Any = None
        self._dead = 0

    def _configure(self, number: int) -> pathlib.Path:
        own, controller = self._at[number]
        lines = {
            "node.id": number,
            "process.roles": "broker,controller",
            "controller.quorum.voters": ",".join(
                f"{n}@127.0.0.1:{port}" for n, (_, port) in self._at.items()
            ),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listeners": f"PLAINTEXT://127.0.0.1:{own},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{own}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": self.folder / f"store{number}",
            "min.insync.replicas": 2,
            "default.replication.factor": NODES,
            "offsets.topic.replication.factor": NODES,
        }
        path = self.folder / f"broker{number}.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        return path

    def start(self) -> None:  # type: ignore[override]
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        for number in self._at:
            self._format(number)
        for number in self._at:
            self._begin(number)
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        self._until(lambda: len(self._admin.list_topics(timeout=2.0).brokers) == NODES)
        topic = NewTopic(TOPIC, num_partitions=1, replication_factor=NODES)
        self._admin.create_topics([topic])[TOPIC].result(SETTLE_S)
        self._warm = self._producer(linger_ms=0, message_timeout_ms=60_000)
        self.send()

    def _format(self, number: int) -> None:
        tool = ("kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c")
        if self._java("format", [*tool, str(self._configure(number))]).wait(SETTLE_S):
            raise RuntimeError(f"Kafka's storage tool failed: {self._said('format')}")

    def _begin(self, number: int) -> None:
        file = self.folder / f"broker{number}.properties"
        self._brokers[str(number)] = self._java(f"broker {number}", ["kafka.Kafka", str(file)])

    def _until(self, right: Callable[[], bool]) -> None:
        until(right, self._client.KafkaException, "Kafka does not get there")

    def send(self) -> None:
        failures, note = self._noting()
        self._warm.produce(TOPIC, BODY, on_delivery=note)
        self._warm.flush()
        self._check(failures)

    def fill(self, size: int) -> None:
        producer = self._producer(linger_ms=5, batch_size=1024**2)
        for number in range(size // BODY_BYTES):
            while True:
                try:
                    producer.produce(TOPIC, BODY)
                    break
                except BufferError:
                    producer.poll(0.1)
            if not number % 1_000:
                producer.poll(0)
        producer.flush()
        self._wait_all()

    def _partition(self) -> Any:
        return self._admin.list_topics(TOPIC, timeout=5.0).topics[TOPIC].partitions[0]

    def _wait_all(self) -> None:
        self._until(lambda: len(self._partition().isrs) == NODES)

    def planned(self) -> None:
        self._dead = self._partition().leader
        process = self._brokers.pop(str(self._dead))
        process.terminate()
        process.wait(SETTLE_S)

    def crash(self) -> None:
        self._dead = self._partition().leader
        end(self._brokers.pop(str(self._dead)))

    def heal(self) -> None:
        self._begin(self._dead)
        self._wait_all()

    def lose_disk(self) -> None:
        leader = self._partition().leader
        self._dead = next(number for number in self._at if number != leader)
        end(self._brokers.pop(str(self._dead)))
        shutil.rmtree(self.folder / f"store{self._dead}")
        self._until(lambda: len(self._partition().isrs) == NODES - 1)

    def empty_disk(self) -> None:
        self._format(self._dead)
        self.heal()


# ---- NATS JetStream


class Nats(Operated):
    """Three servers with a stream of three copies in files; a client of its own thread."""

    name = "NATS JetStream"
    note = {
        "planned": "a request to the leader to step down",
        "crash": "nothing: they elect",
        "empty_disk": "a start: it copies the stream from its leader",
        "backup": "none tried: `nats stream backup` is a program that Debian has not",
        "restore": "none tried",
    }

    def __init__(self, folder: pathlib.Path) -> None:
        server = shutil.which("nats-server") or "/usr/sbin/nats-server"
        if not os.access(server, os.X_OK):
            raise NoPeer("no nats-server here: install Debian's package nats-server")
        try:
            import nats
        except ImportError:
            raise NoPeer("no nats-py here: pip install 'hastore[bench]'") from None
        folder.mkdir()
        self._nats, self._server, self._folder = nats, server, folder
        ports = free_ports(2 * NODES)
        self._at = {n: (ports.pop(), ports.pop()) for n in range(1, NODES + 1)}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._dead = 0

    def _begin(self, number: int) -> None:
        own, cluster = self._at[number]
        routes = [f"nats://127.0.0.1:{port}" for _, port in self._at.values()]
        file = self._folder / f"{number}.conf"
        file.write_text(
            f'server_name: n{number}\nlisten: "127.0.0.1:{own}"\n'
            f'jetstream {{ store_dir: "{self._folder / str(number)}" }}\n'
            f'cluster {{ name: c, listen: "127.0.0.1:{cluster}", routes: {routes} }}\n'
        )
        with open(self._folder / f"{number}.log", "ab") as log:
            self._processes[number] = subprocess.Popen(
                [self._server, "-c", str(file)], stdout=log, stderr=log, start_new_session=True
            )

    def _do(self, work: "Coroutine[Any, Any, Any]", timeout_s: float = 30.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _tried(self, work: "Callable[[], Coroutine[Any, Any, Any]]") -> Any:
        def attempt() -> Any:
            try:
                return [self._do(work())]
            except (self._nats.errors.Error, OSError, TimeoutError):
                return None

        (found,) = wait_until(attempt, SETTLE_S, "JetStream does not get there")
        return found

    def start(self) -> None:
        for number in self._at:
            self._begin(number)
        servers = [f"nats://127.0.0.1:{own}" for own, _ in self._at.values()]
        self._client = self._tried(
            lambda: self._nats.connect(
                servers, max_reconnect_attempts=-1, reconnect_time_wait=0.05,
                error_cb=_ignore, disconnected_cb=_ignore,
            )
        )  # fmt: skip
        self._stream = self._client.jetstream(timeout=5.0)
        self._tried(
            lambda: self._stream.add_stream(name=TOPIC, subjects=[TOPIC], num_replicas=NODES)
        )
        self.send()

    def send(self) -> None:
        self._do(self._stream.publish(TOPIC, BODY, timeout=0.5))  # and then once more

    def fill(self, size: int) -> None:
        async def work() -> None:
            for _ in range(size // BODY_BYTES // 500):
                await asyncio.gather(*(self._stream.publish(TOPIC, BODY) for _ in range(500)))

        self._do(work(), SETTLE_S)
        self._wait_all()

    def _cluster(self) -> Any:
        return self._tried(lambda: self._stream.stream_info(TOPIC)).cluster

    def _wait_all(self) -> None:
        def right() -> bool:
            found = self._cluster()
            others = found.replicas or []
            return bool(found.leader) and NODES - 1 == sum(
                bool(one.current) and not one.offline for one in others
            )

        wait_until(right, SETTLE_S, "the replicas are not current")

    def _leader(self) -> int:
        leader = wait_until(lambda: self._cluster().leader, SETTLE_S, "there is no leader")
        return int(str(leader).removeprefix("n"))

    def planned(self) -> None:
        self._do(self._client.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{TOPIC}", b"", timeout=5.0))

    def crash(self) -> None:
        self._dead = self._leader()
        end(self._processes.pop(self._dead))

    def heal(self) -> None:
        self._begin(self._dead)
        self._wait_all()

    def lose_disk(self) -> None:
        leader = self._leader()
        self._dead = next(number for number in self._at if number != leader)
        end(self._processes.pop(self._dead))
        shutil.rmtree(self._folder / str(self._dead))

        def noticed() -> bool:
            others = {one.name: one for one in self._cluster().replicas or []}
            lost = others.get(f"n{self._dead}")
            return lost is None or bool(lost.offline) or not lost.current

        wait_until(noticed, SETTLE_S, "the leader takes the dead server for current")

    def empty_disk(self) -> None:
        self.heal()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._do(self._client.close(), 5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        for process in self._processes.values():
            end(process)


async def _ignore(*_: Any) -> None:
    return None


# ---- Redis Streams


class Redis(Operated):
    """A master and two replicas with append-only files; a send is XADD, then WAIT for a replica."""

    name = "Redis Streams"
    note = {
        "planned": "`FAILOVER TO`",
        "crash": "`REPLICAOF NO ONE`, `REPLICAOF`, at once; Sentinel would do it",
        "empty_disk": "a start: a whole synchronisation",
        "backup": "`redis-cli --rdb`",
        "restore": "a start with that file",
    }

    def __init__(self, folder: pathlib.Path) -> None:
        if shutil.which("redis-server") is None:
            raise NoPeer("no redis-server here: install Debian's package redis-server")
        try:
            import redis
        except ImportError:
            raise NoPeer("no redis here: pip install 'hastore[bench]'") from None
        folder.mkdir()
        self._redis, self._folder = redis, folder
        self._ports = dict(enumerate(free_ports(NODES + 1), 1))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._clients = {
            number: redis.Redis(
                port=port, socket_timeout=30.0, socket_connect_timeout=2.0,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),  # the caller tries again
            )
            for number, port in self._ports.items()
        }
        self._master, self._dead = 1, 0

    def _begin(self, number: int, master: int | None, *more: str) -> None:
        home = self._folder / str(number)
        home.mkdir(exist_ok=True)
        line = ["redis-server", "--port", str(self._ports[number]), "--bind", "127.0.0.1"]
        line += ["--dir", str(home), "--save", "", *(more or ("--appendonly", "yes"))]
        line += ["--repl-diskless-sync-delay", "0"]
        if master is not None:
            line += ["--replicaof", "127.0.0.1", str(self._ports[master])]
        with open(self._folder / f"{number}.log", "ab") as log:
            self._processes[number] = subprocess.Popen(
                line, stdout=log, stderr=log, start_new_session=True
            )
        self._until(lambda: self._clients[number].ping())

    def _until(self, right: Callable[[], Any]) -> None:
        until(right, self._redis.exceptions.RedisError, "Redis does not get there")

    def start(self) -> None:
        for number in range(1, NODES + 1):
            self._begin(number, None if number == 1 else 1)
        self._wait_all()
        self.send()

    def send(self) -> None:
        """Raise if the master is not there, or no replica has it within a second."""
        client = self._clients[self._master]
        client.xadd(TOPIC, {"b": BODY})
        if not client.wait(1, 1_000):
            raise RuntimeError("no replica has confirmed it")

    def fill(self, size: int) -> None:
        client = self._clients[self._master]
        for _ in range(size // BODY_BYTES // 1_000):
            pipe = client.pipeline(transaction=False)
            for _ in range(1_000):
                pipe.xadd(TOPIC, {"b": BODY})
            pipe.execute()
        client.wait(NODES - 1, 60_000)

    def _wait_all(self) -> None:
        def right() -> bool:
            found = self._clients[self._master].info("replication")
            ends = [
                one for key, one in found.items() if key.startswith("slave") and key[5:].isdigit()
            ]
            return (
                found["role"] == "master"
                and len(ends) == NODES - 1
                and all(
                    one["state"] == "online" and one["offset"] >= found["master_repl_offset"]
                    for one in ends
                )
            )

        self._until(right)

    def planned(self) -> None:
        heir = next(n for n in self._processes if n != self._master)
        client = self._clients[self._master]
        client.execute_command("FAILOVER", "TO", "127.0.0.1", self._ports[heir])
        self._until(lambda: self._clients[heir].role()[0] == b"master")
        self._master = heir

    def crash(self) -> None:
        self._dead = self._master
        end(self._processes.pop(self._dead))
        heir, *others = self._processes
        self._clients[heir].replicaof("NO", "ONE")
        for one in others:
            self._clients[one].replicaof("127.0.0.1", str(self._ports[heir]))
        self._master = heir

    def heal(self) -> None:
        self._begin(self._dead, self._master)
        self._wait_all()

    def lose_disk(self) -> None:
        self._dead = next(number for number in self._processes if number != self._master)
        end(self._processes.pop(self._dead))
        shutil.rmtree(self._folder / str(self._dead))
        self._until(
            lambda: self._clients[self._master].info("replication")["connected_slaves"] == NODES - 2
        )

    def empty_disk(self) -> None:
        self.heal()

    def backup(self, target: pathlib.Path) -> None:
        target.mkdir()
        port = str(self._ports[self._master])
        subprocess.run(
            ["redis-cli", "-p", port, "--rdb", str(target / "dump.rdb")],
            check=True, capture_output=True, timeout=SETTLE_S,
        )  # fmt: skip

    def restore(self, target: pathlib.Path) -> None:
        number = NODES + 1
        home = self._folder / str(number)
        home.mkdir()
        shutil.copy(target / "dump.rdb", home)
        self._begin(number, None, "--appendonly", "no")
        self._until(lambda: self._clients[number].xlen(TOPIC) > 0)
        end(self._processes.pop(number))

    def close(self) -> None:
        for process in self._processes.values():
            end(process)
        self._processes.clear()


SYSTEMS: tuple[type[Operated], ...] = (
    Hastore,
    HastoreDLedger,
    Rocket,
    Kafka,
    Nats,
    Redis,
)
