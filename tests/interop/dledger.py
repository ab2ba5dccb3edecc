"""Real DLedger servers: started in a JVM (interop.five.DLedgerOperations), or spoken to by wire.

group = Ledgers(peer, ports, tmp_path)   # n0, n1, n2, all in one JVM
group.start()
leader = group.wait_leader()
peer.call("dledger.append", server=leader, bodies=["00ff"])
"""

from __future__ import annotations

import base64
import itertools
import json
import pathlib
import socket
import struct
from typing import Any

from tests.interop.dledger_files import DATA_BYTES, INDEX_BYTES
from tests.interop.java_process import JavaProcess
from tests.process.harness import Ports, wait_until

GROUP = "g0"
# Times for tests; the others are DLedger's own, as are the flush interval and all that it syncs.
TIMES = {"heartBeatTimeIntervalMs": 250, "maxWaitAckTimeMs": 1_000}
WAIT_S = 60.0
SUCCESS, WAIT_QUORUM_ACK_TIMEOUT, DISK_ERROR = 200, 502, 414
APPEND, GET, METADATA = 50001, 50002, 50000
VOTE, HEART_BEAT, PUSH = 51001, 51002, 51004


class Ledgers:
    """The servers of one DLedger group, each under its own base folder; processes may differ."""

    def __init__(
        self,
        peer: JavaProcess,
        ports: Ports,
        folder: pathlib.Path,
        count: int = 3,
        *,
        records: bool = False,
        **config: Any,
    ) -> None:
        """Choose ports; with `records` the bodies are RocketMQ records (see `dledger.start`)."""
        self._records = records
        self.names = [f"n{number}" for number in range(count)]
        self.addresses = {name: f"127.0.0.1:{ports.take()}" for name in self.names}
        self.peers = ";".join(f"{name}-{self.addresses[name]}" for name in self.names)
        self._folder = folder
        self._jvms = dict.fromkeys(self.names, peer)
        self._config = {**TIMES, **config}

    def base(self, name: str) -> pathlib.Path:
        """Return the base folder of a server."""
        return self._folder / f"base-{name}"

    def store(self, name: str) -> pathlib.Path:
        """Return the folder with a server's data, index, checkpoint and currterm."""
        return self.base(name) / f"dledger-{name}"

    def use(self, name: str, peer: JavaProcess) -> None:
        """Start a server in another process from now on."""
        self._jvms[name] = peer

    def start(self, *names: str, **config: Any) -> None:
        """Start servers, all without names."""
        for name in names or self.names:
            settings = {
                "group": GROUP,
                "selfId": name,
                "peers": self.peers,
                "storeBaseDir": str(self.base(name)),
                "mappedFileSizeForEntryData": DATA_BYTES,
                "mappedFileSizeForEntryIndex": INDEX_BYTES,
                **self._config,
                **config,
            }
            self._jvms[name].call("dledger.start", config=settings, records=self._records)

    def stop(self, *names: str) -> None:
        """Stop servers cleanly, all without names."""
        stopping = [
            self._jvms[name].begin("dledger.stop", server=name) for name in names or self.names
        ]
        for one in stopping:
            one.result(WAIT_S)

    def status(self, name: str) -> dict[str, Any]:
        """Return a server's state."""
        found: dict[str, Any] = self._jvms[name].call("dledger.status", server=name)
        return found

    def wait_leader(self, *names: str) -> str:
        """Wait until one of the running servers `names` leads, and the others follow it."""
        of = names or tuple(self.names)

        def found() -> str | None:
            states = {name: self.status(name) for name in of}
            leaders = [name for name in of if states[name]["role"] == "LEADER"]
            agreed = {(state.get("leader"), state["term"]) for state in states.values()}
            return leaders[0] if len(leaders) == 1 and len(agreed) == 1 else None

        leader: str = wait_until(
            found, WAIT_S, lambda: f"no leader: {[self.status(name) for name in of]}"
        )
        return leader

    def append(self, name: str, *bodies: bytes) -> list[list[int]]:
        """Append bodies at once; return [code, index, pos, term] of each."""
        done: list[list[int]] = self._jvms[name].call(
            "dledger.append", server=name, bodies=[body.hex() for body in bodies]
        )
        return done

    def begin_append(self, name: str, *bodies: bytes) -> None:
        """Append bodies without waiting: a leader that loses its role never answers."""
        text = [body.hex() for body in bodies]
        self._jvms[name].begin("dledger.append", server=name, bodies=text)

    def wait_state(self, name: str, **wanted: Any) -> None:
        """Wait until a server's state has all values of `wanted`."""
        wait_until(
            lambda: wanted.items() <= self.status(name).items(),
            WAIT_S,
            lambda: f"{name} did not become {wanted}: {self.status(name)}",
        )

    def call(self, name: str, code: int, **body: Any) -> dict[str, Any]:
        """Send a request to a server over its port, as anyone can, and return the answer's body."""
        return call(self.addresses[name], code, group=GROUP, remoteId=name, **body)

    def get(self, name: str, index: int) -> bytes | None:
        """Read an entry's body over the port, or return None if the answer has none."""
        answer = self.call(name, GET, beginIndex=index)
        entries = answer.get("entries") or []
        return base64.b64decode(entries[0]["body"]) if entries else None


_numbers = itertools.count(1)


def send(sock: socket.socket, code: int, **body: Any) -> None:
    """Send one request in DLedger's protocol (RocketMQ remoting)."""
    header = {"code": code, "flag": 0, "language": "OTHER", "opaque": next(_numbers), "version": 0}
    head = json.dumps({**header, "serializeTypeCurrentRPC": "JSON"}).encode()
    payload = json.dumps(body).encode()
    sock.sendall(struct.pack(">ii", 4 + len(head) + len(payload), len(head)) + head + payload)


def connect(address: str) -> socket.socket:
    """Connect to a server."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def call(address: str, code: int, **body: Any) -> dict[str, Any]:
    """Send one request and return the answer's body."""
    with connect(address) as sock:
        send(sock, code, **body)
        size, head_size = struct.unpack(">ii", _exactly(sock, 8))
        rest = _exactly(sock, size - 4)
    head_size &= 0xFFFFFF
    answer = json.loads(rest[:head_size])
    assert answer["code"] == 0 or answer["code"] == SUCCESS, answer
    found: dict[str, Any] = json.loads(rest[head_size:])
    return found


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, "the server closed the connection"
        data += part
    return data
