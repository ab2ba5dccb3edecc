"""Nodes of a DLedger group in this process: real drivers, stores and loopback sockets."""

from __future__ import annotations

import contextlib
import pathlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config, Flush
from hastore.dledger.core.events import Settings, Settled
from hastore.dledger.driver.driver import DLedgerDriver
from hastore.dledger.driver.joining import refuse_lost_identity
from hastore.dledger.driver.requests import RequestFile
from hastore.dledger.links.channel import LinkTimes
from hastore.dledger.links.peer_links import PeerMember
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.errors import NotStoredError
from hastore.fs.filesystem import REAL, FileSystem
from hastore.ha.master.group_transfer import GroupTransferService, Need
from hastore.ha.node.node_state import NodeState
from hastore.record.codec import Host, build_record
from hastore.server.callbacks import connect_driver
from hastore.service import raise_failure
from tests.dledger.links.groups import make_config
from tests.ha.nodes import SETTLE_S, wait_for
from tests.process.harness import Ports

HOST = Host.parse("127.0.0.1:10911")
# Slow enough for a busy machine: a leader is not deposed because a thread had to wait.
SETTINGS = Settings(election_timeout_ms=1_000, heartbeat_interval_ms=100)
FIRST_VOTE_MS = 100.0  # enough for the links to be there
TIMES = LinkTimes(silence_ms=10_000, retry_least_ms=20, retry_most_ms=100)
STORE = {
    "commitlog_file_size": 256 * 1024, "index_slots": 100, "index_entries": 400,
    "consume_queue_units": 300, "flush": Flush.SYNC,
}  # fmt: skip


def record(body: bytes) -> bytes:
    """Return one message, as a producer sends it."""
    return build_record("T", body, queue_id=0, properties=(), born_timestamp_ms=1, born_host=HOST)


class FirstDriver(DLedgerDriver):
    """The driver of the node that asks for votes first, before a whole election timeout is over."""

    def _begin_core(self) -> None:
        super()._begin_core()
        assert self.core is not None
        self.core._elector.deadline_ms = SYSTEM_CLOCK.monotonic_ms() + FIRST_VOTE_MS


class DriverNode:
    """One node: store, state, driver. Like a process, it is made anew for each start."""

    def __init__(
        self, config: Config, *, settings: Settings, secret: bytes | None, fs: FileSystem,
        driver: type[DLedgerDriver] = DLedgerDriver,
    ) -> None:  # fmt: skip
        self.config = config
        self.number = config.node
        self.failures: list[tuple[str, BaseException]] = []
        fs.make_dirs(config.store.root)
        self.state = NodeState(fs, config.store.root)
        self.state.load(config.node, config.cluster, config.group)
        self.store = DLedgerMmapFileStore(
            config.store, node=config.node, fs=fs, store_host=HOST,
            index_file_bytes=32 * 4096, on_failure=self._failed,
        )  # fmt: skip
        self.store.open()
        messages = self.store.messages
        member = PeerMember(
            config, self.state, secret, lambda: (messages.min_offset, messages.max_offset)
        )
        try:
            refuse_lost_identity(member, self.store)
        except BaseException:
            self.store.close()
            raise
        self.transfer = GroupTransferService(
            SYSTEM_CLOCK, messages.flush_service.request, on_failure=raise_failure
        )
        self.driver = driver(
            member, self.store, settings, SYSTEM_CLOCK, self.transfer,
            RequestFile(fs, config.store.root, SYSTEM_CLOCK), times=TIMES, on_failure=self._failed,
        )  # fmt: skip
        connect_driver(self.store, self.driver)
        self.running = True
        self.address = self.driver.links.bind(config.nodes[config.node].ha)
        self.transfer.start()
        self.driver.start()

    def _failed(self, name: str, failure: BaseException) -> None:
        self.failures.append((name, failure))

    @property
    def leads(self) -> bool:
        """Whether it takes puts."""
        return self.running and self.driver.refusal() is None

    def put(self, *bodies: bytes) -> int:
        """Append; return the end of the last entry."""
        results = self.driver.put_encoded([record(body) for body in bodies])
        ends = [one.end_offset for of_put in results for one in of_put]
        assert all(ends), results
        return max(ends)

    def put_confirmed(self, *bodies: bytes, within_ms: float = 60_000.0) -> tuple[str, str]:
        """Append and wait; return outcome and level."""
        term = self.driver.open_term
        end = self.put(*bodies)
        ended, seen = threading.Event(), []

        def done(outcome: Any, level: str) -> None:
            seen.append((outcome.value, level))
            ended.set()

        deadline = SYSTEM_CLOCK.monotonic_ms() + within_ms
        self.transfer.add(end, deadline, Need.SLAVES, done, epoch=term)
        assert ended.wait(within_ms / 1000 + SETTLE_S) and len(seen) == 1
        return seen[0]

    def ask(self, start: Callable[[Callable[[Settled], None]], None]) -> Settled:
        """Return the outcome of hand_over or change_members."""
        ended, seen = threading.Event(), []

        def done(settled: Settled) -> None:
            seen.append(settled)
            ended.set()

        start(done)
        assert ended.wait(SETTLE_S) and len(seen) == 1
        return seen[0]

    def log(self) -> bytes:
        """Return the log's bytes."""
        messages = self.store.messages
        at, out = messages.min_offset, bytearray()
        while at < messages.max_offset:
            with messages.view(at, messages.max_offset - at) as view:
                out += view
                at += len(view)
        return bytes(out)

    def stop(self) -> None:
        """Stop cleanly."""
        if self.running:
            self.running = False
            self.driver.stop()
            self.transfer.stop()
            self.store.close()

    def kill(self) -> None:
        """Leave the store as kill -9 leaves it: nothing is synced, handed over or noted."""
        if not self.running:
            return
        self.running = False
        driver, messages = self.driver, self.store.messages
        driver._stopping_puts = True
        driver.left = "killed"
        driver.stopping.set()
        driver.links.stop()
        driver.stop()
        self.transfer.stop()
        messages._housekeeping.stop()
        for service in (messages.replay, messages.flush_service, messages.log.allocator):
            service.stop()
        messages.is_open = False
        messages._release()
        messages.unlock()


