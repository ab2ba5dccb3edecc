"""Hashes of keys equal Java's; keys are found in the properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.record.hashes import KeyHasher, java_hash_code
from hastore.record.properties import keys_of


@given(st.text(max_size=20), st.text(max_size=300).filter(lambda key: "\ud800" not in key))
def test_hash_is_javas(topic: str, key: str) -> None:
    if any("\ud800" <= unit <= "\udfff" for unit in topic + key):
        return
    value = abs(java_hash_code(f"{topic}#{key}"))
    expected = 0 if value == 1 << 31 else value
    assert KeyHasher().key_hash(topic, key.encode()) == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [("", 0), ("a", 97), ("TagA", 2598919), ("polygenelubricants", -(2**31)), ("😀", 1772899)],
)
def test_hash_codes_of_java(text: str, code: int) -> None:
    assert java_hash_code(text) == code


def test_hash_without_absolute_value_is_0() -> None:
    """hashCode("polygenelubricants") is the least integer."""
    hasher = KeyHasher()
    hasher._prefixes["x"] = 0
    assert java_hash_code("polygenelubricants") == -(1 << 31)
    assert hasher.key_hash("x", b"polygenelubricants") == 0


def test_keys_of_properties() -> None:
    assert keys_of(b"KEYS\x01a  b \x02UNIQ_KEY\x01u\x02") == [b"u", b"a", b"b"]
    assert keys_of(b"XKEYS\x01a\x02KEYS\x01\x02") == []
    assert keys_of(b"KEYS\x01a\x02KEYS\x01b") == [b"b"]
