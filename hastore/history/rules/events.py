"""The events of a history, and their lines: one JSON object per line, the header first.

docs/testing.md has the format. Times are ns of one monotonic clock; digests stand for messages, so
a history has no bodies. The order of lines matters only within a client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from hastore.errors import UNREADABLE, UsageError

VERSION = 1
MODES = ("sync", "async", "dledger")
_LARGEST = (1 << 62) - 1
_EVEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1

Natural = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Digest = Annotated[str, msgspec.Meta(min_length=16, max_length=16)]  # hexadecimal digits


class Event(
    msgspec.Struct, tag_field="kind", omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """What all lines have in common."""


class Header(Event, tag="history"):
    """The first line: what the group promises, and whose messages the history has."""

    version: int = VERSION
    mode: Literal["sync", "async", "dledger"] = "sync"  # async: readers see unconfirmed messages
    nodes: Natural = 0  # of the group; 0: not known
    acks: Natural = 1  # of the group in mode sync: what readers see is on acks + 1 nodes
    topics: list[str] | None = None  # all of whose messages are in it; None: those with a send


class Send(Event, tag="send"):
    """A message is about to be sent: the call of an append."""

    client: str
    op: Natural
    t: Natural
    topic: str
    digest: Digest
    attempts: Count = 1  # how often it may be stored; above 1 for clients that do not number
    acks: Literal["all", "1", "0"] | None = None  # what was asked for; None: the master's default
    sync_flush: bool = False
    indirect: bool = False  # delayed, or in a transaction: the answer names another record


class Ok(Event, tag="ok"):
    """The send, or the commit, was acknowledged."""

    client: str
    op: Natural
    t: Natural
    level: str = ""
    offset: Natural | None = None  # None: without an answer (acks 0), or of a commit
    queue: Natural | None = None
    queue_offset: Natural | None = None  # None with an offset: the node could not tell
    epoch: Natural = 0


class Fail(Event, tag="fail"):
    """The send, or the commit, was certainly not carried out."""

    client: str
    op: Natural
    t: Natural
    error: str = ""


class Info(Event, tag="info"):
    """Nobody knows whether it was carried out: a timeout, or stored and not confirmed."""

    client: str
    op: Natural
    t: Natural
    error: str = ""


class Closed(Event, tag="closed"):
    """The client was closed: each of its calls has ended."""

    client: str
    t: Natural


class Consumer(Event, tag="consumer"):
    """A consumer begins: how it reads."""

    client: str
    t: Natural
    group: str | None = None
    filtered: bool = False  # by tags or SQL: it need not see all messages
    shared: bool = False  # it shares the queues of its group


class Seen(msgspec.Struct, array_like=True, gc=False):
    """A message as it was read: an array in the line, whose last fields may be left out."""

    queue_offset: Natural
    offset: Natural
    digest: Digest
    epoch: Natural | None = None
    producer: str | None = None  # HS_PID
    sequence: Natural | None = None  # HS_SEQ
    count: Count = 1  # queue offsets that it takes; above 1 only for an inner batch


class Read(Event, tag="read"):
    """A consumer was given messages of a queue; the call began at `began` and ended at `t`."""

    client: str
    began: Natural
    t: Natural
    topic: str
    queue: Natural
    messages: list[Seen]


class Seek(Event, tag="seek"):
    """The caller moves a consumer; None: in all its queues, or topics."""

    client: str
    t: Natural
    topic: str | None = None
    queue: Natural | None = None


class Assigned(Event, tag="assigned"):
    """A queue is this member's from now on."""

    client: str
    t: Natural
    topic: str
    queue: Natural


class Revoked(Event, tag="revoked"):
    """A queue is this member's no more."""

    client: str
    t: Natural
    topic: str
    queue: Natural


class Place(msgspec.Struct, array_like=True, gc=False):
    """A group's position in a queue: the queue offset to read next; None: it has none."""

    topic: str
    queue: Natural
    position: Natural | None = None


class Commit(Event, tag="commit"):
    """A consumer is about to commit positions; ends as a send does."""

    client: str
    op: Natural
    t: Natural
    group: str
    places: list[Place]
    back: bool = False  # a seek came before, so it may go back


