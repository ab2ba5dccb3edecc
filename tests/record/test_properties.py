"""Properties in the form of RocketMQ, and the names of topics that a client may create."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hastore.errors import MessageIllegalError
from hastore.record.properties import (
    check_topic,
    decode_properties,
    encode_properties,
    find_property,
    stored_tags,
)

texts = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), max_size=20
)


@given(st.lists(st.tuples(texts, texts), max_size=6))
@settings(deadline=None, print_blob=True)
def test_properties_keep_order_and_empty_values(pairs: list[tuple[str, str]]) -> None:
    raw = encode_properties(pairs)
    assert decode_properties(raw) == pairs
    assert decode_properties(raw[:-1]) == pairs  # as RocketMQ 4.9 stores them
    for name, value in dict(reversed(pairs)).items():
        assert find_property(raw, name.encode()) == value.encode()


def test_a_name_that_ends_alike_is_another_property() -> None:
    raw = encode_properties([("MYKEYS", "a"), ("KEYS", "b")])
    assert find_property(raw, b"KEYS") == b"b"
    assert find_property(raw, b"EYS") is None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"TAGS\x01first\x02KEYS\x01k\x02TAGS\x01last\x02", b"last"),
        (b"TAGS\x01first\x02TAGS\x01last", b"last"),  # as RocketMQ 4.9 stores them
        (b"TAGS\x01first\x02TAGS\x01\x02", b"first"),  # RocketMQ reads no empty value
        (b"TAGS\x01\x02TAGS\x01\x02", b""),
        (b"XTAGS\x01no\x02TAGS\x01yes\x02XTAGS\x01no\x02", b"yes"),
        (b"XTAGS\x01no\x02", None),
    ],
)
def test_of_several_tags_the_last_counts(raw: bytes, expected: bytes | None) -> None:
    assert stored_tags(raw) == expected


@pytest.mark.parametrize("pair", [("a\x01", "b"), ("a", "b\x02"), ("x" * 40_000, "y")])
def test_properties_that_do_not_fit_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(MessageIllegalError):
        encode_properties([pair])


@pytest.mark.parametrize("topic", ["A", "a_b%c|d-9", "T" * 127, "%RETRY%" + "g" * 248])
def test_topics_that_may_be_created(topic: str) -> None:
    check_topic(topic)


@pytest.mark.parametrize(
    "topic",
    ["", "T" * 128, "%DLQ%" + "g" * 249, "%RETRY%a.b", "a/b", "..", "a\0b", "中", "a b", "a\n"],
)
def test_topics_that_may_not(topic: str) -> None:
    with pytest.raises(MessageIllegalError):
        check_topic(topic)
