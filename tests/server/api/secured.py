"""API servers that ask their clients who they are, with or without TLS."""

from __future__ import annotations

import contextlib
import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from hastore.client import Producer
from hastore.client.security import Security
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import ApiConfig
from hastore.errors import OutcomeUnknown
from hastore.protocol import api
from hastore.security.identities import Identities
from hastore.security.scram import MECHANISM, ScramClient
from hastore.security.tls_contexts import TlsContexts
from hastore.server.api.access import Access
from hastore.server.api.administering import CarryOut
from hastore.server.api.server import ApiParts, ApiServer, FrameDoor
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.process.wire import Wire, frame
from tests.security.conftest import IdentitiesText
from tests.security.pki import Pki


class Secured:
    """A folder with identities, keys and certificates, and the servers that use them."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.text = IdentitiesText()
        self.path = folder / "identities.yaml"
        self.notes: list[dict[str, Any]] = []
        self.backend = FakeBackend()
        self._pki: Pki | None = None

    @property
    def pki(self) -> Pki:
        """The CA, made when it is first needed."""
        if self._pki is None:
            self._pki = Pki(self.folder / "tls")
        return self._pki

    def identity(self, name: str, **rights: Any) -> Security:
        """Add an identity with a key; return what its client needs."""
        key = secrets.token_hex(32)
        path = self.folder / f"{name}.key"
        path.write_text(key + "\n")
        path.chmod(0o600)
        self.text.add(name, key, **rights)
        self.save()
        return Security(identity=name, key_file=str(path))

    def revoke(self, name: str) -> None:
        """Remove an identity."""
        self.text.drop(name)
        self.save()

    def save(self) -> None:
        """Write the file of identities, never half."""
        self.text.write(self.path)

    def note(self, action: str, **fields: Any) -> None:
        """Take a line of the audit log."""
        self.notes.append({"action": action, **fields})

    @contextlib.contextmanager
    def server(
        self,
        *,
        identities: bool = True,
        tls: bool = False,
        config: ApiConfig | None = None,
        clock: Clock = SYSTEM_CLOCK,
        make_door: Callable[[ApiParts], FrameDoor] | None = None,
        carry_out: CarryOut | None = None,
    ) -> Iterator[ApiServer]:
        """Run a server."""
        access = None
        if identities:
            self.save()
            access = Access(Identities(str(self.path)), self.note, clock=clock)
        contexts = TlsContexts(self.pki.node()) if tls else None
        running = ApiServer(
            "tcp://127.0.0.1:0",
            self.backend,
            config or ApiConfig(),
            on_failure=raise_failure,
            tls=contexts,
            access=access,
            make_door=make_door,
            carry_out=carry_out,
        )
        running.start()
        try:
            yield running
        finally:
            assert running.stop(60)
            assert running.failure is None


def ask(wire: Wire, request: api.Request) -> api.Reply:
    """Send a request and return the reply."""
    wire.send(frame(api.encode(request)))
    return api.decode_reply(wire.frame().body)


def prove(wire: Wire, security: Security) -> api.Reply:
    """Prove an identity; return the last reply."""
    assert security.identity and security.key_file
    key = pathlib.Path(security.key_file).read_text().strip()
    scram = ScramClient(security.identity, key, secrets.token_urlsafe(18))
    challenge = ask(wire, api.Auth(1, MECHANISM, scram.first()))
    if not isinstance(challenge, api.Challenge):
        return challenge
    reply = ask(wire, api.Prove(2, scram.final(challenge.message)))
    if isinstance(reply, api.Welcome):
        scram.finish(reply.message)
    return reply


def sends(producer: Producer) -> bool:
    """Put a message; False if a revocation came between the put and its answer."""
    try:
        return bool(producer.send_sync("orders", b"y", queue=0))
    except OutcomeUnknown:
        return False
