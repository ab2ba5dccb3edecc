"""Groups on loopback whose links speak TLS."""

import pytest

from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import NodeName
from tests.security.pki import Pki


class GroupPki(Pki):
    """Certificates for the nodes of the group c/g, which tests.ha.nodes.Group makes."""

    def name(self, number, cluster="c", group="g"):
        return NodeName(cluster, group, number)

    def contexts(self, number, **changes):
        """Return the contexts of a node with a new certificate; `changes` as for Pki.node."""
        name = self.name(number)
        return TlsContexts(self.node(name, **changes), node=name)

    def stolen(self, files):
        """Return the contexts of an attacker, who does not check its own certificate."""
        return TlsContexts(TlsFiles(self.ca, files.certificate, files.key))


@pytest.fixture
def pki(tmp_path):
    return GroupPki(tmp_path / "pki")
