"""Hashes over the log: Java's hash of a key, digests of ranges.

Records are selected by Java's String.hashCode of their tag, which the consume queue has.

The key index needs Java's String.hashCode of "topic#key" for every key of every record. Modulo
2**32, this holds:

    hash(a + b) = hash(a) * 31**len(b) + hash(b)

So KeyHasher caches the hash of each "topic#", and adds the key's hash. That hash is computed as a
sum of products, which runs in C. Strings are hashed by their UTF-16 units.

Digests of ranges have the names that the client API uses. Both release the interpreter's lock while
they take in bytes.

    xxh3-128   16 bytes; as fast as memory, finds any accidental difference
    sha256     32 bytes; cryptographic: nobody can make two ranges with the same digest
"""

import hashlib
import struct
from functools import lru_cache
from operator import mul
from typing import Protocol
from weakref import WeakValueDictionary

import xxhash

from hastore.errors import UsageError

_MASK = 0xFFFFFFFF
_QUICK_UNITS = 255  # a longer key is hashed by a plain loop
_CACHE_LIMIT = 8192
_JAVA_BLANKS = "".join(map(chr, range(33)))  # what String.trim removes
_POWERS = [pow(31, exponent, 1 << 32) for exponent in range(_QUICK_UNITS + 1)]


def java_hash_code(text: str) -> int:
    """Return Java's String.hashCode, over UTF-16 units, as a signed 32-bit integer."""
    value = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (31 * value + unit) & 0xFFFFFFFF
    else:
        for (unit,) in struct.iter_unpack(">H", text.encode("utf-16-be", "surrogatepass")):
            value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


_EXPRESSIONS_KEPT = 1_024
_EXPRESSION_KEPT_MAX = 256  # characters


def tag_codes(expression: str) -> frozenset[int] | None:
    """Return the hashes of the tags in "a || b", without their signs; None if all are wanted.

    As in RocketMQ, "" and "*" mean all. A record has no tag, or one. Raises UsageError for an
    expression of bars alone.
    """
    if not expression or expression == "*":
        return None
    if len(expression) <= _EXPRESSION_KEPT_MAX:
        return _kept_codes(expression)
    codes = _in_use.get(expression)
    if codes is None:
        codes = _in_use[expression] = _codes_of(expression)
    return codes


def _codes_of(expression: str) -> frozenset[int]:
    if not expression.replace("||", ""):
        raise UsageError(f'{expression:.20} names no tag; write "a || b", or * for all')
    return frozenset(java_hash_code(tag) & _MASK for tag in tags_of(expression))


def tags_of(expression: str) -> list[str]:
    """Return the tags in "a || b"; "*" is one like others here."""
    tags = (tag.strip(_JAVA_BLANKS) for tag in expression.split("||"))
    return [tag for tag in tags if tag]


_kept_codes = lru_cache(_EXPRESSIONS_KEPT)(_codes_of)
# Of longer expressions, as long as somebody has them: those who have the same share one set.
_in_use: WeakValueDictionary[str, frozenset[int]] = WeakValueDictionary()


class KeyHasher:
    """Hash keys together with their topics. Not thread-safe."""

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}
        self._weights: list[tuple[int, ...] | None] = [None] * (_QUICK_UNITS + 1)

    def key_hash(self, topic: str, key: bytes) -> int:
        """Return keyHash as RocketMQ does: |hashCode("topic#key")|, or 0 if hashCode is -2**31."""
        if key.isascii():
            units: bytes | tuple[int, ...] = key
        else:
            wide = key.decode("utf-8", "replace").encode("utf-16-be", "surrogatepass")
            units = struct.unpack(f">{len(wide) // 2}H", wide)
        length = len(units)
        if length > _QUICK_UNITS:
            value = java_hash_code(f"{topic}#{key.decode('utf-8', 'replace')}") & _MASK
        else:
            prefix = self._prefixes.get(topic)
            if prefix is None:
                prefix = self.prefix(topic)
            weights = self._weights[length]
            if weights is None:
                weights = self._weights[length] = tuple(_POWERS[:length][::-1])
            value = (prefix * _POWERS[length] + sum(map(mul, units, weights))) & _MASK
        if value & 0x80000000:
            value = 0x100000000 - value
            return 0 if value == 0x80000000 else value
        return value

    def prefix(self, topic: str) -> int:
        """Return the hash of "topic#"."""
        value = self._prefixes.get(topic)
        if value is None:
            if len(self._prefixes) >= _CACHE_LIMIT:
                self._prefixes.clear()
            value = java_hash_code(topic + "#") & _MASK
            self._prefixes[topic] = value
        return value


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
