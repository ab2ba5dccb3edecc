"""The HA sides of nodes in this process: real stores and loopback sockets, without RoleService and
client API. A test calls what these would call.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import AckPoint, Config, Flush, HAConfig, NodeAddress, Role, StoreConfig
from hastore.errors import NotStoredError
from hastore.fs.filesystem import REAL
from hastore.ha.hello.peer import Deadline, receive_exactly
from hastore.ha.master.group_transfer import GroupTransferService, Need
from hastore.ha.master.ha_service import HAService
from hastore.ha.node.member import Member
from hastore.ha.node.node_state import NodeState
from hastore.ha.promoter import Flags, Promoter
from hastore.ha.replica.rewind import finish_cut
from hastore.ha.rules.epochs import CLASSIC_EPOCH, EpochEntry
from hastore.ha.slave.ha_client import HAClient
from hastore.protocol.ha_link import HEADER, HEADER_BYTES, REPORT
from hastore.record.codec import Host, build_record
from hastore.security.tls_contexts import TlsContexts
from hastore.service import raise_failure
from hastore.store.message_store import MessageStore
from tests.process.harness import Ports

FILE_SIZE = 64 * 1024
HOST = Host.parse("127.0.0.1:10911")
SETTLE_S = 120.0


def wait_for(what: Callable[[], Any], text: str = "it", timeout_s: float = SETTLE_S) -> Any:
    """Return the first true value of `what()`."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"{text} did not happen"
        time.sleep(0.005)
    return value


class Group:
    """The nodes of a group: their configurations, their starts and stops."""

    def __init__(self, root: pathlib.Path, count: int = 1, **settings: Any) -> None:
        self.root = root
        self.settings = settings
        self._ports = Ports()
        self.addresses = {
            n: NodeAddress(api="tcp://127.0.0.1:0", ha=f"127.0.0.1:{self._ports.take()}", http="")
            for n in range(1, count + 1)
        }
        self.started: list[HaNode] = []

    def config(self, number: int, **changes: Any) -> Config:
        settings = {**self.settings, **changes}
        ha = {
            "heartbeat_interval_ms": 200, "housekeeping_interval_ms": 1500,
            "hello_timeout_ms": 20_000, "ack_point": AckPoint.WRITTEN,
        }  # fmt: skip
        ha.update(settings.pop("ha", {}))
        store = {
            "root": str(self.root / f"node{number}"), "commitlog_file_size": FILE_SIZE,
            "index_slots": 100, "index_entries": 400, "consume_queue_units": 300,
            "flush": Flush.ASYNC, "flush_interval_ms": 50,
        }  # fmt: skip
        store.update(settings.pop("store", {}))
        nodes = settings.pop("nodes", self.addresses)
        fields = {"cluster": "c", "group": "g", "acks": 1, "role": Role.SYNC_MASTER, **settings}
        return Config(
            node=number, nodes=nodes, ha=HAConfig(**ha), store=StoreConfig(**store), **fields
        )

    def start(
        self,
        number: int,
        *,
        secret: bytes | None = None,
        tls: TlsContexts | None = None,
        **changes: Any,
    ) -> HaNode:
        node = HaNode(self.config(number, **changes), secret, tls)
        self.started.append(node)
        return node

    def stop(self) -> None:
        for node in reversed(self.started):
            node.stop()