class DriverGroup:
    """The nodes of a group; a node that was stopped or killed can be started again."""

    def __init__(self, root: pathlib.Path, count: int = 3, **options: Any) -> None:
        self.root = root
        self._ports = Ports()
        self.ports = {n: self._ports.take() for n in range(1, count + 1)}
        self.options = options
        self.nodes: dict[int, DriverNode] = {}

    def start(self, *numbers: int, **options: Any) -> list[DriverNode]:
        merged = {**self.options, **options}
        settings = merged.pop("settings", SETTINGS)
        secret, fs = merged.pop("secret", None), merged.pop("fs", REAL)
        store = {**STORE, **merged.pop("store", {})}
        ports = merged.pop("ports", self.ports)
        # Of nodes that start together one is in a hurry; which one is left to chance.
        first = random.choice(numbers) if len(numbers) > len(ports) // 2 else None
        for number in numbers:
            config = make_config(self.root, number, ports, store=store, **merged)
            kind = FirstDriver if number == first else DLedgerDriver
            self.nodes[number] = DriverNode(
                config, settings=settings, secret=secret, fs=fs, driver=kind
            )
        return [self.nodes[number] for number in numbers]

    @property
    def running(self) -> list[DriverNode]:
        return [node for node in self.nodes.values() if node.running]

    def leader(self, but: DriverNode | None = None) -> DriverNode:
        """Wait for a node that takes puts."""
        return wait_for(
            lambda: next((n for n in self.running if n.leads and n is not but), None), "a leader"
        )

    def committed_leader(self) -> DriverNode:
        """Wait for a leader that has committed an entry of its term: only then members change.

        It takes puts before that.
        """

        def able() -> DriverNode | None:
            leader = self.leader()
            core = leader.driver.core
            assert core is not None
            return None if core._leader.membership.busy() else leader

        return wait_for(able, "a leader that has committed an entry of its term")

    def put(self, *bodies: bytes) -> DriverNode:
        """Put until it is confirmed, at whichever node leads; return that node."""

        def attempt() -> DriverNode | None:
            leader = self.leader()
            with contextlib.suppress(NotStoredError):
                if leader.put_confirmed(*bodies)[0] == "PUT_OK":
                    return leader
            return None

        return wait_for(attempt, "a confirmed put")

    def settled(self) -> list[DriverNode]:
        """Wait until all running nodes have the same committed log."""

        def same() -> bool:
            states = {(n.store.end_index, n.store.committed_index) for n in self.running}
            published = all(
                n.store.messages.readable_offset == n.store.messages.max_offset
                for n in self.running
            )
            return published and len(states) == 1 and len(set(states.pop())) == 1

        wait_for(same, "the same log everywhere")
        return self.running

    def stop(self) -> None:
        """Stop all nodes at once. None hands over: there will be nobody to take over."""
        for node in self.running:
            node.driver._stopping_puts = True
        stops = [threading.Thread(target=node.stop) for node in self.nodes.values()]
        for one in stops:
            one.start()
        for one in stops:
            one.join(SETTLE_S)


@contextlib.contextmanager
def running_group(root: pathlib.Path, count: int = 3, **options: Any) -> Iterator[DriverGroup]:
    """Start a group, stop it in the end; no node may have met a defect.

    All nodes have joined: the first start of one waits for all others, so a kill before that would
    leave it waiting for the killed one.
    """
    group = DriverGroup(root, count, **options)
    try:
        group.start(*group.ports)
        wait_for(lambda: all(node.driver.core for node in group.running), "all have joined")
        yield group
    finally:
        group.stop()
