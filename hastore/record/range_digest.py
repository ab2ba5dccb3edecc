"""Digests of ranges of a log, by the names that the client API uses.

    xxh3-128   16 bytes; as fast as memory, finds any accidental difference
    sha256     32 bytes; cryptographic: nobody can make two ranges with the same digest

Both release the interpreter's lock while they take in bytes.
"""

import hashlib
from typing import Protocol

import xxhash

from hastore.errors import UsageError

DEFAULT_ALGORITHM = "xxh3-128"
ALGORITHMS = (DEFAULT_ALGORITHM, "sha256")


class Digest(Protocol):
    """A digest under way."""

    def update(self, data: memoryview, /) -> None:
        """Take in more bytes."""
        ...

    def digest(self) -> bytes:
        """Return the digest of the bytes so far."""
        ...


def new_digest(algorithm: str) -> Digest:
    """Begin a digest. Raises UsageError for an unknown algorithm."""
    if algorithm == DEFAULT_ALGORITHM:
        return xxhash.xxh3_128()
    if algorithm == "sha256":
        return hashlib.sha256(usedforsecurity=False)
    raise UsageError(f"{algorithm!r} is no digest; the digests are {', '.join(ALGORITHMS)}")
