"""Java's String.hashCode of "topic#key", quickly: the key index needs one for every key of every
record.
 hash(a + b) = hash(a) * 31**len(b) + hash(b), all modulo 2**32: the topic's part is kept, and the
key's is a sum of products that runs in C. Strings are hashed over their UTF-16 units.
"""

import struct
from operator import mul

from hastore.record.codec import java_hash_code

_MASK = 0xFFFFFFFF
_QUICK_UNITS = 255  # longer keys take the plain loop
_CACHE_LIMIT = 8192
_POWERS = [pow(31, exponent, 1 << 32) for exponent in range(_QUICK_UNITS + 1)]


class KeyHasher:
    """Hash keys of topics; not for several threads at once."""

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}
        self._weights: list[tuple[int, ...] | None] = [None] * (_QUICK_UNITS + 1)

    def key_hash(self, topic: str, key: bytes) -> int:
        """Return keyHash: |hashCode("topic#key")|, or 0 for the one without absolute value."""
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


def keys_of(properties: bytes) -> list[bytes]:
    """Return what the key index holds of a record: UNIQ_KEY, then each of KEYS.

    Of a name that comes twice the last counts, as with RocketMQ.
    """
    unique: bytes | None = None
    keys: bytes | None = None
    for piece in properties.split(b"\x02"):
        if piece.startswith(b"KEYS\x01"):
            keys = piece[5:] or keys
        elif piece.startswith(b"UNIQ_KEY\x01"):
            unique = piece[9:] or unique
    found = [unique] if unique else []
    if keys:
        found += [key for key in keys.split(b" ") if key]
    return found
