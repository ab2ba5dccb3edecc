"""HS_PID and HS_SEQ of a record's properties."""

import pytest

from hastore.protocol import api
from hastore.record.properties import PID, SEQ, encode_properties, producer_of


@pytest.mark.parametrize(
    "pairs",
    [
        [("HS_PID", "p"), ("HS_SEQ", "-1")],
        [("HS_PID", "p"), ("HS_SEQ", "9" * 19)],
        [("HS_PID", "p")],
        [("HS_PID", "p" * 65), ("HS_SEQ", "1")],
        [("HS_PID", ""), ("HS_SEQ", "1")],
    ],
)
def test_broken_ids_raise(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match="HS_"):
        producer_of(encode_properties(pairs))


def test_ids_are_found_wherever_they_stand() -> None:
    pairs = [("XHS_PID", "no"), ("HS_SEQ", "5"), ("KEYS", "k"), ("HS_PID", "p")]
    assert producer_of(encode_properties(pairs)) == (b"p", 5)
    assert producer_of(encode_properties([("HS_PID", "p"), ("HS_SEQ", "6")])[:-1]) == (b"p", 6)
    with pytest.raises(ValueError, match="decimal number"):
        producer_of(encode_properties([("HS_PID", "p"), ("HS_SEQ", "6\n")])[:-1])
    assert producer_of(encode_properties([("XHS_PID", "p"), ("HS_SEQ", "6")])) is None
    assert producer_of(b"") is None


def test_of_two_numbers_the_first_counts() -> None:
    before, after = ("HS_SEQ", "5"), ("HS_SEQ", "9")
    assert producer_of(encode_properties([before, ("HS_PID", "p"), after])) == (b"p", 5)
    assert producer_of(encode_properties([("HS_PID", "p"), before, after])) == (b"p", 5)


def test_the_names_are_those_of_the_client_protocol() -> None:
    assert (PID, SEQ) == (api.PRODUCER_ID.encode(), api.SEQUENCE.encode())
