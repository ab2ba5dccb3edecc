"""Certificates for tests: CAs, nodes and clients, also such that are wrong in one thing."""

import datetime
import functools
import os

from hastore.security.certificates import Authority, Pair, make_ca
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import NodeName

NODE_1, NODE_2 = NodeName("demo", "g0", 1), NodeName("demo", "g0", 2)
HOSTS = ("127.0.0.1", "localhost", "::1")


def now():
    return datetime.datetime.now(datetime.UTC)


class LaxAuthority(Authority):
    """Signs for longer than it lasts itself, as other tools do."""

    not_after = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC)


class Pki:
    """A CA in memory and the files that it makes in `folder`."""

    def __init__(self, folder, name="test CA", *, days=3620):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        pair = make_ca(name, 30 + days, now() - datetime.timedelta(days=30))
        self._own = pair, str(folder)
        self.authority = Authority(*self._own)
        self.ca = self._write("ca.pem", pair.certificate, 0o644)

    def _write(self, name, data, mode):
        """Write a file as the commands do: replaced at once, never half."""
        path = self.folder / name
        temporary = self.folder / (name + ".new")
        temporary.write_bytes(data)
        temporary.chmod(mode)
        os.replace(temporary, path)
        return str(path)

    def write(self, stem, pair: Pair):
        """Write a pair and return its files with this CA."""
        certificate = self._write(f"{stem}.pem", pair.certificate, 0o644)
        return TlsFiles(self.ca, certificate, self._write(f"{stem}.key", pair.key, 0o600))

    def node(
        self, node=NODE_1, *, hosts=HOSTS, days=365, made=None, stem=None, beyond_the_ca=False
    ):
        """Return the files of a node; `made` is when they claim to have been made."""
        authority = LaxAuthority(*self._own) if beyond_the_ca else self.authority
        pair = authority.node(node, hosts, days, made or now())
        return self.write(stem or f"node{node.node}", pair)

    def client(self, name="producer", *, days=365, made=None):
        """Return the files of a client."""
        return self.write(f"client-{name}", self.authority.client(name, days, made or now()))

    @functools.cached_property
    def node_1(self):
        """The contexts of node 1."""
        return TlsContexts(self.node(NODE_1), node=NODE_1)

    @functools.cached_property
    def node_2(self):
        """The contexts of node 2."""
        return TlsContexts(self.node(NODE_2), node=NODE_2)
