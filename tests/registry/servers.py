"""Real ZooKeeper servers for tests: each has a port and a data folder of its own.

Skipped with one line where Java, kazoo or ZooKeeper is missing; in CI that is a failure.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import threading

import pytest

from hastore.demo.zookeeper import ZooKeeper, debian_jars, pyspark_jars
from tests.process.harness import Ports, hastore, wait_until

CREDENTIALS = "hastore:s3cret:pass"


def missing(what):
    """Skip the test with one line; in CI fail, because ZooKeeper is required there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"tests of the registry: {what}, and CI must run them", pytrace=False)
    pytest.skip(f"tests of the registry need kazoo, Java and Debian's zookeeper: {what}")


def java_and_jars():
    """Return Java and ZooKeeper's class path: Debian's or, without that package, pyspark's."""
    if importlib.util.find_spec("kazoo") is None:
        missing("pip install kazoo")
    java = shutil.which("java")
    if java is None:
        missing("java is not installed")
    jars = debian_jars()
    if jars is None and os.environ.get("CI") == "true":
        missing("apt-get install zookeeper")
    jars = jars or pyspark_jars()
    if jars is None:
        missing("apt-get install zookeeper")
    return java, jars


class Servers:
    """One server, or an ensemble; a client with full rights to look and to change by hand.

    `settings` are further lines of the servers' configuration.
    """

    def __init__(self, folder, count=1, settings=""):
        java = java_and_jars()
        self.ports = Ports()
        quorum = {n: (self.ports.take(), self.ports.take()) for n in range(1, count + 1)}
        self.each = [
            ZooKeeper(
                folder / f"zookeeper{n}",
                self.ports.take(),
                java,
                n,
                quorum if count > 1 else {},
                settings,
            )  # fmt: skip
            for n in range(1, count + 1)
        ]
        self._clients = contextlib.ExitStack()

    @property
    def registry(self):
        """The value of the key `registry`."""
        return "zk://" + ",".join(one.address for one in self.each)

    def start(self):
        for one in self.each:
            if one.process is None:
                one.start()
        for one in self.each:
            one.wait_ready()
        return self

    def kill(self):
        for one in self.each:
            one.kill()

    def restore(self, older):
        """Let the one server go on with a copy of its data from earlier."""
        (server,) = self.each
        server.kill()
        server.wipe()
        shutil.copytree(older, server.folder / "data")
        self.start()

    def close(self):
        self._clients.close()
        for one in self.each:
            one.kill()
        self.ports.close()

    @contextlib.contextmanager
    def client(self, credentials=None):
        """Lend kazoo's own client: it stands for ZooKeeper's command line."""
        from kazoo.client import KazooClient

        auth = [("digest", credentials)] if credentials else None
        client = KazooClient(self.registry.removeprefix("zk://"), timeout=6.0, auth_data=auth)
        client.start(30)
        try:
            yield client
        finally:
            client.stop()
            client.close()

    def empty(self):
        """Remove all znodes of hastore's; earlier tests have made some with credentials."""
        with self.client(CREDENTIALS) as client:
            if client.exists("/hastore"):
                client.delete("/hastore", recursive=True)

    def read(self, number, group="/hastore/test/g0"):
        """Return a node's object; None without a znode."""
        with self.client() as client:
            path = f"{group}/{number}"
            return json.loads(client.get(path)[0]) if client.exists(path) else None

    def set_role(self, number, role):
        """Do what `set` of ZooKeeper's command line does: the object with another role."""
        with self.client() as client:
            path = f"/hastore/test/g0/{number}"
            wait_until(lambda: client.exists(path), 60, f"{path} never appeared")
            entry = json.loads(client.get(path)[0])
            plain = {key: entry[key] for key in ("api", "ha", "http")}
            client.set(path, json.dumps({"role": role, **plain}).encode())

    def put(self, number, data):
        """Set a node's znode to any bytes."""
        with self.client() as client:
            client.set(f"/hastore/test/g0/{number}", data)


class Wire:
    """A path to one server that can be cut: connections stay open, but are silent."""

    def __init__(self, port):
        self._port = port
        self._cut = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self._cut.set()

    def restore(self):
        """New connections work again; the old ones are reset."""
        self._cut.clear()
        held, self._open = self._open, []
        for one in held:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.restore()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self._port))
                except OSError:  # the server does not run
                    here.close()
                    continue
                self._open += [here, there]
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def note(self, data):
        """See what either side has sent."""

    def _carry(self, source, target):
        with contextlib.suppress(OSError), source:
            while data := source.recv(65_536):
                self.note(data)
                if not self._cut.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def registered(group, servers, **settings):
    """Let a group's nodes use the registry; start them; wait until node 1 has slaves in sync."""
    for node in group:
        node.write(registry=servers.registry, **settings)
        node.start(wait=False)
    for node in group:
        node.wait_ready()
    others = [node.number for node in group if node.number != 1]
    group[1].wait_writable()
    group[1].wait_in_sync(*others)
    return group


def flip(old, new):
    """Make `new` the master by the operator's commands."""
    for command, node in (("promote", new), ("demote", old)):
        done = hastore(command, "-c", str(node.path))
        assert done.returncode == 0, done.stderr
