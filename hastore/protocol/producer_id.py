"""Which producer ids belong to one identity alone. Pure.

An HS_PID of the form `ownHHHHHHHHHHHH...`, with the first 12 hex digits of the SHA-256 of an
identity's name, is that identity's: a node with identities takes it from no other. So who can read
the ids of another identity's producers cannot use them to have its messages taken for repeats.
Every node can check this without a memory. Other ids are anybody's.
"""

import hashlib
import re

_OWN = "own"
_DIGITS = 12
_OWNED = re.compile(rb"own[0-9a-f]{12}")


def own_prefix(identity: str) -> str:
    """Return how the producer ids that belong to an identity begin: letters and digits."""
    return _OWN + hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]


def is_anothers(producer_id: bytes, own: bytes) -> bool:
    """Return whether a producer id belongs to another identity than that with the prefix `own`."""
    return not producer_id.startswith(own) and _OWNED.match(producer_id) is not None
