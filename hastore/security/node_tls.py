"""The TLS of a node, from its configuration."""

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Config, Wire
from hastore.security.node_name import NodeName
from hastore.security.tls_contexts import TlsContexts, TlsFiles


def node_contexts(config: Config, *, clock: Clock = SYSTEM_CLOCK) -> TlsContexts | None:
    """Return the contexts of the node's certificate; None if no address speaks TLS.

    Raises ConfigError, with the remedy, for a certificate that is not this node's or not valid now.
    """
    security = config.security
    if not security.uses_tls:
        return None
    assert security.ca is not None, "the configuration was checked"
    files = TlsFiles(security.ca, security.certificate, security.key)
    name = NodeName(config.cluster, config.group, config.node)
    return TlsContexts(files, node=name, clock=clock)


class NodeTls:
    """The contexts of a node by address; None where the address is plain."""

    def __init__(self, config: Config, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Load the certificate; raises ConfigError as `node_contexts` does."""
        security = config.security
        self._contexts = node_contexts(config, clock=clock)
        self.api = self._contexts if security.api is Wire.TLS else None
        self.ha = self._contexts if security.ha is Wire.TLS else None
        self.http = self._contexts if security.http is Wire.TLS else None

    def problems(self) -> list[str]:
        """Return what the status shows: a certificate that expires, files not in force."""
        return [] if self._contexts is None else self._contexts.problems()
