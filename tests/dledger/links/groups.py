"""Links of nodes in this process: real sockets, a log of plain bytes, a handler that records."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Config, HAConfig, NodeAddress, Role, StoreConfig
from hastore.dledger.links.channel import LinkTimes
from hastore.dledger.links.peer_links import PeerLinks, PeerMember
from hastore.fs.filesystem import REAL
from hastore.ha.node.node_state import NodeState
from hastore.protocol.dledger import Message
from hastore.protocol.dledger_link import Received
from hastore.security.tls_contexts import TlsContexts
from hastore.service import raise_failure
from tests.ha.nodes import SETTLE_S
from tests.process.harness import Ports

FILE_SIZE = 1 << 20
TIMES = LinkTimes(silence_ms=20_000, retry_least_ms=20, retry_most_ms=50)


def make_config(root: pathlib.Path, node: int, ports: dict[int, int], **changes: Any) -> Config:
    """Return the configuration of one node; `changes` are fields of Config, HAConfig or both."""
    fields: dict[str, Any] = {"cluster": "c", "group": "g", "role": Role.SLAVE, **changes}
    store = {"root": str(root / f"node{node}"), "commitlog_file_size": FILE_SIZE}
    ha = {"hello_timeout_ms": 20_000, **fields.pop("ha", {})}
    return Config(
        node=node,
        nodes={
            n: NodeAddress(api="tcp://127.0.0.1:0", ha=f"127.0.0.1:{port}", http="127.0.0.1:0")
            for n, port in ports.items()
        },
        store=StoreConfig(**{**store, **fields.pop("store", {})}),
        ha=HAConfig(**ha),
        **fields,
    )


class Bytes:
    """A log of bytes, as an EntrySource; without files."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    @contextlib.contextmanager
    def view(self, offset: int, max_bytes: int) -> Iterator[memoryview]:
        yield memoryview(self.data)[offset : offset + max_bytes]

    def file_range(self, _offset: int, _max_bytes: int) -> None:
        return None


class Recorder:
    """Keep what the links report."""

    def __init__(self) -> None:
        self.got: list[tuple[int, Message, bytes | None]] = []
        self.links: list[tuple[int, bool]] = []
        self.up: set[int] = set()
        self.gate = threading.Event()  # while it is clear, the link's thread waits here
        self.gate.set()

    def on_messages(self, peer: int, messages: list[Received]) -> None:
        assert self.gate.wait(SETTLE_S)
        for message, data in messages:
            assert message is not None
            self.got.append((peer, message, None if data is None else bytes(data)))

    def on_link(self, peer: int, up: bool) -> None:
        self.links.append((peer, up))
        (self.up.add if up else self.up.discard)(peer)

    def removal_of(self, node: int) -> tuple[int, int, tuple[int, ...]] | None:
        return None

    def on_removed(self, removed: tuple[int, int, tuple[int, ...]]) -> None:
        self.removed = removed

    def group_nodes(self) -> tuple[int, ...]:
        return ()

    def begun_members(self) -> tuple[int, ...]:
        return ()


class LinkNode:
    """The links of one node."""

    def __init__(
        self,
        config: Config,
        *,
        secret: bytes | None = None,
        tls: TlsContexts | None = None,
        source: Any = None,
        times: LinkTimes = TIMES,
        store_id: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.config = config
        self.state = NodeState(REAL, config.store.root)
        self.state.load(config.node, config.cluster, config.group)
        if store_id is not None:
            self.state.save(store_id=store_id)
        # A log that has begun: nodes with empty ones compare their first members.
        self.member = PeerMember(config, self.state, secret, lambda: (0, 1), tls)
        self.recorder = Recorder()
        self.source = source or Bytes()
        self.links = PeerLinks(
            self.member, self.source, self.recorder, clock,
            times=times, on_failure=raise_failure,
        )  # fmt: skip
        self.address = self.links.bind(config.nodes[config.node].ha)

    def start(self) -> LinkNode:
        self.links.start()
        return self

    def stop(self) -> None:
        self.links.stop()


class LinkGroup:
    """Nodes whose links run in this process."""

    def __init__(self, root: pathlib.Path, count: int = 3) -> None:
        self.root = root
        self._reserved = Ports()
        self.ports = {n: self._reserved.take() for n in range(1, count + 1)}
        self.nodes: list[LinkNode] = []

    def make(self, number: int, **options: Any) -> LinkNode:
        known = ("secret", "tls", "source", "times", "store_id", "clock")
        changes = {name: value for name, value in options.items() if name not in known}
        rest = {name: value for name, value in options.items() if name in known}
        ports = changes.pop("ports", self.ports)
        node = LinkNode(make_config(self.root, number, ports, **changes), **rest)
        self.nodes.append(node)
        return node

    def stop(self) -> None:
        stops = [threading.Thread(target=node.stop) for node in self.nodes]
        for one in stops:
            one.start()
        for one in stops:
            one.join(SETTLE_S)
