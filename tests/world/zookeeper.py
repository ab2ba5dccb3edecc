"""A ZooKeeper server on a host of the world: one server, its wire protocol as kazoo speaks it.

kazoo and hastore's registry run as they are. The tests of the registry have a real ZooKeeper; here
one is lost, emptied and restored amid all else. It has no ACLs: the world's nodes give it no
credentials. What it has written is on its disk at once.

Formats: ZooKeeper's zookeeper.jute, as kazoo/protocol/serialization.py reads and writes them.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.world import sockets
from tests.world.network import Network
from tests.world.scheduler import Host, Scheduler

ADDRESS, PORT = "127.0.3.1", 2181
URL = f"zk://{ADDRESS}:{PORT}"
LOOK_S = 0.5  # so often sessions are looked at
SEND_S = 2.0  # a client that takes no bytes for so long is dropped
OK, UNIMPLEMENTED, NO_NODE, BAD_VERSION, NODE_EXISTS, NOT_EMPTY = 0, -6, -101, -103, -110, -111
CREATED, DELETED, CHANGED, CHILD = 1, 2, 3, 4  # types of watch events
CONNECTED = 3
PING, CLOSE = 11, -11
_ALL_MAY = struct.pack(">ii", 1, 31) + struct.pack(">i5si6s", 5, b"world", 6, b"anyone")


@dataclass
class Znode:
    """A znode; `made` and `changed` are the numbers of transactions (czxid and mzxid)."""

    data: bytes = b""
    made: int = 0
    changed: int = 0
    version: int = 0
    owner: int = 0  # the session of an ephemeral one


@dataclass
class Tree:
    """What is on the server's disk: znodes by path, and the number of the last transaction."""

    nodes: dict[str, Znode] = field(default_factory=lambda: {"/": Znode()})
    zxid: int = 0

    def children(self, path: str) -> list[str]:
        """Return the names of a znode's children."""
        prefix = path.rstrip("/") + "/"
        return sorted(
            one[len(prefix) :] for one in self.nodes
            if one.startswith(prefix) and one != "/" and "/" not in one[len(prefix) :]
        )  # fmt: skip

    def stat(self, path: str) -> bytes:
        """Return the struct Stat of a znode that exists."""
        one = self.nodes[path]
        return struct.pack(
            ">qqqqiiiqiiq", one.made, one.changed, 0, 0, one.version, 0, 0, one.owner,
            len(one.data), len(self.children(path)), one.made,
        )  # fmt: skip


@dataclass
class Session:
    """A client's session; it outlives its connections by `limit_s`."""

    number: int
    limit_s: float
    heard_s: float


class _Reader:
    """The fields of a frame."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, form: str) -> int:
        (found,) = struct.unpack_from(f">{form}", self._data, self._at)
        self._at += struct.calcsize(f">{form}")
        return int(found)

    def buffer(self) -> bytes:
        size = max(0, self.number("i"))
        self._at += size
        return self._data[self._at - size : self._at]

    def text(self) -> str:
        return self.buffer().decode()

    def acl(self) -> None:
        for _ in range(self.number("i")):
            self.number("i"), self.buffer(), self.buffer()


def _buffer(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


class Connection:
    """A client's connection, with what it watches."""

    def __init__(self, sock: sockets.Socket) -> None:
        self.sock = sock
        self.sock.settimeout(None)
        self.data_watches: dict[str, None] = {}
        self.child_watches: dict[str, None] = {}

    def frame(self) -> bytes:
        """Return the next frame. Raises OSError."""
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self.sock.recv(size - len(found))
            if not part:
                raise ConnectionError("the client has gone")
            found += part
        return found

    def send(self, body: bytes) -> None:
        """Send a frame. Raises OSError."""
        self.sock.settimeout(SEND_S)
        self.sock.sendall(_buffer(body))
        self.sock.settimeout(None)

    def event(self, kind: int, path: str) -> None:
        """Send a watch event."""
        head = struct.pack(">iqi", -1, -1, OK)
        self.send(head + struct.pack(">ii", kind, CONNECTED) + _buffer(path.encode()))


class Refused(Exception):
    """A request is answered with an error's number."""


