"""Change an input at random: bytes, numbers and lengths, words, pieces of other inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_NUMBERS = (
    *(
        0,
        1,
        2,
        3,
        4,
        7,
        8,
        12,
        16,
        31,
        32,
        47,
        48,
        64,
        91,
        100,
        127,
        128,
        255,
        256,
        257,
        511,
        1_024,
    ),
    *(4_095, 4_096, 32_767, 32_768, 65_535, 65_536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF),
    *(2**62, 2**63 - 1, 2**63, 2**64 - 1, 0xDAA320A7, 0xDAA320AB, 0xCBD43194),
)
_TEXTS = (
    *(
        b"0",
        b"-1",
        b"1",
        b"9" * 20,
        b"1e999",
        b"1_0",
        b" ",
        b"\n",
        b"\r\n",
        b"\0",
        b"\x01",
        b"\x02",
    ),
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b":", b",", b"null", b"true", b"\\ud800", b"\xff"),
    *(b"\xed\xa0\x80", b"\xc3\xa9", b"%s", b"'", b"(", b")", b"*", b"&a", b"- ", b"?", b"!!int "),
)
Change = Callable[[bytearray, random.Random, "Pool"], None]


class Pool:
    """What changes take from: words of the format, and other inputs."""

    def __init__(self, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
        self.tokens = [*tokens, *tokens, *_TEXTS]
        self.others = list(others) or [b"\0"]


def mutated(data: bytes, chance: random.Random, pool: Pool, most: int) -> bytes:
    """Return the input with one to eight changes, of at most `most` bytes."""
    raw = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 5, 8))):
        chance.choice(_CHANGES)(raw, chance, pool)
        del raw[most:]
    return bytes(raw)


def _place(raw: bytearray, chance: random.Random) -> int:
    """Return a position, more often one near the begin, where headers are."""
    size = len(raw)
    if size > 64 and chance.random() < 0.4:
        return chance.randrange(64)
    return chance.randrange(size + 1)


def _flip(raw: bytearray, chance: random.Random, pool: Pool) -> None:
    if raw:
        raw[_place(raw, chance) % len(raw)] ^= 1 << chance.randrange(8)


def _set(raw: bytearray, chance: random.Random, pool: Pool) -> None:
    if raw:
        raw[_place(raw, chance) % len(raw)] = chance.choice((0, 1, 2, 0x7F, 0x80, 0xFF, 32, 34, 93))


def _number(raw: bytearray, chance: random.Random, pool: Pool) -> None:
    """Replace a number, or move it a little: it may be a length."""
    size = chance.choice((1, 2, 4, 4, 4, 8))
    at = _place(raw, chance)
    if at + size > len(raw):
        return
    most = 256**size
    if chance.random() < 0.5:
        number = int.from_bytes(raw[at : at + size]) + chance.choice((-1, 1, -2, 2, 8, -8, 48, 256))
    else:
        number = chance.choice((*_NUMBERS, len(raw), len(raw) - at, len(raw) - at - size))
    raw[at : at + size] = (number % most).to_bytes(size)


def _cut(raw: bytearray, chance: random.Random, pool: Pool) -> None:
    at = _place(raw, chance)
    del raw[at : at + chance.choice((1, 1, 2, 4, 8, 64, len(raw)))]


def _insert(raw: bytearray, chance: random.Random, pool: Pool) -> None:
    at = _place(raw, chance)
    raw[at:at] = chance.choice((bytes(chance.choice((1, 2, 4, 64))), chance.randbytes(3)))


def _word(raw: bytearray, chance: random.Random, pool: Pool) -> None:
    at = _place(raw, chance)
    word = chance.choice(pool.tokens)
    raw[at : at + (len(word) if chance.random() < 0.5 else 0)] = word


def _copy(raw: bytearray, chance: random.Random, pool: Pool) -> None:
    """Repeat a piece, or move it."""
    start, at = _place(raw, chance), _place(raw, chance)
    piece = raw[start : start + chance.choice((1, 4, 12, 48, 100, 400))]
    raw[at:at] = piece * chance.choice((1, 1, 1, 2, 40))


def _splice(raw: bytearray, chance: random.Random, pool: Pool) -> None:
    """Take a piece of another input, or all that follows in it."""
    other = chance.choice(pool.others)
    start = chance.randrange(len(other) + 1)
    stop = start + chance.choice((1, 4, 48, 200, len(other)))
    at = _place(raw, chance)
    raw[at : at + (stop - start if chance.random() < 0.5 else 0)] = other[start:stop]


def _digits(raw: bytearray, chance: random.Random, pool: Pool) -> None:
    """Replace the digits of a number in text."""
    places = [at for at, byte in enumerate(raw) if 48 <= byte <= 57]
    if places:
        at = chance.choice(places)
        stop = at
        while stop < len(raw) and 48 <= raw[stop] <= 57:
            stop += 1
        raw[at:stop] = str(chance.choice(_NUMBERS)).encode()


_CHANGES: tuple[Change, ...] = (
    *(_flip, _flip, _set, _set, _number, _number, _number, _cut, _insert, _word, _word, _copy),
    *(_splice, _splice, _digits),
)
