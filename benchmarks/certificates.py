"""The files of a group that speaks TLS, made for a benchmark."""

import datetime
import pathlib
from collections.abc import Mapping
from typing import Any

from hastore.security.certificates import Authority, make_ca
from hastore.security.tls_engine import NodeName

DAYS = 30


class Certificates:
    """A CA in `folder`, and certificates for the nodes of a benchmark's Group."""

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._now = datetime.datetime.now(datetime.UTC)
        pair = make_ca("benchmark", DAYS, self._now)
        self._authority = Authority(pair, str(folder))
        self.ca = self.write("ca.pem", pair.certificate)

    def section(self, number: int, **more: str) -> Mapping[str, Any]:
        """Return a node's section `security`; `more` says which addresses speak TLS."""
        name = NodeName("bench", "g0", number)
        pair = self._authority.node(name, ["127.0.0.1"], DAYS, self._now)
        return {
            "ca": self.ca,
            "certificate": self.write(f"node{number}.pem", pair.certificate),
            "key": self.write(f"node{number}.key", pair.key),
            **more,
        }

    def write(self, name: str, data: bytes) -> str:
        """Write a file of mode 0600; return its path."""
        path = self._folder / name
        path.touch(0o600)
        path.write_bytes(data)
        return str(path)
