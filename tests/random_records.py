"""Random records of all forms, by a seed: both versions, IPv4 and IPv6 hosts, unusual topics."""

import random
import zlib

from hastore.record.codec import Host, Record
from hastore.record.layout import FLAG_BORN_IPV6, FLAG_STORE_IPV6, V1_MAGIC, V2_MAGIC
from hastore.record.properties import encode_properties


def random_host(chance: random.Random) -> Host:
    """Return an IPv4 host, or one time in five an IPv6 host."""
    size = 16 if chance.random() < 0.2 else 4
    return Host(chance.randbytes(size), chance.randrange(65_536))


def random_record(chance: random.Random, **fixed: object) -> Record:
    """Return a valid record with random fields; `fixed` overrides some of them."""
    v2 = chance.random() < 0.2
    letters = "abcXYZ%_-é漢"
    topic = (
        chance.choice(("t", "bench", "", "x" * 127)) if not v2 else "T" * chance.choice((1, 300))
    )
    if not v2 and chance.random() < 0.2:
        topic = "".join(chance.choices(letters, k=chance.randint(1, 20)))
    names = ("KEYS", "TAGS", "XKEYS", "UNIQ_KEY", "p", "HS_SEQ")
    pairs = [
        (chance.choice(names), "".join(chance.choices(letters + " ", k=chance.randint(0, 12))))
        for _ in range(chance.choice((0, 0, 1, 3)))
    ]
    properties = encode_properties(pairs)
    if properties and chance.random() < 0.3:
        properties = properties[:-1] or b""  # RocketMQ 4.9 leaves out the last separator
    body = chance.randbytes(chance.choice((0, 1, 10, 200, 1024, 5_000)))
    born, stored = random_host(chance), random_host(chance)
    flags = chance.choice((0, 0, 1, 4, 8))
    flags |= FLAG_BORN_IPV6 * born.is_ipv6 | FLAG_STORE_IPV6 * stored.is_ipv6
    fields: dict[str, object] = {
        "body": body,
        "topic": topic,
        "queue_id": chance.randrange(2**31),
        "properties": properties,
        "flag": chance.randrange(-(2**31), 2**31),
        "sys_flag": flags,
        "queue_offset": chance.randrange(2**62),
        "physical_offset": chance.randrange(2**62),
        "body_crc": zlib.crc32(body) & 0x7FFFFFFF,
        "born_timestamp_ms": chance.randrange(2**42),
        "born_host": born,
        "store_timestamp_ms": chance.randrange(2**42),
        "store_host": stored,
        "reconsume_times": chance.randrange(100),
        "prepared_transaction_offset": chance.randrange(2**62),
        "magic": V2_MAGIC if v2 else V1_MAGIC,
    }
    return Record(**(fields | fixed))  # type: ignore[arg-type]
