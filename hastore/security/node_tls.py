"""The TLS of a node, from its configuration."""

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Config, Wire
from hastore.security.node_name import NodeName
from hastore.security.tls_contexts import TlsContexts, TlsFiles


class NodeTls:
    """The contexts of a node by address; None where the address is plain."""

    def __init__(self, config: Config, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Load the certificate, if an address speaks TLS.

        Raises ConfigError, with the remedy, if it is not this node's or not valid now.
        """
        security = config.security
        self._contexts: TlsContexts | None = None
        if security.uses_tls:
            assert security.ca is not None, "the configuration was checked"
            files = TlsFiles(security.ca, security.certificate, security.key)
            name = NodeName(config.cluster, config.group, config.node)
            self._contexts = TlsContexts(files, node=name, clock=clock)
        self.api = self._contexts if security.api is Wire.TLS else None
        self.ha = self._contexts if security.ha is Wire.TLS else None
        self.http = self._contexts if security.http is Wire.TLS else None

    def problems(self) -> list[str]:
        """Return what the status shows: a certificate that expires, files not in force."""
        return [] if self._contexts is None else self._contexts.problems()
