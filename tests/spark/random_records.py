"""Random records for property tests, and their rows as the codec reads them, one at a time."""

import zlib

from hypothesis import strategies as st

from hastore.record.codec import Host, Record, encode_record
from hastore.record.layout import V1_MAGIC, V2_MAGIC
from hastore.record.properties import find_property

PORT = st.integers(0, 65535)
IPV4 = st.builds(Host, st.binary(min_size=4, max_size=4), PORT)
HOSTS = IPV4 | st.builds(Host, st.binary(min_size=16, max_size=16), PORT)
NAMES = st.sampled_from(["KEYS", "TAGS", "XKEYS", "KEY", "UNIQ_KEY", "HS_PID", "TTL", "é"])
VALUES = st.text("aK\xe9 ", max_size=6)
INNER_BATCH = 0xC0
PACKED = 0x301  # compressed by zlib


@st.composite
def properties(draw):
    """Return raw properties, most of them well formed."""
    pairs = draw(st.lists(st.tuples(NAMES, VALUES), max_size=4))
    raw = "".join(f"{name}\x01{value}\x02" for name, value in pairs).encode()
    if draw(st.booleans()):
        raw = raw.removesuffix(b"\x02")  # as RocketMQ 4.9 writes it
    if draw(st.integers(0, 9)) == 0:
        raw = b"no separator"
    return raw


@st.composite
def records(draw, hosts=HOSTS, magics=(V1_MAGIC, V2_MAGIC), packed=False):
    """Return a Record; with `packed` its body may be compressed, or an inner batch."""
    born, store = draw(hosts), draw(hosts)
    flags = (0x10 if born.is_ipv6 else 0) | (0x20 if store.is_ipv6 else 0)
    body = draw(st.binary(max_size=20))
    if packed:
        kind = draw(st.sampled_from([0, 0, INNER_BATCH, PACKED]))
        flags |= kind
        body = zlib.compress(body) if kind == PACKED else body
    return Record(
        body=body,
        topic=draw(st.sampled_from(["a", "TopicA", "中文"])),
        queue_id=draw(st.integers(0, 2**31 - 1)),
        properties=draw(properties()),
        sys_flag=flags,
        queue_offset=draw(st.integers(0, 2**63 - 1)),
        body_crc=draw(st.integers(0, 2**31 - 1)),
        born_timestamp_ms=draw(st.integers(0, 2**40)),
        born_host=born,
        store_timestamp_ms=draw(st.integers(0, 2**40)),
        store_host=store,
        reconsume_times=draw(st.integers(0, 9)),
        magic=draw(st.sampled_from(magics)),
    )


def expected_row(record):
    """Return the columns of a record, but for its times."""
    key = find_property(record.properties, b"KEYS")
    names = {name for name, _ in record.property_pairs}
    hidden = {"KEYS", "TAGS", "HS_PID"} | ({"UNIQ_KEY", "TTL"} if "UNIQ_KEY" in names else set())
    pairs = [{"key": n, "value": v.encode()} for n, v in record.property_pairs if n not in hidden]
    packed = record.sys_flag & PACKED == PACKED
    return {
        "key": key,
        "value": zlib.decompress(record.body) if packed else record.body,
        "topic": record.topic,
        "partition": record.queue_id,
        "offset": record.queue_offset,
        "timestampType": 1,
        "headers": pairs or None,
        "physicalOffset": record.physical_offset,
        "size": record.size,
        "sysFlag": record.sys_flag,
        "bodyCrc": record.body_crc,
        "msgId": record.message_id,
        "tags": record.tags,
        "bornHost": record.born_host.text,
        "storeHost": record.store_host.text,
        "reconsumeTimes": record.reconsume_times,
        "record": encode_record(record),
    }
