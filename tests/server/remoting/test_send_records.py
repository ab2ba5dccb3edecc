"""The fast path of sends: the same bytes and the same refusals as the slow one, or nothing."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import Status
from hastore.protocol.api import Put, PutDone
from hastore.protocol.remoting import (
    JSON,
    ONE_WAY,
    ROCKETMQ,
    BatchMessage,
    Code,
    Frame,
    encode_batch,
    encode_frame,
)
from hastore.record.codec import Host, message_id
from hastore.record.layout import FLAG_BORN_IPV6, FLAG_IPV6, FLAG_PREPARED
from hastore.server.remoting import sends as module
from hastore.server.remoting.door import RemotingRefusal, RemotingRequest
from hastore.server.remoting.routes import Shape, TopicView
from hastore.server.remoting.send_records import Alike, SendLayouts, build_batch, ids_of
from hastore.server.remoting.sends import Sends, encode, encode_batch_of
from hastore.store.append.results import BuiltBatch, Guard, Payload
from hastore.store.append.validation import PutValidator, ValidRecord
from tests.api_fakes import FakeBackend, records_of
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


# -- single messages


class Kept:
    """A door whose puts are kept, and answered at once with what the test says."""

    def __init__(self) -> None:
        self.puts: list[tuple[Put, bytes, Guard | None, float | None]] = []
        self.built = 0  # puts that took the fast path
        self.done = PutDone(0, Status.PUT_OK, 65_537)
        self.is_master = True
        self.backend = FakeBackend()
        self.parts: Any = SimpleNamespace(backend=self.backend, puts=self, clock=SYSTEM_CLOCK)

    def admit_own_record(
        self, put: Put, payload: Payload, respond: Callable[[PutDone], None],
        guard: Guard | None = None, since_ms: float | None = None,
    ) -> None:  # fmt: skip
        self.built += isinstance(payload, BuiltBatch)
        self.puts.append((put, records_of(payload), guard, since_ms))
        respond(self.done)


def make_sends(monkeypatch: pytest.MonkeyPatch, *, fast: bool) -> tuple[Kept, Sends]:
    """Return handlers over a door that keeps puts; without `fast` each send goes the slow way."""
    kept = Kept()
    door: Any = kept
    topics = TopicView(kept.backend, auto_create=True)
    for name, queues, perm in (("T", 4, 6), ("R", 2, 4), ("E", 0, 6), ("t" * 127, 3, 2)):
        monkeypatch.setitem(SHAPES, name, Shape(queues, queues, perm))
    monkeypatch.setattr(topics, "find", SHAPES.get)
    sends = Sends(door, topics, "c%s")
    if not fast:
        monkeypatch.setattr(sends, "_send_usual", lambda *_: False)
    return kept, sends


SHAPES: dict[str, Shape] = {}


def message_properties(chance: random.Random) -> str:
    names = ["UNIQ_KEY", "WAIT"]
    if rarely(chance, 8):
        names += chance.sample(NAMES + ["CLUSTER", "MSG_REGION", "TRAN_MSG", "RETRY_TOPIC", ""], 2)
    if rarely(chance, 20):
        names = chance.choices(NAMES, k=chance.choice([0, 1, 2, 40]))
    chance.shuffle(names)
    text = "".join(f"{name}\x01{value_of(chance, name)}\x02" for name in names)
    if rarely(chance, 3):
        text = text[:-1]
    if rarely(chance, 40):
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice(["\x01", "\x02", "\ud800", "%s", "\x02\x02"]) + text[at:]
    if rarely(chance, 100):
        text = text.replace("true", "t" * chance.choice([32_000, 32_600, 32_700, 40_000]))
    return text


def message_frame(chance: random.Random, names: str) -> Frame:
    """Return a send of one message: usual, rare or wrong."""
    numbers = ["0", "1", "-1", "4", "8", " 7", "1_0", "x", "", str(2**31), str(-(2**63)), "9" * 30]
    values = {
        "topic": chance.choice([*TOPICS, "R", "E", "t" * 127, "new", "%RETRY%g", "a.b", ""]),
        "defaultTopicQueueNums": "4", "queueId": str(chance.randrange(-1, 5) % 6 - 1),
        "sysFlag": "0" if not rarely(chance, 8) else chance.choice(["1", "4", "8", "16", "64"]),
        "bornTimestamp": "1700000000123", "flag": chance.choice(["0", "7", "-5"]),
        "properties": message_properties(chance), "reconsumeTimes": "0",
        "maxReconsumeTimes": "3", "batch": chance.choice(["false", "False"]),
    }  # fmt: skip
    for name in list(values):
        if rarely(chance, 60):
            del values[name]
        elif rarely(chance, 60) and name not in ("topic", "properties", "batch"):
            values[name] = chance.choice(numbers)
    fields = {LETTERS[name] if names == "short" else name: value for name, value in values.items()}
    body = b"" if rarely(chance, 60) else chance.randbytes(chance.choice([1, 100, 1_024]))
    code = Code.SEND_MESSAGE_V2 if names == "short" else Code.SEND_MESSAGE
    flag = ONE_WAY if rarely(chance, 20) else 0
    return Frame(code, chance.randrange(-5, 2**31), flag, fields, body, kind=chance.choice(KINDS))


LETTERS = {
    "topic": "b", "defaultTopicQueueNums": "d", "queueId": "e", "sysFlag": "f",
    "bornTimestamp": "g", "flag": "h", "properties": "i", "reconsumeTimes": "j",
    "maxReconsumeTimes": "l", "batch": "m",
}  # fmt: skip
TOPICS = ["T"] * 20
KINDS = (JSON, JSON, JSON, ROCKETMQ)


def outcome_of(chance: random.Random) -> PutDone:
    """Return what may become of a put of one record."""
    host = HOST.packed if not rarely(chance, 20) else Host(bytes(16), 7).packed
    if rarely(chance, 10):
        return PutDone(0, chance.choice(list(Status)), 0, reason="why")
    hosts = {0: Host(bytes(4), 9).packed} if rarely(chance, 20) else {}
    status = chance.choice([Status.PUT_OK, Status.PUT_OK, Status.FLUSH_SLAVE_TIMEOUT])
    at = chance.choice([0, 5, 2**40, 2**63 - 1])
    return PutDone(0, status, 65_537, "X", [at], [1], [chance.randrange(2**40)], None, host, hosts)


def test_a_message_of_the_fast_path_is_stored_and_answered_as_one_of_the_slow_path(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = make_sends(monkeypatch, fast=True), make_sends(monkeypatch, fast=False)
    encoded = module.stored_answer

    def no_bytes(*_: object) -> None:
        """Leave the answer to the slow path."""

    refused = 0
    for turn in range(8_000):
        frame, done = message_frame(chance, chance.choice(["short", "long"])), outcome_of(chance)
        address = "127.0.0.1" if not rarely(chance, 20) else "::1", 50_000 + turn % 9
        seed = chance.random()
        told = []
        for kept, sends in (fast, slow):
            kept.done = done
            monkeypatch.setattr(module, "stored_answer", encoded if sends is fast[1] else no_bytes)
            answers: list[bytes | str | None] = []

            def reply(
                _request: RemotingRequest, answer: Frame | bytes | None,
                answers: list[bytes | str | None] = answers,
            ) -> None:  # fmt: skip
                answers.append(encode_frame(answer) if isinstance(answer, Frame) else answer)

            def unknown(
                _request: RemotingRequest, reason: str, is_late: bool,
                answers: list[bytes | str | None] = answers,
            ) -> None:  # fmt: skip
                answers.append(f"{reason} {is_late}")

            request = RemotingRequest(frame, 5.0, None, address, reply, unknown)
            random.seed(seed)  # the node chooses a queue
            monkeypatch.setattr(secrets, "token_hex", lambda _size: "ab" * 16)
            try:
                sends.handlers()[frame.code](request)
            except RemotingRefusal as refusal:
                answers.append(f"{refusal.code} {refusal}")
            told.append((answers, kept.puts[-1:], request.is_answered))
            kept.puts.clear()
        assert told[0] == told[1], frame
        refused += not told[0][1]
    assert slow[0].built == 0
    assert fast[0].built > 2_000 and refused > 1_000, (fast[0].built, refused)


def test_the_layouts_that_are_remembered_are_bounded() -> None:
    layouts = SendLayouts("c")
    for number in range(1_500):
        assert layouts.read(f"UNIQ_KEY\x01a\x02name{number}\x01b") is not None
    known = vars(layouts)["_known"]
    assert 0 < len(known) <= 512
    known.clear()
    for number in range(9):
        assert layouts.read(f"UNIQ_KEY\x01a\x02{number}{'n' * 600}\x01b") is None
    assert not known, "long names are not kept"


@pytest.mark.parametrize("count", [1, 2, 100])
def test_the_ids_of_messages_are_those_of_their_records(count: int) -> None:
    offsets = [n * 7_919 for n in range(count)]
    done = PutDone(0, Status.PUT_OK, 1, "X", offsets, [0] * count, [3] * count, None, HOST.packed)
    assert ids_of(done) == ",".join(message_id(HOST, offset) for offset in offsets)