class Position(Event, tag="position"):
    """A group's committed positions were asked for."""

    client: str
    began: Natural
    t: Natural
    group: str
    places: list[Place]
    current: bool = False  # the master answered, while it could confirm: nothing older counts


class Reset(Event, tag="reset"):
    """An operator moves a group; None: in all queues, or topics."""

    t: Natural
    group: str
    topic: str | None = None
    queue: Natural | None = None
    position: Natural | None = None


class Range(Event, tag="range"):
    """What a job got of a range of a queue: as a count and a digest, see `range_digest`."""

    client: str
    t: Natural
    topic: str
    queue: Natural
    start: Natural
    end: Natural  # half-open
    count: Natural
    digest: Digest


class Epoch(Event, tag="epoch"):
    """An epoch of the group's history, or a term of mode dledger."""

    epoch: Natural
    start: Natural | None = None  # the offset at which it begins
    node: Natural | None = None
    host: str | None = None  # of that node, as its records name it
    planned: bool = False  # the master before it answered, and kept nothing back


class Fault(Event, tag="fault"):
    """A fault came, or ended. Any name; the checker knows those of `budget.py`."""

    t: Natural
    fault: str
    node: Natural | None = None


class Log(Event, tag="log"):
    """The log of a node at the end: the records of this history are all in [begin, end)."""

    begin: Natural
    end: Natural
    archives: bool = False  # the history also has what all nodes have cut off and archived


class Record(Event, tag="record"):
    """A record of the log at the end."""

    offset: Natural
    size: Natural
    topic: str
    queue: Natural
    queue_offset: Natural
    digest: Digest
    producer: str | None = None
    sequence: Natural | None = None
    host: str | None = None
    count: Count = 1


class Rescued(Event, tag="rescued"):
    """A record that a node has cut off its log and archived."""

    offset: Natural
    digest: Digest


Line = (
    Header | Send | Ok | Fail | Info | Closed | Consumer | Read | Seek | Assigned | Revoked | Commit
    | Position | Reset | Range | Epoch | Fault | Log | Record | Rescued
)  # fmt: skip
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()


def encode(event: Event) -> bytes:
    """Return an event as a line."""
    return _encoder.encode(event) + b"\n"


def decode(line: bytes, where: str) -> Line:
    """Return the event of a line; raises UsageError, which names `where`, for anything else."""
    try:
        return _decoder.decode(line)
    except UNREADABLE as wrong:
        raise UsageError(f"{where}: not an event of a history: {wrong}") from wrong


def decode_header(line: bytes, where: str) -> Header:
    """Return the header of a history; raises UsageError if it is none, or of a later version."""
    header = decode(line, where)
    if not isinstance(header, Header):
        raise UsageError(f'{where}: a history begins with a line of kind "history"')
    if header.version != VERSION:
        raise UsageError(
            f"{where}: a history of version {header.version}; this hastore reads version {VERSION}"
        )
    return header


def digest_of(topic: str, key: str | None, body: bytes) -> str:
    """Return what stands for a message in a history: 16 hexadecimal digits of BLAKE2b.

    `body` is the body as applications see it, not compressed.
    """
    named = f"{topic}\0{key or ''}\0".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(named + body, digest_size=8).hexdigest()


def range_digest(rows: Iterable[tuple[int, str]]) -> str:
    """Return the digest of a range: of its queue offsets and digests, in any order."""
    return as_range_digest(sum(mixed(place, int(digest, 16)) for place, digest in rows))


def as_range_digest(total: int) -> str:
    """Return the digest of a range from the sum of what `mixed` gives for its messages."""
    return f"{total & _MASK:016x}"


def mixed(queue_offset: Any, digest: Any) -> Any:
    """Return what a message adds to the digest of a range, below 2^64 (the steps of SplitMix64).

    Takes the queue offset and the digest as numbers, or arrays of both as numpy.uint64.
    """
    bits = (digest + (queue_offset + 1) * _EVEN) & _MASK
    bits = ((bits ^ bits >> 30) * _FIRST) & _MASK
    bits = ((bits ^ bits >> 27) * _SECOND) & _MASK
    return bits ^ bits >> 31
