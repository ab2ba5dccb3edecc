"""The fast path of sends: the same bytes and the same refusals as the slow one, or nothing."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from hastore.protocol.remoting import BatchMessage, encode_batch
from hastore.record.codec import Host
from hastore.record.layout import FLAG_BORN_IPV6, FLAG_IPV6, FLAG_PREPARED
from hastore.server.remoting.door import RemotingRefusal
from hastore.server.remoting.send_records import Alike, build_batch
from hastore.server.remoting.sends import encode, encode_batch_of
from hastore.store.append.validation import PutValidator, ValidRecord
from tests.api_fakes import records_of
from tests.store.kit import HOST, config

BORN = Host(bytes((127, 0, 0, 1)), 50_123)
MOST = 20  # messages
NAMES = (
    "UNIQ_KEY WAIT TAGS KEYS user %s é HS_PID HS_SEQ HS_DELAYED XHS_PID xHS_DELAYED DELAY".split()
)


@pytest.fixture
def chance() -> random.Random:
    seed = time.time_ns() % 2**32
    print("seed", seed)
    return random.Random(seed)


def rarely(chance: random.Random, one_in: int = 200) -> bool:
    return chance.randrange(one_in) == 0


def value_of(chance: random.Random, name: str) -> str:
    if name == "KEYS" and rarely(chance, 4):
        return " ".join("k" * chance.randrange(3) for _ in range(chance.randrange(50, 70)))
    if name == "HS_SEQ" and not rarely(chance, 3):
        return str(chance.randrange(100))
    if rarely(chance):
        return "\x01".join(("a", "b"))
    return chance.choice(["true", "7F00000100000000000000000000AAAA", "ü %d", " ", "v" * 300])


def properties_of(chance: random.Random) -> bytes:
    """Return the properties of one message of a batch: usual, rare or wrong ones."""
    if rarely(chance):
        return chance.randbytes(chance.randrange(1, 20))
    names = ["WAIT", "UNIQ_KEY"] if not rarely(chance, 8) else chance.choices(NAMES, k=3)
    text = "".join(f"{name}\x01{value_of(chance, name)}\x02" for name in names)
    if rarely(chance, 3):
        text = text[:-1]
    if rarely(chance):
        text = text.replace("true", "t" * chance.choice([32_000, 32_600, 32_700]))
    return b"" if rarely(chance) else text.encode()[:32_767]


def batch_of(chance: random.Random) -> bytes:
    """Return the body of a batch; some are damaged."""
    size = chance.choice([0, 1, 100, 1_024])
    count = chance.choice([1, 2, 3, MOST, MOST + rarely(chance, 8)]) * (not rarely(chance, 60))
    body = encode_batch([
        BatchMessage(
            chance.choice([0, 0, -1, 2**31 - 1]),
            chance.randbytes(size if not rarely(chance, 10) else chance.randrange(2_000)),
            properties_of(chance),
        )
        for _ in range(count)
    ])  # fmt: skip
    if rarely(chance, 6) and body:
        raw = bytearray(body)
        for _ in range(chance.choice([1, 1, 5])):
            raw[chance.randrange(len(raw))] = chance.choice([0, 1, 2, 0x7F, 0x80, 0xFF])
        if rarely(chance, 3):
            del raw[chance.randrange(len(raw)) :]
        body = bytes(raw)
    return body


def alike_of(chance: random.Random) -> Alike:
    """Return what the records of a send have in common."""
    born = BORN if not rarely(chance) else Host(bytes(15) + b"\1", 9)
    flags = [0, 1, 8, 0x100, FLAG_BORN_IPV6, FLAG_IPV6, FLAG_PREPARED, 0x40, 0x80, -1, 2**31 - 1]
    return Alike(
        chance.choice(["T", "T", "%s", "t" * 127, "t" * 128, "t" * 200]),
        chance.choice([0, 3, 2**31 - 1]),
        0 if not rarely(chance, 10) else chance.choice(flags),
        chance.choice([0, 1_700_000_000_123, -1, -(2**63), 2**63 - 1]),
        born,
        chance.choice([0, 0, 5, 2**31 - 1]),
    )


def test_a_batch_that_was_built_at_once_is_the_one_that_was_made_one_by_one(
    chance: random.Random, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_message_size": 1_500}
    validator = PutValidator(config(tmp_path, **settings), HOST)
    built = refused = usual = 0
    for _ in range(3_000):
        body, alike = batch_of(chance), alike_of(chance)
        common = {"WAIT": "true", "UNIQ_KEY": "A" * 32, "MSG_REGION": "x", "CLUSTER": "c"}
        if rarely(chance, 20):
            name = chance.choice(NAMES)
            common[name] = value_of(chance, name)
        try:
            shared = encode(common)
        except RemotingRefusal:
            continue
        batch = build_batch(alike, shared, body, MOST)
        try:
            expected = encode_batch_of(alike, shared, body)
        except (RemotingRefusal, ValueError):
            assert batch is None, "what is wrong is left to the slow path, which says why"
            refused += 1
            continue
        if batch is None:
            continue
        built += 1
        assert records_of(batch) == expected
        known = validator.uniform(batch) is not None
        same, entries = validator.validate(batch.payload)
        are_valid = all(isinstance(entry, ValidRecord) for entry in entries)
        assert same == batch.payload
        usual += known
        assert not known or are_valid, "what the store takes as built, it would take as any other"
        assert are_valid or len(batch.topic) > 127 or batch.longest_body > 1_500, entries
        if are_valid:  # the topic is known from now on
            assert validator.uniform(batch) is batch
    assert built > 500 and refused > 200 and usual > 400, (built, refused, usual)


def test_a_batch_is_not_built_beyond_the_bounds() -> None:
    message = BatchMessage(0, b"x", b"WAIT\x01true\x02")
    alike, shared = Alike("T", 0, 0, 0, BORN, 0), b"CLUSTER\x01c\x02"
    assert build_batch(alike, shared, encode_batch([message] * MOST), MOST) is not None
    for most in (MOST - 1, 0, -5):
        assert build_batch(alike, shared, encode_batch([message] * MOST), most) is None
