"""A pair as docs/security.md says: TLS at all its ports, and identities."""

from __future__ import annotations

import pathlib

from tests.deploy.faults import run
from tests.process.harness import Group, Node


class Secured:
    """The files of a group's nodes and clients, made by the commands, before the nodes start.

    The nodes' certificates are valid for `days`. `ca` and `key` are what Prometheus needs, and
    `client` is the file of a client that may do all.
    """

    def __init__(self, folder: pathlib.Path, group: Group, *, days: int = 365) -> None:
        self._folder, self._group, self._tls = folder, group, folder / "tls"
        self.ca = self._tls / "ca.pem"
        identities = folder / "identities.yaml"
        run("keys", "ca", "--dir", str(self._tls))
        self._certificates("--days", str(days))
        self.key = folder / "prometheus.key"
        self.new("prometheus", out=self.key, file=identities)
        rights = ("--admin", "--produce", "*", "--consume", "*")
        self.new("ops", *rights, out=folder / "ops.key", file=identities)
        self.client = folder / "client.yaml"
        self.client.write_text(f"tls_ca: {self.ca}\nidentity: ops\nkey_file: ops.key\n")
        for node in group:
            self.file(node).write_bytes(identities.read_bytes())
            self.file(node).chmod(0o600)
            stem = self._tls / f"node{node.number}"
            node.write(
                security={
                    "ca": str(self.ca), "certificate": f"{stem}.pem", "key": f"{stem}.key",
                    "ha": "tls", "http": "tls", "api": "tls", "identities": str(self.file(node)),
                }
            )  # fmt: skip

    def start(self) -> Group:
        """Start the nodes; they answer Prometheus, but no test that asks without TLS."""
        for node in self._group:
            node.start("slave" if node.file_role == "SLAVE" else "master")
        return self._group

    def file(self, node: Node) -> pathlib.Path:
        """The file with the identities of a node."""
        return self._folder / f"identities{node.number}.yaml"

    def new(self, name: str, *rights: str, out: pathlib.Path, file: pathlib.Path) -> None:
        """Make an identity and its key."""
        run("keys", "new", name, *rights, "--file", str(file), "--out", str(out))

    def renew(self) -> None:
        """Replace the certificates of the nodes."""
        self._certificates("--renew")

    def _certificates(self, *options: str) -> None:
        files = [word for node in self._group for word in ("-c", str(node.path))]
        run("keys", "cert", "--dir", str(self._tls), *files, *options)
