"""Tokens: an identity proved by its key sent whole, `NAME:KEY`, as HTTP needs it.

Checking a key costs some milliseconds of CPU, once: a good token is remembered by its HMAC under a
secret of this process, and costs microseconds from then on. Wrong tokens are bounded per source and
in all, so that a flood costs at most ALL_PER_S checks a second, and nobody whose token is
remembered waits for it.
"""

import collections
import hmac
import secrets
import threading
from dataclasses import dataclass

from hastore.clock import Clock
from hastore.security.identities import Identities, Proof
from hastore.security.identity import key_problem
from hastore.security.scram import NAME, verifies

SOURCE_PER_S = 4  # checks of keys for one source
ALL_PER_S = 20
MAX_TOKEN = 256
MAX_REMEMBERED = 256
_WINDOW_MS = 1_000.0


@dataclass(frozen=True, slots=True)
class Denied:
    """Why a token proves nothing; `again`: too many were checked, the same may be good later."""

    reason: str
    claimed: str | None = None  # the name in the token, if it can be one
    again: bool = False


class Tokens:
    """Check tokens against the identities. Thread-safe."""

    def __init__(self, identities: Identities, clock: Clock) -> None:
        self._identities = identities
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._remembered: dict[bytes, Proof] = {}
        self._since_ms = clock.monotonic_ms()
        self._checked: collections.Counter[str] = collections.Counter()

    def prove(self, token: str, source: str) -> Proof | Denied:
        """Return the proof of a token from `source`, a host."""
        self._identities.refresh(0)
        name, _, key = token.partition(":")
        if len(token) > MAX_TOKEN or not NAME.fullmatch(name) or key_problem(key) is not None:
            return Denied("the token is not NAME:KEY, with a key that `hastore keys new` made")
        digest = hmac.digest(self._secret, token.encode(), "sha256")
        with self._lock:
            known = self._remembered.get(digest)
            if known is not None:
                still = self._identities.still(known)
                if still is not None:
                    return still
                del self._remembered[digest]
            if not self._may_check(source):
                return Denied("too many keys were checked just now; try again", name, again=True)
        # An unknown name takes as long as a known one.
        verifier = verifies(key, self._identities.credentials(name))
        proof = None
        if verifier is not None:
            proof = self._identities.still_key(name, verifier)
        if proof is None:
            return Denied(
                f"identity {name} is unknown here or has another key; check its name and key", name
            )
        with self._lock:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.pop(next(iter(self._remembered)))
            self._remembered[digest] = proof
        return proof

    def _may_check(self, source: str) -> bool:
        now = self._clock.monotonic_ms()
        if now - self._since_ms >= _WINDOW_MS:
            self._since_ms = now
            self._checked.clear()
        if self._checked.get(source, 0) >= SOURCE_PER_S or self._checked.total() >= ALL_PER_S:
            return False
        self._checked[source] += 1
        return True
