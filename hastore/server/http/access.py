"""Who may read what over HTTP, on a node that has identities (docs/security.md).

/healthz is open. Everything else needs a proved identity, whatever its rights: by a client
certificate, or by a token, `Authorization: Bearer NAME:KEY` or the same as Basic. A token goes over
TLS or loopback only.
"""

import base64
import binascii

from hastore.addresses import is_loopback
from hastore.clock import Clock
from hastore.security.audit_log import Note
from hastore.security.identities import Identities
from hastore.security.tokens import Denied, Tokens
from hastore.server.http.exchange import Refusal

OPEN_PATHS = (b"/healthz",)
_HOW = (
    b"this node asks who you are: send a client certificate, or the header "
    b"Authorization: Bearer NAME:KEY, with a key that hastore keys new made\n"
)


class HttpAccess:
    """Decide whether a request is answered; one thread calls it."""

    def __init__(self, identities: Identities, note: Note, clock: Clock) -> None:
        self._identities = identities
        self._note = note
        self._tokens = Tokens(identities, clock)

    def refusal(
        self,
        path: bytes,
        authorization: bytes | None,
        address: str,
        *,
        encrypted: bool = False,
        common_name: str | None = None,
    ) -> Refusal | None:
        """Return how a request from `address`, "HOST:PORT", is refused; None: it is answered.

        `common_name` is that of the verified client certificate, None without one.
        """
        if path in OPEN_PATHS:
            return None
        if common_name is not None and self._identities.by_certificate(common_name) is not None:
            return None
        host = address.rpartition(":")[0].strip("[]")
        if authorization is None:
            claimed = None if common_name is None else f"certificate {common_name}"
            self._refused(claimed, address, "neither a token nor a certificate of an identity")
            return Refusal(401, _HOW)
        if not encrypted and not is_loopback(host):
            self._refused(None, address, "a token in the clear")
            return Refusal(403, b"a token goes over TLS only; change this key, it was readable\n")
        found = self._tokens.prove(_token(authorization), host)
        if not isinstance(found, Denied):
            return None
        self._refused(found.claimed, address, found.reason)
        return Refusal(429 if found.again else 401, found.reason.encode() + b"\n")

    def _refused(self, claimed: str | None, address: str, reason: str) -> None:
        self._note("http", outcome="refused", identity=claimed, address=address, reason=reason)


def _token(authorization: bytes) -> str:
    """Return NAME:KEY of the header's value; "" if it has none."""
    scheme, _, rest = authorization.strip().partition(b" ")
    try:
        if scheme.lower() == b"basic":
            rest = base64.b64decode(rest.strip(), validate=True)
        elif scheme.lower() != b"bearer":
            return ""
        return rest.strip().decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return ""