class HaNode:
    """The HA side of one node."""

    def __init__(
        self, config: Config, secret: bytes | None, tls: TlsContexts | None = None
    ) -> None:
        self.config = config
        self.number = config.node
        root = config.store.root
        self.state = NodeState(REAL, root)
        REAL.make_dirs(root)
        self.state.load(config.node, config.cluster, config.group)
        intent, alone = self.state.data.intent, len(config.nodes) == 1
        self.store = store = MessageStore(config.store, store_host=HOST)
        store.open(
            intent_offset=None if intent is None else intent.offset,
            from_rocketmq=self.state.last_epoch == CLASSIC_EPOCH,
            rocketmq_end=self.state.rocketmq_end,
            on_doubt=lambda end: self.state.note_doubt(end, alone=alone),
        )
        finish_cut(store, self.state)
        self.state.begin_boot(config.ha.ack_point.value, alone=alone, log_end=store.max_offset)
        self.member = Member(
            config, store, self.state, SYSTEM_CLOCK, secret, tls=tls, on_failure=raise_failure
        )
        self.transfer = GroupTransferService(
            SYSTEM_CLOCK, store.flush_service.request, on_failure=raise_failure
        )
        self.ha = HAService(self.member, self.transfer)
        self.address = self.ha.bind(config.nodes[config.node].ha)
        store.hooks.on_append = self.ha.on_append
        store.hooks.on_flushed = self.ha.on_flushed
        self.client: HAClient | None = None
        self.superseded: list[int] = []
        self.member.on_superseded = self._lose
        self.member.on_promise = self._promised
        self.said: list[str] = []
        self.called_off: Callable[[], str | None] = lambda: None
        self.promoter = Promoter(
            self.member, self._open, self.said.append, lambda: self.called_off()
        )
        self.transfer.start()
        self.ha.acceptor.start()
        self._running = True

    def _lose(self, epoch: int, who: str) -> None:
        self.superseded.append(epoch)
        self.ha.close_epoch(f"{epoch} of {who}")

    def _promised(self) -> None:
        if self.client is not None:
            self.client.drop_link()

    def _open(self, entry: EpochEntry) -> None:
        self.ha.open_epoch(entry, sync=self.config.role is Role.SYNC_MASTER)

    # ---- its actions

    def promote(
        self, config: Config | None = None, *, again: bool = False, **flags: bool
    ) -> EpochEntry:
        """Try a promotion once: a new one, or with `again` the earlier one."""
        if not again:
            self.promoter.begin()
        return self.promoter.attempt(
            config or self.config, Flags(**flags), before_promise=self._leave_role
        )

    def _leave_role(self) -> None:
        if self.member.open_epoch and self.member.step_down():
            self.ha.close_epoch("a new promotion")
        self.unfollow()

    def follow(self) -> None:
        assert self.client is None
        self.client = HAClient(self.member)
        self.client.start()

    def unfollow(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            assert client.stop(60)

    @property
    def linked(self) -> bool:
        return self.client is not None and self.client.linked

    def put(self, *bodies: bytes) -> int:
        """Append a record for each body through the gate; return the log's new end."""
        records = [
            build_record("T", body, queue_id=0, properties=(), born_timestamp_ms=1, born_host=HOST)
            for body in bodies
        ]
        member = self.member
        with member.gate.lock:
            if not member.open_epoch or member.gate.epoch != member.open_epoch:
                raise NotStoredError("not writable", "SERVICE_NOT_AVAILABLE")
            results = self.store.put_encoded([b"".join(records)])
        assert all(result.offset is not None for result in results[0]), results
        return self.store.max_offset

    def put_confirmed(
        self, *bodies: bytes, need: Need = Need.SLAVES, within_ms: float = 60_000.0
    ) -> tuple[str, str]:
        """Append and wait; return outcome and level."""
        end = self.put(*bodies)
        ended, seen = threading.Event(), []

        def done(outcome: Any, level: str) -> None:
            seen.append((outcome.value, level))
            ended.set()

        self.transfer.add(end, SYSTEM_CLOCK.monotonic_ms() + within_ms, need, done)
        assert ended.wait(within_ms / 1000.0 + SETTLE_S)
        assert len(seen) == 1
        return seen[0]

    def bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """Return the log's bytes."""
        at = self.store.min_offset if start is None else start
        end = self.store.max_offset if end is None else end
        out = bytearray()
        while at < end:
            with self.store.view(at, end - at) as view:
                assert len(view)
                out += view
                at += len(view)
        return bytes(out)

    def stop(self, *, clean: bool = True) -> None:
        if not self._running:
            return
        self._running = False
        self.unfollow()
        self.member.step_down()
        self.ha.close_epoch("the node stops")
        self.transfer.stop()
        self.ha.stop()
        self.store.close()
        if clean:
            self.state.end_cleanly()


class Peer:
    """A raw connection to an HA port, as a RocketMQ slave or an untrusted peer has one."""

    def __init__(self, address: str, source: str = "") -> None:
        """Connect from the host `source`: 127.0.0.2 is no host of the group's nodes."""
        host, port = address.rsplit(":", 1)
        self.sock = socket.create_connection((host, int(port)), 60, (source, 0))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def report(self, *offsets: int) -> None:
        self.sock.sendall(b"".join(map(REPORT.pack, offsets)))

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def receive(self, size: int) -> bytes:
        return receive_exactly(self.sock, size, Deadline(SYSTEM_CLOCK, 60_000))

    def frame(self) -> tuple[int, bytes]:
        """Return the next classic frame: offset and body."""
        offset, size = HEADER.unpack(self.receive(HEADER_BYTES))
        assert size >= 0
        return offset, self.receive(size)

    def frames_until(self, end: int) -> list[tuple[int, bytes]]:
        """Return the data frames up to the log's end."""
        frames = []
        while not frames or frames[-1][0] + len(frames[-1][1]) < end:
            offset, body = self.frame()
            if body:
                frames.append((offset, body))
        return frames

    @property
    def closed(self) -> bool:
        """Whether the node has closed the connection; reads all that is still sent."""
        self.sock.settimeout(60)
        try:
            while self.sock.recv(65536):
                continue
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        # Close with a reset, so that the port is free at once.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


@contextlib.contextmanager
def peer(node: HaNode) -> Iterator[Peer]:
    made = Peer(node.address)
    try:
        yield made
    finally:
        made.close()
