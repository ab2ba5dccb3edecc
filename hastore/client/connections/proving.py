"""What a client needs to prove who it is, and to know the nodes, at each new connection."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from hastore.client.connections.bootstrap import host_and_port
from hastore.client.security import Security, SecurityLike, as_security
from hastore.errors import AuthenticationError, ConfigError
from hastore.protocol import api

if TYPE_CHECKING:
    from hastore.security.scram import ScramClient
    from hastore.security.tls_contexts import TlsContexts
    from hastore.security.tls_engine import TlsEngine

RID = 0  # of the exchange; a client's own requests count from 1
# The status of a refusal by a node that asks who the client is, or does not know it.
UNAUTHENTICATED = api.Status.UNAUTHENTICATED.value


class Prover:
    """Make the TLS engines and the exchanges of one client. One thread at a time uses it."""

    def __init__(self, security: Security) -> None:
        """Read the files once, so that a wrong one is refused at once. Raises ConfigError."""
        self.security = security
        self._contexts: TlsContexts | None = None
        if security.tls_ca is not None:
            from hastore.security.tls_contexts import TlsFiles, shared_contexts

            files = TlsFiles(security.tls_ca, security.tls_certificate, security.tls_key)
            self._contexts = shared_contexts(files)
        if security.identity is not None:
            self.exchange()

    def __reduce__(self) -> tuple[type[Prover], tuple[Security]]:
        return Prover, (self.security,)

    @property
    def has_tls(self) -> bool:
        """Whether the client speaks TLS."""
        return self._contexts is not None

    def engine(self, address: str) -> TlsEngine | None:
        """Return one end of a TLS connection to an address; None without TLS.

        Raises AuthenticationError for a host that no certificate can name.
        """
        if self._contexts is None:
            return None
        from hastore.security.tls_engine import TlsEngine

        try:
            host, _ = host_and_port(address)
            return TlsEngine(self._contexts.client(), server_side=False, host=host)
        except ValueError as failure:
            raise AuthenticationError(
                f"{failure}; name the node by its address, or by a name that its certificate has"
            ) from failure

    def tls_text(self, failure: str) -> str:
        """Return why TLS failed, with the file's name if it is this client's certificate."""
        own = self.security.tls_certificate
        if own is not None and "this side's certificate" in failure:
            failure = failure.replace("this side's certificate", f"this side's certificate {own}")
        return f"TLS: {failure}"

    def exchange(self) -> Exchange | None:
        """Return a new exchange, None without an identity; raises ConfigError for a bad key."""
        name, path = self.security.identity, self.security.key_file
        if name is None or path is None:
            return None
        from hastore.fs.private_files import MAX_KEY_FILE_BYTES, read_private
        from hastore.security.identity import key_problem
        from hastore.security.scram import ScramClient

        key = read_private(path, MAX_KEY_FILE_BYTES).decode("ascii", "replace").strip()
        problem = key_problem(key)
        if problem is not None:
            raise ConfigError(f"{path}: {problem}")
        return Exchange(name, ScramClient(name, key, secrets.token_urlsafe(18)))


class Exchange:
    """The client's side of one proof: what to send next, by what the node has sent."""

    def __init__(self, name: str, scram: ScramClient) -> None:
        self.name = name
        self._scram = scram

    def first(self) -> api.Auth:
        """Return the request that begins the exchange."""
        from hastore.security.scram import MECHANISM

        return api.Auth(RID, MECHANISM, self._scram.first())

    def follow(self, reply: api.Reply) -> api.Prove | None:
        """Return the next request; None once the node has proved itself too.

        Raises AuthenticationError if the node refuses the identity, or does not prove that it knows
        it.
        """
        if isinstance(reply, api.Challenge):
            return api.Prove(RID, self._scram.final(reply.message))
        if isinstance(reply, api.Welcome):
            self._scram.finish(reply.message)
            return None
        if isinstance(reply, api.Failed):
            known = f"identity {self.name}" in reply.reason
            raise AuthenticationError(
                reply.reason if known else f"identity {self.name}: {reply.reason}"
            )
        raise AuthenticationError(f"the node answered {type(reply).__name__} to a proof")


def make_prover(given: SecurityLike | Prover) -> Prover | None:
    """Return what a client's connections need; None without any security."""
    if isinstance(given, Prover):
        return given
    security = as_security(given)
    if security is None or security == Security():
        return None
    return Prover(security)
