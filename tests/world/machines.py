"""Machines that run a node each: the product's own node classes, configurations and files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping

import msgspec

from hastore.config.model import (
    AckPoint,
    Config,
    DLedgerConfig,
    Flush,
    HAConfig,
    LogConfig,
    Mode,
    NodeAddress,
    RemotingConfig,
    RetentionConfig,
    Role,
    StoreConfig,
)
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.errors import HastoreError
from hastore.server import dledger_node
from hastore.server.base_node import BaseNode
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from tests.world import zookeeper
from tests.world.disk import Disk
from tests.world.network import Network
from tests.world.orders import Orders
from tests.world.scheduler import Host, Scheduler

ROOT = "/store"
SECRET = "/etc/secret"
FILE_BYTES = 16 * 1024
INDEX_BYTES = 32 * 256  # of a file of a DLedger index: DLedger's own size is 160 MB


def make_small_files() -> None:
    """Let nodes of mode dledger make small index files, which no configuration sets."""
    dledger_node.DLedgerMmapFileStore = functools.partial(  # type: ignore[misc,assignment]
        DLedgerMmapFileStore, index_file_bytes=INDEX_BYTES
    )


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a group is: its mode, size, and what its puts wait for."""

    mode: Mode = Mode.CLASSIC
    nodes: int = 2
    acks: int = 1
    ack_point: AckPoint = AckPoint.WRITTEN
    flush: Flush = Flush.ASYNC
    secret: bool = True  # the links have MACs
    registry: bool = False  # the roles are in ZooKeeper


def addresses(count: int) -> dict[int, NodeAddress]:
    return {
        n: NodeAddress(
            api=f"tcp://127.0.0.{n}:10911", ha=f"127.0.0.{n}:10912", http=f"127.0.0.{n}:80"
        )
        for n in range(1, count + 1)
    }


def make_config(
    shape: Shape, node: int, role: Role | None, nodes: Mapping[int, NodeAddress]
) -> Config:
    """Return the configuration of a node: files are small, so that each walk makes many."""
    return Config(
        cluster="world", group="g", node=node, mode=shape.mode, role=role, acks=shape.acks,
        nodes=dict(nodes), registry=zookeeper.URL if shape.registry else None,
        store=StoreConfig(
            root=ROOT, commitlog_file_size=FILE_BYTES, flush=shape.flush,
            flush_interval_ms=200, max_message_size=4096, consume_queue_units=64, index_slots=64,
            index_entries=128, default_queues=2, scrub_rate=64 * 1024,
            retention=RetentionConfig(hold_ms=5_000, check_interval_ms=1_000),
        ),
        ha=HAConfig(
            ack_point=shape.ack_point, heartbeat_interval_ms=1_000, housekeeping_interval_ms=4_000,
            hello_timeout_ms=2_000, slave_timeout_ms=1_500,
            secret_file=SECRET if shape.secret else None,
        ),
        dledger=DLedgerConfig(allow_async_flush=shape.flush is Flush.ASYNC),
        remoting=RemotingConfig(
            transaction_timeout_ms=2_000, transaction_check_interval_ms=3_000,
            transaction_check_max=1_000,
        ),
        log=LogConfig(slow_threshold_ms=None),
    )  # fmt: skip


class Machine(Host):
    """A host with a disk, and a node on it while it runs."""

    def __init__(
        self, world: Scheduler, network: Network, number: int, config: Config, seed: int
    ) -> None:
        super().__init__(world, f"n{number}", f"127.0.0.{number}")
        self.number = number
        self.network = network
        self.disk = Disk(f"{seed} n{number}")
        self.config = config
        self.node: BaseNode | None = None
        self.orders = Orders(world)
        if config.role is not None:
            self.orders.now(config.role)
        self.problem: str | None = None  # why the last start or run has ended
        self.running = False  # a process runs, though its node may still start
        self._told: Config | None = None
        self._stops = False
        network.join(self)
        self.prepare_disk()

    def prepare_disk(self) -> None:
        """Put on a new disk what an operator puts there."""
        self.disk.make_dirs("/etc")
        with contextlib.closing(self.disk.open(SECRET, create=True)) as file:
            file.pwrite(b"the secret of this group", 0)
        self.disk.settle(SECRET, None)

    # -- what an operator does

    def set_config(self, **changed: object) -> None:
        """Edit the node's file; a running node reads it soon."""
        self.config = msgspec.structs.replace(self.config, **changed)
        if self.node is not None:
            self.node.wake()

    def start(self) -> None:
        """Start a process; an earlier one must have ended."""
        if self.running:
            return
        self.powered = self.running = True
        self._stops, self._told, self.problem = False, self.config, None
        self.world.spawn(self, "main", self._main)

    def stop(self) -> None:
        """Ask the process to end cleanly."""
        self._stops = True

    @property
    def needs_restart(self) -> bool:
        """Whether its store has closed after a failure: its status asks for a restart."""
        return self.node is not None and self.node.backend.store.broken_reason is not None

    def kill(self) -> None:
        """End the process at once; what it has written stays in the page cache."""
        self.world.end_process(self)
        self.network.process_ends(self)
        self._ended()

    def cut_power(self) -> None:
        """End the machine; `start` boots it, with what was on the disk."""
        self.world.end_process(self)
        self.powered = False
        self.network.power_ends(self)
        self._ended()
        self.disk = self.disk.after_power_cut()

    def mount_anew(self) -> None:
        """End the process with its file system, which the kernel shuts down; it is mounted again.

        What was not synced is lost, and the machine does not boot.
        """
        self.kill()
        self.disk = self.disk.after_mount()

    def _ended(self) -> None:
        self.disk.process_ended()
        self.node, self.running = None, False

    # -- the process

    def _read_config(self) -> Config | None:
        if self.config is self._told:
            return None
        self._told = self.config
        return self.config

    def _main(self) -> None:
        make = Node if self.config.mode is Mode.CLASSIC else DLedgerNode
        try:
            self.orders.read_s = self.world.now
            node = make(self.config, self._read_config, fs=self.disk)
            if isinstance(node, Node):
                node.roles._on_change = self.orders.watch(node.roles._on_change)
            node.start()
            self.node = node
            while not node.failed.is_set() and not self._stops:
                self.world.sleep(0.1)
            self.problem = node.failure
            node.stop()
        except (HastoreError, OSError) as failure:
            self.problem = f"{type(failure).__name__}: {failure}"
        self.kill()