class ZooKeeper(Host):
    """The server."""

    def __init__(self, world: Scheduler, network: Network) -> None:
        super().__init__(world, "zookeeper", ADDRESS)
        self.tree = Tree()
        self.image: Tree | None = None
        self.running = False
        self._network = network
        self._sessions: dict[int, Session] = {}
        self._connections: dict[Connection, None] = {}
        self._last_session = 0
        self._calls: dict[int, Callable[[Connection, Session, _Reader], bytes]] = {
            1: self._create, 2: self._delete, 3: self._exists, 4: self._get, 5: self._set,
            6: self._get_acl, 8: self._children, 9: self._sync,
            12: partial(self._children, with_stat=True),
            15: partial(self._create, with_stat=True),
        }  # fmt: skip
        network.join(self)

    # -- what happens to it

    def start(self) -> None:
        """Start the process with what its disk has; sessions of before may go on."""
        if self.running:
            return
        self.running = True
        for session in self._sessions.values():
            session.heard_s = self.world.now
        self.world.spawn(self, "accept", self._accept)
        self.world.spawn(self, "sessions", self._expire)

    def kill(self) -> None:
        """End the process."""
        self.world.end_process(self)
        self._network.process_ends(self)
        self._connections.clear()
        self.running = False

    def empty(self) -> None:
        """Lose all data, and go on with none."""
        self._begin_with(Tree())

    def put_back(self) -> None:
        """Go on with the data of `image`, as after a restored backup."""
        if self.image is not None:
            self._begin_with(self.image)
            self.image = None

    def _begin_with(self, tree: Tree) -> None:
        self.kill()
        self.tree = tree
        self._sessions.clear()
        self.start()

    def take_image(self) -> None:
        """Make a backup."""
        self.image = copy.deepcopy(self.tree)

    def change(self, path: str, data: bytes | None) -> None:
        """Replace a znode's data by hand, or delete it (None), if it exists."""
        if path in self.tree.nodes and self.running:
            self.world.spawn(self, "by hand", lambda: self._change(path, data))

    def _change(self, path: str, data: bytes | None) -> None:
        if path in self.tree.nodes:
            if data is None:
                self._remove(path)
            else:
                self._write(path, data)

    # -- connections and sessions

    def _accept(self) -> None:
        listener = sockets.create_server((ADDRESS, PORT))
        while True:
            connection = Connection(listener.accept()[0])
            self.world.spawn(self, "connection", lambda one=connection: self._serve(one))

    def _serve(self, connection: Connection) -> None:
        try:
            session = self._greet(connection)
            if session is not None:
                self._connections[connection] = None
                while self._answer(connection, session, _Reader(connection.frame())):
                    pass
        except OSError:
            pass
        self._connections.pop(connection, None)
        connection.sock.close()

    def _greet(self, connection: Connection) -> Session | None:
        """Begin a session, or go on with one; None if the client is refused."""
        told = _Reader(connection.frame())
        told.number("i")
        if told.number("q") > self.tree.zxid:
            return None  # it has seen what this server does not know
        limit_s, number = told.number("i") / 1000.0, told.number("q")
        session = self._sessions.get(number)
        if number == 0:
            self._last_session += 1
            number = self._last_session
            session = self._sessions[number] = Session(number, limit_s, self.world.now)
        if session is None:
            connection.send(struct.pack(">iiq", 0, 0, 0) + _buffer(bytes(16)) + b"\0")
            return None
        session.heard_s = self.world.now
        head = struct.pack(">iiq", 0, int(1000 * session.limit_s), number)
        connection.send(head + _buffer(bytes(16)) + b"\0")
        return session

    def _expire(self) -> None:
        while True:
            self.world.sleep(LOOK_S)
            for session in list(self._sessions.values()):
                if self.world.now - session.heard_s > session.limit_s:
                    self._end(session)

    def _end(self, session: Session) -> None:
        self._sessions.pop(session.number, None)
        for path in [one for one, it in self.tree.nodes.items() if it.owner == session.number]:
            self._remove(path)

    # -- requests

    def _answer(self, connection: Connection, session: Session, told: _Reader) -> bool:
        """Answer a request; False if the session is over."""
        number, kind = told.number("i"), told.number("i")
        if session.number not in self._sessions:
            return False
        session.heard_s = self.world.now
        found, error = b"", OK
        if kind == CLOSE:
            self._end(session)
        elif kind != PING:
            call = self._calls.get(kind)
            try:
                if call is None:
                    raise Refused(UNIMPLEMENTED)
                found = call(connection, session, told)
            except Refused as refused:
                error = refused.args[0]
        connection.send(struct.pack(">iqi", number, self.tree.zxid, error) + found)
        return kind != CLOSE

    def _there(self, path: str) -> Znode:
        if path not in self.tree.nodes:
            raise Refused(NO_NODE)
        return self.tree.nodes[path]

    def _create(
        self, _connection: Connection, session: Session, told: _Reader, *, with_stat: bool = False
    ) -> bytes:
        path, data = told.text(), told.buffer()
        told.acl()
        owner = session.number if told.number("i") & 1 else 0
        if path in self.tree.nodes:
            raise Refused(NODE_EXISTS)
        parent = path.rpartition("/")[0] or "/"
        self._there(parent)
        self.tree.zxid += 1
        self.tree.nodes[path] = Znode(data, self.tree.zxid, self.tree.zxid, 0, owner)
        found = _buffer(path.encode()) + (self.tree.stat(path) if with_stat else b"")
        self._fire(CREATED, path, parent)
        return found

    def _delete(self, _connection: Connection, _session: Session, told: _Reader) -> bytes:
        path, version = told.text(), told.number("i")
        if version not in (-1, self._there(path).version):
            raise Refused(BAD_VERSION)
        if self.tree.children(path):
            raise Refused(NOT_EMPTY)
        self._remove(path)
        return b""

    def _exists(self, connection: Connection, _session: Session, told: _Reader) -> bytes:
        path = told.text()
        if told.number("b"):
            connection.data_watches[path] = None
        self._there(path)
        return self.tree.stat(path)

    def _get(self, connection: Connection, _session: Session, told: _Reader) -> bytes:
        path = told.text()
        found = self._there(path)
        if told.number("b"):
            connection.data_watches[path] = None
        return _buffer(found.data) + self.tree.stat(path)

    def _set(self, _connection: Connection, _session: Session, told: _Reader) -> bytes:
        path, data, version = told.text(), told.buffer(), told.number("i")
        if version not in (-1, self._there(path).version):
            raise Refused(BAD_VERSION)
        return self._write(path, data)

    def _get_acl(self, _connection: Connection, _session: Session, told: _Reader) -> bytes:
        path = told.text()
        self._there(path)
        return _ALL_MAY + self.tree.stat(path)

    def _children(
        self, connection: Connection, _session: Session, told: _Reader, *, with_stat: bool = False
    ) -> bytes:
        path = told.text()
        self._there(path)
        if told.number("b"):
            connection.child_watches[path] = None
        names = self.tree.children(path)
        found = b"".join(_buffer(name.encode()) for name in names)
        return struct.pack(">i", len(names)) + found + (self.tree.stat(path) if with_stat else b"")

    def _sync(self, _connection: Connection, _session: Session, told: _Reader) -> bytes:
        return _buffer(told.text().encode())

    # -- changes

    def _write(self, path: str, data: bytes) -> bytes:
        found = self.tree.nodes[path]
        self.tree.zxid += 1
        found.data, found.changed, found.version = data, self.tree.zxid, found.version + 1
        stat = self.tree.stat(path)
        self._fire(CHANGED, path, None)
        return stat

    def _remove(self, path: str) -> None:
        self.tree.zxid += 1
        del self.tree.nodes[path]
        self._fire(DELETED, path, path.rpartition("/")[0] or "/")

    def _fire(self, kind: int, path: str, parent: str | None) -> None:
        """Tell who watches; a client gets the event before the answer of a later request."""
        for one in list(self._connections):
            watched = [one.data_watches] if kind != DELETED else [
                one.data_watches, one.child_watches
            ]  # fmt: skip
            due = [(kind, path)] if any(path in watches for watches in watched) else []
            for watches in watched:
                watches.pop(path, None)
            if parent is not None and parent in one.child_watches:
                del one.child_watches[parent]
                due.append((CHILD, parent))
            try:
                for event in due:
                    one.event(*event)
            except OSError:
                one.sock.close()
