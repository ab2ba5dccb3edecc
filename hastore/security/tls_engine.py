"""TlsEngine: one end of a TLS 1.3 connection, without a socket. Pure.

    ciphertext from the socket --receive()--> plaintext
    plaintext ---------------encrypt()------> ciphertext for the socket
    take_outgoing() ------------------------> handshake and alerts for the socket

After each `receive`, and after the constructor of a client's engine, send what `take_outgoing`
returns. A failure is a value: `failure` says in one line what is wrong and what to do, and every
later call does nothing. An engine must not be used by two threads at once.

With TLS 1.3 a client has finished its handshake before the server has checked the client's
certificate. If the server refuses the certificate, the client's `failure` says so at its next
`receive`.

The name of a node in its certificate is the URI `hastore:node/CLUSTER/GROUP/NUMBER` (`NodeName`).
"""

import re
import ssl
from dataclasses import dataclass
from typing import Any

NODE_URI = "hastore:node/"
_PART = "[A-Za-z0-9][A-Za-z0-9_.-]{0,126}"
_URI = re.compile(rf"{NODE_URI}({_PART})/({_PART})/([1-9][0-9]{{0,4}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class NodeName:
    """Which node of which group."""

    cluster: str
    group: str
    node: int

    @property
    def uri(self) -> str:
        """The URI that the node's certificate must have as an alternative name."""
        return f"{NODE_URI}{self.cluster}/{self.group}/{self.node}"

    def __str__(self) -> str:
        """Return the name for messages: `demo/g0 node 1`."""
        return f"{self.cluster}/{self.group} node {self.node}"


def parse_node_uri(uri: str) -> NodeName | None:
    """Return the node that the URI names; None for another URI."""
    found = _URI.fullmatch(uri)
    if found is None or int(found[3]) > 65_535:
        return None
    return NodeName(found[1], found[2], int(found[3]))


HANDSHAKE_BYTES_MAX = 64 * 1024  # received before the handshake is finished
READ_BYTES = 64 * 1024
SLICE_BYTES = 256 * 1024  # of plaintext, encrypted at once
TLS_HANDSHAKE, TLS_ALERT = 22, 21  # the first byte of a TLS record
# What a plain peer is told: a fatal alert "protocol version", as OpenSSL would send it.
NOT_TLS_ALERT = bytes((TLS_ALERT, 3, 3, 0, 2, 2, 70))

_EXPIRED, _NOT_YET, _PURPOSE = 10, 9, 26  # OpenSSL's X509_V_ERR_...
_UNKNOWN_ISSUER = (2, 7, 18, 19, 20, 21)
_HOST_NAMES = (62, 64)
_MAKE_NEW = "make it a new one with `hastore keys cert ... --renew`"
_VERIFY_TEXTS = {
    _EXPIRED: f"has expired; {_MAKE_NEW}",
    _NOT_YET: "is not valid yet; check the clocks of both machines",
    _PURPOSE: "is not for this use (a client's certificate cannot be a node's); "
    "give each node its own with `hastore keys cert -c NODE.yaml`",
    **dict.fromkeys(_UNKNOWN_ISSUER, "is not signed by the CA of this side; both need the same CA"),
}
# What the other end says in an alert, by a part of OpenSSL's name for it.
_ALERT_TEXTS = {
    "CERTIFICATE_REQUIRED": "asks for a certificate; configure certificate and key here",
    "CERTIFICATE_EXPIRED": f"refuses this side's certificate: expired, or not valid yet; "
    f"{_MAKE_NEW}, and check the clocks",
    "UNKNOWN_CA": "refuses this side's certificate: another CA has signed it; both need the same "
    "CA",
    "UNSUPPORTED_CERTIFICATE": "refuses this side's certificate: it is not for this use; "
    f"{_MAKE_NEW}",
    "BAD_CERTIFICATE": f"refuses this side's certificate: it is not valid there now; {_MAKE_NEW}, "
    "and check the clocks",
    "CERTIFICATE_UNKNOWN": f"refuses this side's certificate; {_MAKE_NEW}",
    "PROTOCOL_VERSION": "does not speak TLS 1.3 there; both ends need it",
}


def begins_tls(first: bytes) -> bool:
    """Return whether the first bytes of a connection are those of a TLS client; at least two."""
    return first[:2] == bytes((TLS_HANDSHAKE, 3))


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """What the other end's certificate says; it was verified against the CA."""

    common_name: str | None  # None without one, or with several
    uris: tuple[str, ...]
    not_after_s: float  # seconds since 1970
    not_before_s: float

    @property
    def client_name(self) -> str | None:
        """The name of the client whose certificate it is; None for a node's."""
        is_node = any(uri.startswith(NODE_URI) for uri in self.uris)
        return None if is_node else self.common_name

    @property
    def node(self) -> NodeName | None:
        """The node whose certificate it is; None for a client's, or with several such URIs."""
        names = [name for name in map(parse_node_uri, self.uris) if name is not None]
        return names[0] if len(names) == 1 else None


class TlsEngine:
    """One end of a TLS connection; see the module's text for how to drive it."""

    def __init__(
        self, context: ssl.SSLContext, *, server_side: bool, host: str | None = None
    ) -> None:
        """Begin a handshake; `host` is the server's name or address, which a client checks."""
        self.open = False  # the handshake is finished
        self.ended = False  # the other end has closed its side properly
        self.failure: str | None = None
        self.peer_is_plain = False  # the first bytes of the other end were not those of TLS
        self.peer: PeerCertificate | None = None  # after the handshake; None without a certificate
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._server_side = server_side
        self._host = host
        self._handshake_bytes = 0
        try:
            self._tls = context.wrap_bio(
                self._incoming, self._outgoing, server_side=server_side, server_hostname=host
            )
        except ValueError as error:  # UnicodeError too: the name cannot be that of a server
            problem = f"{host!r} cannot be checked against a certificate: {error}"
            raise ValueError(problem) from error
        if not server_side:
            self._shake()

    @property
    def has_input(self) -> bool:
        """Whether there may be plaintext to read; asking OpenSSL in vain costs an exception."""
        if not self.open or self.ended or self.failure is not None:
            return False
        return self._incoming.pending > 0 or self._tls.pending() > 0

    @property
    def has_outgoing(self) -> bool:
        """Whether `take_outgoing` has something to return."""
        return self._outgoing.pending > 0

    # -- in ----------------------------------------------------------------------------------------

    def feed(self, ciphertext: bytes | bytearray | memoryview) -> None:
        """Take bytes from the socket; `read_into` then returns their plaintext."""
        if self.failure is not None or self.ended or not len(ciphertext):
            return
        if not self.open:
            if not self._handshake_bytes and not self._begins_tls(ciphertext[0]):
                return
            self._handshake_bytes += len(ciphertext)
        self._incoming.write(ciphertext)
        if not self.open:
            self._shake()
            if not self.open and self._handshake_bytes > HANDSHAKE_BYTES_MAX:
                self._fail(f"{HANDSHAKE_BYTES_MAX} bytes did not finish the TLS handshake")

    def feed_eof(self) -> None:
        """Note that the socket has ended; without TLS's own end this is a failure."""
        if self.ended or self.failure is not None:
            return
        self._fail(
            "the connection ended without the end of TLS"
            if self.open
            else "the other end closed the connection in the middle of the TLS handshake"
        )

    def read_into(self, buffer: memoryview) -> int:
        """Put plaintext into the buffer; return how much. 0: no more is there now."""
        done, size = 0, len(buffer)
        while done < size:
            piece = self._read(size - done, buffer[done:])
            if not piece:
                break
            done += piece
        return done

    def receive(self, ciphertext: bytes | bytearray | memoryview) -> bytes:
        """Take bytes from the socket and return all plaintext that they complete."""
        self.feed(ciphertext)
        pieces: list[bytes] = []
        while True:
            piece = self._read(READ_BYTES, None)
            if not piece:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.append(piece)

    def _read(self, size: int, buffer: memoryview | None) -> Any:
        """Return plaintext (or its length, with a buffer) of one TLS record; empty, or 0: none."""
        if not self.has_input:
            return 0 if buffer is not None else b""
        try:
            piece = self._tls.read(size, buffer)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(failure_text(error, self._host))
        else:
            self.ended = not piece  # "close notify"
            return piece
        return 0 if buffer is not None else b""

    # -- out ---------------------------------------------------------------------------------------

    def take_outgoing(self) -> bytes:
        """Return the bytes that TLS itself has to send: handshake, alerts. Send them in order."""
        return self._outgoing.read() if self._outgoing.pending else b""

    def encrypt(self, plaintext: bytes | bytearray | memoryview) -> bytes:
        """Return the ciphertext to send, with what `take_outgoing` would return before it.

        Returns only the latter after a failure. Raises ValueError before the handshake is finished.
        """
        self.write(plaintext)
        return self.take_outgoing()

    def write(self, plaintext: bytes | bytearray | memoryview) -> None:
        """Encrypt; `take_outgoing` then returns the bytes. See `encrypt`."""
        if self.failure is not None:
            return
        if not self.open:
            raise ValueError("nothing is encrypted before the TLS handshake is finished")
        view = memoryview(plaintext).cast("B")
        try:
            while len(view):
                view = view[self._tls.write(view[:SLICE_BYTES]) :]
        except ssl.SSLError as error:
            self._fail(failure_text(error, self._host))

    def close(self) -> bytes:
        """End this side; return the bytes to send before the socket is closed."""
        if self.open and self.failure is None:
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass  # the other end has not ended its side yet; nothing waits for it
        return self.take_outgoing()

    # -- handshake ---------------------------------------------------------------------------------

    def _begins_tls(self, first: int) -> bool:
        if first == TLS_HANDSHAKE or (first == TLS_ALERT and not self._server_side):
            return True
        self.peer_is_plain = True
        self._fail(
            "the other end does not speak TLS; both ends must be configured for it, none falls "
            "back to plain"
        )
        if self._server_side:
            self._outgoing.write(NOT_TLS_ALERT)
        return False

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except (ssl.SSLError, ValueError) as error:
            self._fail(failure_text(error, self._host))
            return
        self.open = True
        self.peer = _peer_certificate(self._tls.getpeercert())

    def _fail(self, text: str) -> None:
        self.failure = text


def failure_text(error: Exception, host: str | None) -> str:
    """Return what is wrong with TLS and what to do, in one line; `host` is whom a client called."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the other end's certificate {_verify_text(error, host)}"
    reason = getattr(error, "reason", None) or str(error)
    if "ALERT" in reason:
        for part, text in _ALERT_TEXTS.items():
            if part in reason:
                return f"the other end {text}"
        return f"the other end ended TLS: {_plain_words(reason)}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the other end has no certificate; configure certificate and key there"
    if reason in ("UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE"):
        return "the other end does not speak TLS 1.3; both ends need it"
    return f"the other end broke TLS: {_plain_words(reason)}"


def _verify_text(error: ssl.SSLCertVerificationError, host: str | None) -> str:
    if error.verify_code in _HOST_NAMES:
        return (
            f"is not for {host}; connect to a name that it has, or make it a new one "
            "with `hastore keys cert`"
        )
    known = _VERIFY_TEXTS.get(error.verify_code)
    return known if known is not None else f"is not valid: {error.verify_message}"


def _plain_words(reason: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", reason.lower()).strip()
    return re.sub(r"^(ssl|tls)v[0-9]+ alert ", "", words)


def _peer_certificate(found: Any) -> PeerCertificate | None:
    """Return the fields of a verified certificate; None when the other end sent none."""
    if not found:
        return None
    subject = [pair for part in found.get("subject", ()) for pair in part]
    names = [value for key, value in subject if key == "commonName"]
    uris = tuple(value for key, value in found.get("subjectAltName", ()) if key == "URI")
    name = names[0] if len(names) == 1 else None
    begins_s, ends_s = (ssl.cert_time_to_seconds(found[key]) for key in ("notBefore", "notAfter"))
    return PeerCertificate(name, uris, float(ends_s), float(begins_s))
