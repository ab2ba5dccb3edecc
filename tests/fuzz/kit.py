"""What the targets share: how a refusal is told from a find, and inputs that are cut into pieces.

A target is a module of `tests.fuzz.targets` with

    one(data)       reads an input, and asserts what must hold. It returns if the input was
                    accepted, and raises Refused if it was refused as documented; all else that it
                    raises is a find
    seeds()         inputs of real bytes, from which the fuzzer begins
    REACHES         functions of hastore that the corpus must execute
    LEAST           how much of the corpus must be accepted, and in how many places refused
    repaired(data)  the input with its checksums and lengths made right (optional): else the fuzzer
                    would seldom get behind them
    TOKENS          words of the format (optional)
    RUNS            changed inputs in `make test`, if each takes long (optional)
    MEMORY_BYTES    the most that one input may make Python allocate (optional)
"""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import pkgutil
import random
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import NamedTuple, Protocol, TypeVar, cast

from tests.fuzz import targets

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
MAX_BYTES = 8 * 1024  # of an input
MEMORY_BYTES = 8 * 1024 * 1024
_CRC = struct.Struct(">I")
Made = TypeVar("Made", covariant=True)


class Refused(Exception):
    """The input was refused in the way that the reader's documentation names."""


class Least(NamedTuple):
    """What a corpus must show at least, or its target proves nothing."""

    accepted: float  # the share of inputs
    sites: int  # lines of hastore that refuse an input


class Receiver(Protocol[Made]):
    """One end of a link, which says where the next bytes go."""

    def room(self) -> memoryview:
        """Return where the next bytes go."""

    def received(self, size: int) -> Iterable[Made]:
        """Take so many bytes that are there; return what they complete."""


class Target(Protocol):
    """A module of `tests.fuzz.targets`."""

    __name__: str
    LEAST: Least
    REACHES: tuple[Callable[..., object], ...]

    def one(self, data: bytes) -> None:
        """Read an input."""

    def seeds(self) -> list[bytes]:
        """Return inputs of real bytes."""


def names() -> list[str]:
    """Return the names of all targets."""
    return sorted(module.name for module in pkgutil.iter_modules(targets.__path__))


def target(name: str) -> Target:
    """Import a target."""
    module: ModuleType = importlib.import_module(f"tests.fuzz.targets.{name}")
    return cast(Target, module)


@contextlib.contextmanager
def documented(*kinds: type[Exception]) -> Iterator[None]:
    """Take these errors for refusals."""
    try:
        yield
    except kinds as why:
        raise Refused(str(why)) from why


def refuse(accepted: object, why: str) -> None:
    """Raise Refused unless the reader accepted the input: one that says so by a value."""
    if not accepted:
        raise Refused(why)


def without_details(reason: str) -> str:
    """Return why a peer is refused without numbers and what it said: inputs of a kind are alike."""
    return "".join(letter for letter in reason.partition("'")[0] if not letter.isdigit())[:60]


def site_of(refused: Refused) -> str:
    """Return the line of hastore that refused an input."""
    place, step = "", refused.__cause__ and refused.__cause__.__traceback__
    while step:
        path = step.tb_frame.f_code.co_filename
        if "/hastore/" in path and "/tests/" not in path:
            place = f"{path.rpartition('/hastore/')[2]}:{step.tb_lineno}"
        step = step.tb_next
    return place or str(refused)


def drawn(data: bytes) -> random.Random:
    """Return choices that depend on the input alone."""
    return random.Random(zlib.crc32(data))


def splits(data: bytes) -> Iterator[list[bytes]]:
    """Yield the input in pieces: single bytes if it is short, and two other ways."""
    if len(data) <= 64:
        yield [data[at : at + 1] for at in range(len(data))]
    chance = drawn(data)
    for count in (1, 4):
        cuts = sorted(chance.randrange(len(data) + 1) for _ in range(count))
        yield [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


def fed(receiver: Receiver[Made], pieces: Iterable[bytes], most: int) -> Iterator[Made]:
    """Give pieces to a receiver as there is room, never more than `most` bytes; yield what comes.

    Raises what the receiver raises.
    """
    for piece in pieces:
        while piece:
            room = receiver.room()
            assert 0 < len(room) <= most
            taken = piece[: len(room)]
            room[: len(taken)] = taken
            piece = piece[len(taken) :]
            yield from receiver.received(len(taken))


def with_crc(content: bytes) -> bytes:
    """Return content with its CRC-32 behind it, as hastore's state files have it."""
    return content + _CRC.pack(zlib.crc32(content))


def text_of(data: bytes) -> str:
    """Return an input as text: each input is one."""
    return data.decode("utf-8", "replace")


def golden(name: str, most: int = MAX_BYTES, start: int = 0) -> bytes:
    """Return the first bytes of a file that a real RocketMQ or DLedger wrote."""
    return (GOLDEN / name).read_bytes()[start : start + most]
