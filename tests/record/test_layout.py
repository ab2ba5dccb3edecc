"""The Structs and dtypes of layout.py read what the codec wrote; other modules have no numbers."""

import ast
import pathlib
import random

import numpy as np
import pytest

from hastore.record import layout
from hastore.record.codec import Host, Record, encode_record
from hastore.record.layout import (
    FLAG_BORN_IPV6,
    FLAG_IPV6,
    FLAG_STORE_IPV6,
    header_dtype,
    header_struct,
    numpy_format,
    offset_of,
)
from tests.random_records import random_record
from tests.sources import nodes

PACKAGE = pathlib.Path(layout.__file__).parent.parent
FAMILIES = (0, FLAG_BORN_IPV6, FLAG_STORE_IPV6, FLAG_IPV6)
INTEGERS = (
    *("size", "magic", "body_crc", "queue_id", "flag", "queue_offset", "physical_offset"),
    *("sys_flag", "born_timestamp_ms", "store_timestamp_ms", "reconsume_times"),
    *("prepared_transaction_offset", "body_length"),
)
# docs/formats.md, and RocketMQ's MessageExtEncoder
OFFSETS = {
    "size": 0, "magic": 4, "body_crc": 8, "queue_id": 12, "flag": 16, "queue_offset": 20,
    "physical_offset": 28, "sys_flag": 36, "born_timestamp_ms": 40, "born_address": 48,
    "born_port": 52, "store_timestamp_ms": 56, "store_address": 64, "store_port": 68,
    "reconsume_times": 72, "prepared_transaction_offset": 76, "body_length": 84, "body": 88,
}  # fmt: skip


def record_between(chance: random.Random, ipv6_flags: int) -> Record:
    """Return a random record between hosts of these families."""
    born, stored = (
        Host(chance.randbytes(16 if ipv6_flags & flag else 4), chance.randrange(1 << 16))
        for flag in (FLAG_BORN_IPV6, FLAG_STORE_IPV6)
    )
    flags = ipv6_flags | chance.choice((0, 1, 4, 8, 0x80))
    return random_record(chance, born_host=born, store_host=stored, sys_flag=flags)


def value_of(record: Record, name: str) -> object:
    """Return the value that a field of the encoded record must have."""
    known: dict[str, object] = {
        "unsigned_size": record.size,
        "body_length": len(record.body),
        "born_address": record.born_host.address,
        "born_port": record.born_host.port,
        "born_host": record.born_host.packed,
        "store_address": record.store_host.address,
        "store_port": record.store_host.port,
        "store_host": record.store_host.packed,
    }
    return known[name] if name in known else getattr(record, name)


@pytest.mark.parametrize("ipv6_flags", FAMILIES)
@pytest.mark.parametrize("seed", range(5))
def test_each_field_is_where_the_codec_writes_it(ipv6_flags: int, seed: int) -> None:
    chance = random.Random(seed)
    record = record_between(chance, ipv6_flags)
    raw = encode_record(record)
    names = [name for name in OFFSETS if name != "body"]
    for name in (*names, "unsigned_size", "born_host", "store_host"):
        (found,) = header_struct(name, ipv6_flags=ipv6_flags).unpack_from(raw)
        assert found == value_of(record, name), name
        at = offset_of(name, ipv6_flags=ipv6_flags)
        (alone,) = header_struct(name, ipv6_flags=ipv6_flags, start=at).unpack_from(raw, at)
        assert alone == found, name
    some = sorted(chance.sample(names, 5), key=names.index)
    found = header_struct(*some, ipv6_flags=ipv6_flags).unpack_from(raw)
    assert list(found) == [value_of(record, name) for name in some]
    body_at = offset_of("body", ipv6_flags=ipv6_flags)
    assert raw[body_at : body_at + len(record.body)] == record.body
    assert header_struct("body_length", ipv6_flags=ipv6_flags).size == body_at
    assert layout.HEADER_SIZES[ipv6_flags] == layout.HEADERS[ipv6_flags].size == body_at
    stored_at = layout.store_at(record.sys_flag)
    assert int.from_bytes(raw[stored_at : stored_at + 8]) == record.store_timestamp_ms


@pytest.mark.parametrize("seed", range(5))
def test_a_dtype_reads_the_same_as_the_structs(seed: int) -> None:
    record = record_between(random.Random(seed), 0)
    raw = encode_record(record)
    header = np.frombuffer(raw, np.dtype(header_dtype(*INTEGERS)), count=1)
    assert header.itemsize == layout.HEADER_SIZE
    for name in INTEGERS:
        assert header[name][0] == value_of(record, name), name
        (one,) = np.frombuffer(raw, numpy_format(name), count=1, offset=offset_of(name))
        assert one == value_of(record, name), name


def test_the_offsets_and_sizes_are_those_of_the_format() -> None:
    assert {name: offset_of(name) for name in OFFSETS} == OFFSETS
    assert (layout.HEADER_SIZE, layout.MIN_RECORD_SIZE, layout.IPV6_EXTRA) == (88, 91, 12)
    assert (layout.BLANK_SIZE, layout.OFFSETS_AT, layout.STORE_AT) == (8, 20, 56)


def test_fields_out_of_order_are_refused() -> None:
    with pytest.raises(Exception, match="bad char in struct format"):
        header_struct("magic", "size")


def test_no_other_module_has_the_numbers() -> None:
    own = {
        *(layout.HEADER_SIZE, layout.MIN_RECORD_SIZE),
        *(layout.V1_MAGIC, layout.V2_MAGIC, layout.BLANK_MAGIC),
    }
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == pathlib.Path(layout.__file__):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Constant) and type(node.value) is int:
                assert node.value not in own, f"{path}:{node.lineno}: import it from record.layout"
