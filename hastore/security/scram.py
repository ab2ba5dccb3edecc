"""SCRAM-SHA-256 (RFC 5802, RFC 7677): both sides prove that they know a key. Pure.

Neither side sends the key:

    client                                       server
    client-first   n,,n=NAME,r=NONCE         ->
                                             <-  server-first   r=NONCE+OWN,s=SALT,i=ITERATIONS
    client-final   c=biws,r=NONCE+OWN,p=PROOF ->
                                             <-  server-final   v=SIGNATURE

The server keeps StoredKey and ServerKey, from which the key cannot be computed. There is no channel
binding: Python's TLS 1.3 has none to offer. Every message is text of at most MAX_MESSAGE
characters. Anything unexpected raises AuthenticationError, and the exchange cannot go on.

An identity may have several keys while one replaces another. They share salt and iterations, so one
challenge fits all of them.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from hastore.errors import AuthenticationError

MECHANISM = "SCRAM-SHA-256"
MAX_MESSAGE = 1024
SALT_BYTES = 16
KEY_BYTES = hashlib.sha256().digest_size
# RFC 7677 asks for 4096 at least. The keys are random, so more would only cost time. The upper end
# bounds what a hostile server can make a client compute, and a file a node.
DEFAULT_ITERATIONS, MIN_ITERATIONS, MAX_ITERATIONS = 4096, 4096, 65_536
# No name looks like a key, so a key in the place of a name is refused before anybody logs it.
NAME = re.compile(r"(?![0-9a-fA-F]{64}\Z)[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", re.ASCII)

_NONCE = r"[\x21-\x2b\x2d-\x7e]{1,128}"
_CLIENT_FIRST = re.compile(rf"([ny]),,(n=([^,]{{1,256}}),r=({_NONCE}))", re.ASCII)
_SERVER_FIRST = re.compile(r"r=([\x21-\x2b\x2d-\x7e]{2,256}),s=([^,]+),i=([1-9][0-9]{0,8})")
_CLIENT_FINAL = re.compile(r"(c=([^,]+),r=([\x21-\x2b\x2d-\x7e]{2,256})),p=([^,]+)", re.ASCII)
_NO_VERIFIER = bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Verifier:
    """What a server keeps of a key: enough to check it, not enough to use it as a client."""

    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The salt and iterations of a challenge and the keys that may answer it, perhaps none."""

    salt: bytes
    iterations: int
    verifiers: tuple[Verifier, ...]


def derive(key: str, salt: bytes, iterations: int) -> Verifier:
    """Return the verifier of a key; takes about 0.3 microseconds per iteration."""
    client_key, server_key = _keys(key, salt, iterations)
    return Verifier(_sha256(client_key), server_key)


def verifies(key: str, credentials: Credentials) -> Verifier | None:
    """Return the verifier that belongs to a key that was sent whole, or None."""
    given = derive(key, credentials.salt, credentials.iterations)
    found: Verifier | None = None
    for one in credentials.verifiers:
        if hmac.compare_digest(given.stored_key, one.stored_key):
            found = one
    return found


def mock_credentials(secret: bytes, name: str) -> Credentials:
    """Return the challenge for a name that does not exist: always the same for one name.

    A stranger cannot tell it from the challenge for a name that exists.
    """
    salt = hmac.digest(secret, b"hastore mock salt\0" + name.encode(), "sha256")[:SALT_BYTES]
    return Credentials(salt, DEFAULT_ITERATIONS, ())


class ScramServer:
    """The server's side of one exchange.

    `lookup` returns the credentials of a name; for an unknown one, mock credentials. `nonce` is
    fresh and random, at least 18 characters. After `prove`, `name` and `verifier` say who it is.
    """

    def __init__(self, lookup: Callable[[str], Credentials], nonce: str) -> None:
        self._lookup = lookup
        self._nonce = nonce
        self._asked: tuple[str, str, str, Credentials] | None = None  # header, nonce, log, who
        self.name: str | None = None  # whose key `prove` has found right, None before
        self.claimed: str | None = None  # the name in the first message
        self.verifier: Verifier | None = None

    def challenge(self, client_first: str) -> str:
        """Return the server-first message for the client's first one."""
        if self.claimed is not None:
            raise AuthenticationError("a second first message; begin a new exchange")
        if client_first.startswith("p="):
            raise AuthenticationError(f"this server has no channel binding; use {MECHANISM}")
        match = _CLIENT_FIRST.fullmatch(_bounded(client_first))
        if match is None:
            raise AuthenticationError("the first message is not n,,n=NAME,r=NONCE")
        header, bare, name, nonce = match.groups()
        if not NAME.fullmatch(name):
            raise AuthenticationError("the first message has no valid name of an identity")
        self.claimed = name
        who = self._lookup(name)
        nonce += self._nonce
        server_first = f"r={nonce},s={_b64(who.salt)},i={who.iterations}"
        self._asked = (_b64(f"{header},,".encode()), nonce, f"{bare},{server_first}", who)
        return server_first

    def prove(self, client_final: str) -> str:
        """Return the server-final message if the proof is right; AuthenticationError if not."""
        asked, self._asked = self._asked, None
        if asked is None:
            raise AuthenticationError("a proof without a challenge; begin a new exchange")
        header, nonce, so_far, who = asked
        match = _CLIENT_FINAL.fullmatch(_bounded(client_final))
        if match is None:
            raise AuthenticationError("the final message is not c=BINDING,r=NONCE,p=PROOF")
        without_proof, binding, echoed, proof_text = match.groups()
        if binding != header:
            raise AuthenticationError("the final message has another header than the first one")
        if not hmac.compare_digest(echoed.encode(), nonce.encode()):
            raise AuthenticationError("the final message has another nonce; was it replayed?")
        proof = _decoded(proof_text, "proof", KEY_BYTES)
        message = f"{so_far},{without_proof}".encode()
        found: Verifier | None = None
        # An unknown name takes the time of a name with one key.
        for one in who.verifiers or (Verifier(_NO_VERIFIER, _NO_VERIFIER),):
            signature = hmac.digest(one.stored_key, message, "sha256")
            stored = _sha256(_xor(proof, signature))
            if hmac.compare_digest(stored, one.stored_key) and who.verifiers:
                found = one
        if found is None:
            raise AuthenticationError(
                f"identity {self.claimed} is unknown here or has another key; "
                "check its name and key file"
            )
        self.name, self.verifier = self.claimed, found
        return f"v={_b64(hmac.digest(found.server_key, message, 'sha256'))}"


class ScramClient:
    """The client's side of one exchange, by `name` and `key`; `nonce` is fresh and random."""

    def __init__(self, name: str, key: str, nonce: str) -> None:
        if not NAME.fullmatch(name):
            raise AuthenticationError("the client's name cannot be that of an identity")
        self._key = key
        self._nonce = nonce
        self._bare = f"n={name},r={nonce}"
        self._expected: bytes | None = None
        self.done = False  # the server has proved that it knows the verifier too

    def first(self) -> str:
        """Return the client-first message."""
        return f"n,,{self._bare}"

    def final(self, server_first: str) -> str:
        """Return the client-final message; AuthenticationError for a challenge that is not one."""
        if self._expected is not None or self.done:
            raise AuthenticationError("a second challenge in one exchange")
        match = _SERVER_FIRST.fullmatch(_bounded(server_first))
        if match is None:
            raise AuthenticationError("the server's challenge is not r=NONCE,s=SALT,i=ITERATIONS")
        nonce, salt_text, iterations_text = match.groups()
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise AuthenticationError("the server's challenge answers another client's message")
        iterations = int(iterations_text)
        if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            raise AuthenticationError(
                f"the server asks for {iterations} iterations; "
                f"{MIN_ITERATIONS} to {MAX_ITERATIONS} are accepted"
            )
        salt = _decoded(salt_text, "salt", None)
        client_key, server_key = _keys(self._key, salt, iterations)
        without_proof = f"c=biws,r={nonce}"
        message = f"{self._bare},{server_first},{without_proof}".encode()
        signature = hmac.digest(_sha256(client_key), message, "sha256")
        self._expected = hmac.digest(server_key, message, "sha256")
        return f"{without_proof},p={_b64(_xor(client_key, signature))}"

    def finish(self, server_final: str) -> None:
        """Check that the server knows the verifier; AuthenticationError if it does not."""
        expected, self._expected = self._expected, None
        if expected is None:
            raise AuthenticationError("the server's last message came before its challenge")
        if not _bounded(server_final).startswith("v="):
            raise AuthenticationError("the server's last message is not v=SIGNATURE")
        signature = _decoded(server_final[2:], "signature", KEY_BYTES)
        if not hmac.compare_digest(signature, expected):
            raise AuthenticationError(
                "the server does not know this identity's key: it is not the node it claims to be"
            )
        self.done = True


def _keys(key: str, salt: bytes, iterations: int) -> tuple[bytes, bytes]:
    """Return ClientKey and ServerKey."""
    salted = hashlib.pbkdf2_hmac("sha256", key.encode(), salt, iterations)
    return hmac.digest(salted, b"Client Key", "sha256"), hmac.digest(
        salted, b"Server Key", "sha256"
    )


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bounded(message: str) -> str:
    if len(message) > MAX_MESSAGE:
        raise AuthenticationError(
            f"a message of {len(message)} characters; at most {MAX_MESSAGE} are allowed"
        )
    return message


def _decoded(text: str, what: str, size: int | None) -> bytes:
    """Return base64's bytes; AuthenticationError unless `text` is exactly their one spelling."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error) as broken:
        raise AuthenticationError(f"the {what} is not base64") from broken
    if _b64(data) != text or (len(data) != size if size else not 8 <= len(data) <= 64):
        raise AuthenticationError(f"the {what} has a wrong length or form")
    return data
