"""HELLO: how two nodes open a connection on the HA port (docs/ha-link.md, "HELLO").

Pure: bytes in, messages out. Without a secret:

    caller                                     answerer
      | CALL_MAGIC (8 bytes, sign bit set)        |
      |------------------------------------------>|  a RocketMQ master echoes it in a heartbeat;
      |              ANSWER_MAGIC (8 bytes)       |  so the caller recognises a RocketMQ master
      |<------------------------------------------|
      | length:uint32, HELLO                      |
      |------------------------------------------>|
      |                     length:uint32, HELLO  |
      |<------------------------------------------|
      | length:uint32, proof (empty: no secret)   |
      |------------------------------------------>|  only now does the answerer act
      |   length:uint32, proof | length, answer   |
      |<------------------------------------------|

With a secret both ends prove that they have it before either says anything of itself, and the rest,
all that follows HELLO too, is in frames with a MAC (security/sealed_socket.py), or inside TLS:

      | SECRET_CALL_MAGIC                         |
      |------------------------------------------>|
      |     SECRET_ANSWER_MAGIC | nonce, 32 bytes |
      |<------------------------------------------|
      | nonce, 32 bytes | proof, 32 bytes         |
      |------------------------------------------>|
      |                         proof, 32 bytes   |
      |<------------------------------------------|
      | length:uint32, HELLO                      |
      |------------------------------------------>|
      |             length, HELLO | length, answer|
      |<------------------------------------------|

A proof is an HMAC-SHA-256 over its direction, both magics, both nonces, and whether TLS is below; a
key of the MACs likewise. So a proof can be neither reflected nor replayed, and what was agreed
cannot be changed. The version before had the first exchange with a secret too: HMACs over both
HELLOs, the answerer's over the answer too. A node that may still meet that version says so in its
HELLO (`proves_first`), which such a proof covers: two nodes of this version never take the first
exchange, whoever is between them. Every length is checked before anything is allocated.
"""

import hashlib
import hmac
import struct
from enum import Enum
from typing import Literal, NamedTuple

import msgspec

from hastore.errors import UNREADABLE, AuthenticationError, ProtocolError

VERSION = 1
# A RocketMQ slave's report is never negative, so the sign bit tells a HELLO from a report.
CALL_MAGIC = bytes((0xFF,)) + b"HASTOR" + bytes((VERSION,))
ANSWER_MAGIC = bytes((0xFE,)) + b"HASTOR" + bytes((VERSION,))
SECRET_VERSION = 2  # of the exchange with a secret
SECRET_CALL_MAGIC = CALL_MAGIC[:-1] + bytes((SECRET_VERSION,))
SECRET_ANSWER_MAGIC = ANSWER_MAGIC[:-1] + bytes((SECRET_VERSION,))
MAGIC_BYTES = 8
PROOF_BYTES = 32
HELLO_BYTES_MAX = 64 * 1024
NONCE_BYTES = 32
DIGEST_BYTES = 32
STORE_ID_MAX = 64
REPAIR_BYTES_MAX = 32 * 1024  # of a RangeOf, whose frame has at most 64 KiB
_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size


class Purpose(Enum):
    """What the caller opens the connection for."""

    FOLLOW = "follow"
    SURVEY = "survey"
    PROMISE = "promise"
    COPY = "copy"
    DLEDGER = "dledger"  # the link between two nodes of a DLedger group (protocol/dledger_link.py)
    FORWARD = "forward"  # requests of RocketMQ's clients, to the master (protocol/forward_link.py)
    REPAIR = "repair"  # bytes of the log that are damaged at the caller; the answer is RangeOf


class WireEpoch(msgspec.Struct, frozen=True, array_like=True):
    """One entry of an epoch history: an epoch, the offset of its first byte, `acks`, nodes."""

    epoch: int
    start: int
    acks: int
    nodes: tuple[int, ...]
    # The resumptions of the epoch by its master, after restarts, that this log has met: (number,
    # the end of the master's log then), both rising. None: not known, as in what an earlier version
    # has written; such an entry diverges from no other.
    resumed: tuple[tuple[int, int], ...] | None = None


class WireWrittenOver(msgspec.Struct, frozen=True, array_like=True):
    """What a refused slave knows: `node`, the master of `epoch`, has other bytes than this log from
    `offset` on, because its disk had lost the end of its log and it has written since.
    """

    epoch: int
    offset: int
    node: int


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A node's description of itself; `max_offset` is the end of the log's written bytes."""

    purpose: Purpose
    cluster: str
    group: str
    node: int
    store_id: str
    role: str
    open_epoch: int  # the epoch in which the node takes writes now; 0: it takes none
    promised_epoch: int
    history: tuple[WireEpoch, ...]
    min_offset: int
    max_offset: int
    confirmed_offset: int
    ack_point: Literal["written", "flushed"]
    unclean: bool
    largest_frame: int
    file_size: int
    nonce: bytes
    # PROMISE: `acks` and node list are those of the candidate's epoch. REPAIR: the range that is
    # wanted, at most REPAIR_BYTES_MAX, in both modes. COPY: the range to copy, and
    # the last epoch and log end that the source must still have.
    acks: int = 0
    nodes: tuple[int, ...] = ()
    copy_from: int = 0
    copy_to: int = 0
    expect_epoch: int = 0
    expect_end: int = 0
    # FOLLOW, COPY: a digest of bytes whose writer no epoch names (ha/replica/digests.py).
    digest_from: int = 0
    digest_to: int = 0
    digest: bytes = b""
    accept_loss: bool = False  # FOLLOW: the operator accepts that differing records are cut
    # The node's replication mode. In the mode "dledger" the fields about epochs are 0 and empty:
    # its terms are no epochs, and only messages on its links carry them.
    mode: str = "classic"
    # DLEDGER: `new_store` asks only whether the node is known with another store. `lost_disk`: this
    # store replaces one that was lost, and the node knows it (docs/dledger.md).
    new_store: bool = False
    lost_disk: bool = False
    learners: bool = False  # DLEDGER: the node knows member lists with learners
    # The store of each node number as this node knows it, and the stores that must not come back;
    # under its own number those that its store has replaced. Nodes of an earlier version lack them.
    stores: dict[int, str] = {}
    replaced_stores: dict[int, tuple[str, ...]] = {}
    # DLEDGER: the id of the group that this log belongs to; the group's first members as this node
    # knows them, as long as its log is empty.
    group_id: str = ""
    first_members: tuple[int, ...] = ()
    # In the exchange of the version before, with a secret: the node also knows the one of this
    # version, so with a node that knows it too it must not have come to the old one.
    proves_first: bool = False
    # The node's version knows RocketMQ's clients: records of topics, delays, forwarded requests.
    remoting: bool = False
    # The node's version knows reports that say whether readers wait (protocol/ha_link.py).
    readers: bool = False
    # The nodes that have not followed this master since it resumed its epoch; its log's end then.
    unmet: dict[int, int] = {}
    # This node's log ends with bytes that its master has replaced; None: not that it knows.
    written_over: WireWrittenOver | None = None
    # As a master it counts its own copy of a record as soon as that is written, not only when it is
    # synced: so a slave knows alone what an epoch with one acknowledgement has confirmed.
    counts_written: bool = False


class Surveyed(msgspec.Struct, frozen=True, tag="surveyed"):
    """The answer to a survey. It has no fields: the answerer's HELLO has said everything."""


class Promised(msgspec.Struct, frozen=True, tag="promised"):
    """The promise is durable; the fields are the node's state right after it.

    A promotion uses this state, not the state in the HELLO that came before.
    """

    history: tuple[WireEpoch, ...]
    max_offset: int
    unclean: bool
    # As far as this node knows, these values may be in force: the smallest and greatest `acks`, and
    # every node list. They include the values of the promised epoch.
    acks_min: int | None = None
    acks_max: int | None = None
    node_lists: tuple[tuple[int, ...], ...] = ()


class StreamFrom(msgspec.Struct, frozen=True, tag="stream_from"):
    """The stream starts at `offset`, the end of the slave's log; the slave reports immediately."""

    offset: int


class RewindTo(msgspec.Struct, frozen=True, tag="rewind_to"):
    """The slave archives its log beyond `offset`, cuts it there, and says HELLO again.

    The slave keeps the first `entries` entries of its history.
    """

    offset: int
    entries: int


class Resync(msgspec.Struct, frozen=True, tag="resync"):
    """The slave sets its store aside, starts an empty log at `offset`, and says HELLO again.

    The slave takes `entries` as its history.
    """

    offset: int
    entries: tuple[WireEpoch, ...]


class CopyFrom(msgspec.Struct, frozen=True, tag="copy_from"):
    """The range follows in data frames, as long as the source has the expected epoch and end."""

    offset: int


class Linked(msgspec.Struct, frozen=True, tag="linked"):
    """The DLedger link is open: frames of protocol/dledger_link.py follow, in both directions."""


class StoreKnown(msgspec.Struct, frozen=True, tag="store_known"):
    """The answer to a node with `new_store`: whether its number is known with another store.

    `members` are the members of the group, if it has begun: its first entry is in a log. `replaced`
    are the stores that the number has had.
    """

    other: bool
    members: tuple[int, ...] = ()
    replaced: tuple[str, ...] = ()


class Forwarding(msgspec.Struct, frozen=True, tag="forwarding"):
    """Requests may follow (protocol/forward_link.py): so many at a time without an answer.

    `size` is how many bytes they may have together. `aged`: the requests may say their age.
    """

    requests: int
    size: int
    aged: bool = False


class RangeOf(msgspec.Struct, frozen=True, tag="range"):
    """Bytes of the log, unchecked; none if not all of the range is readable.

    `epochs` are the (epoch, start offset) entries of the history that cover the range (classic).
    """

    min_offset: int
    readable_offset: int
    data: bytes
    epochs: tuple[tuple[int, int], ...] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request is refused; `reason` is text for the operator."""

    reason: str
    promised_epoch: int = 0
    # Mode dledger: (index, term, members) of the committed list that leaves out the caller.
    removed: tuple[int, int, tuple[int, ...]] | None = None
    # FOLLOW: from there on this master has written other bytes of its epoch than the slave has.
    written_over: int | None = None


Answer = (
    Surveyed
    | Promised
    | StreamFrom
    | RewindTo
    | Resync
    | CopyFrom
    | Linked
    | StoreKnown
    | Forwarding
    | RangeOf
    | Refused
)

_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(payload: bytes) -> bytes:
    """Return the payload with its length before it."""
    if len(payload) > HELLO_BYTES_MAX:
        raise ProtocolError(
            f"a HELLO of {len(payload)} bytes exceeds the limit of {HELLO_BYTES_MAX}"
        )
    return _LENGTH.pack(len(payload)) + payload


def frame_length(header: bytes) -> int:
    """Return the length that a frame's header announces; ProtocolError if it is over 64 KiB."""
    (length,) = _LENGTH.unpack(header)
    if length > HELLO_BYTES_MAX:
        raise ProtocolError(f"a frame of {length} bytes; at most {HELLO_BYTES_MAX} are allowed")
    return int(length)


def encode_hello(hello: Hello) -> bytes:
    """Return the bytes of a HELLO, without the length before them."""
    return _encoder.encode(hello)


def decode_hello(payload: bytes) -> Hello:
    """Return the HELLO in `payload`; ProtocolError names what is wrong."""
    try:
        hello = _hello_decoder.decode(payload)
    except UNREADABLE as error:
        raise ProtocolError(f"not a HELLO: {error}") from error
    _check_hello(hello)
    return hello


def encode_answer(answer: Answer) -> bytes:
    """Return the bytes of an answer, without the length before them."""
    return _encoder.encode(answer)


def decode_answer(payload: bytes) -> Answer:
    """Return the answer in `payload`; ProtocolError names what is wrong."""
    try:
        return _answer_decoder.decode(payload)
    except UNREADABLE as error:
        raise ProtocolError(f"not an answer to a HELLO: {error}") from error


class Opening(NamedTuple):
    """What the exchange with a secret begins with; both ends must see the same."""

    secret: bytes
    caller_nonce: bytes
    answerer_nonce: bytes
    tls: bool  # whether TLS is below

    @property
    def caller_proof(self) -> bytes:
        """What the caller shows."""
        return self._derived(b"HA 2 caller")

    @property
    def answerer_proof(self) -> bytes:
        """What the answerer shows."""
        return self._derived(b"HA 2 answerer")

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """The keys of the MACs: of the caller's frames, of the answerer's."""
        return self._derived(b"HA 2 caller key"), self._derived(b"HA 2 answerer key")

    def _derived(self, label: bytes) -> bytes:
        below = b"tls" if self.tls else b"plain"
        agreed = (SECRET_CALL_MAGIC, SECRET_ANSWER_MAGIC, below)
        return _proof(self.secret, label, *agreed, self.caller_nonce, self.answerer_nonce)


def caller_proof(secret: bytes | None, caller: bytes, answerer: bytes) -> bytes:
    """Return the caller's proof over both HELLOs; empty without a secret."""
    return _proof(secret, b"hastore caller", caller, answerer)


def answerer_proof(secret: bytes | None, caller: bytes, answerer: bytes, answer: bytes) -> bytes:
    """Return the answerer's proof over both HELLOs and its answer; empty without a secret."""
    return _proof(secret, b"hastore answerer", caller, answerer, answer)


def check_proof(expected: bytes, given: bytes) -> None:
    """Compare two proofs in constant time; AuthenticationError when they differ."""
    if not hmac.compare_digest(expected, given):
        raise AuthenticationError(
            "the peer does not have this node's secret; ha.secret_file must hold the same bytes on "
            "every node"
        )


def _proof(secret: bytes | None, label: bytes, *parts: bytes) -> bytes:
    if secret is None:
        return b""
    mac = hmac.new(secret, label, hashlib.sha256)
    for part in parts:
        mac.update(_LENGTH.pack(len(part)))
        mac.update(part)
    return mac.digest()


def _check_hello(hello: Hello) -> None:
    if not 1 <= hello.node <= 65535:
        raise ProtocolError(f"node number {hello.node} is outside 1..65535")
    if len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError(f"a nonce of {len(hello.nonce)} bytes instead of {NONCE_BYTES}")
    if not 0 <= hello.min_offset <= hello.max_offset < 1 << 63:
        raise ProtocolError(f"impossible log range [{hello.min_offset}, {hello.max_offset})")
    if not 0 <= hello.confirmed_offset <= hello.max_offset:
        raise ProtocolError(
            f"confirmed offset {hello.confirmed_offset} beyond the log's end {hello.max_offset}"
        )
    if not 0 <= hello.digest_from <= hello.digest_to <= hello.max_offset:
        raise ProtocolError(
            f"a digest of [{hello.digest_from}, {hello.digest_to}), but the log ends at "
            f"{hello.max_offset}"
        )
    if len(hello.digest) not in (0, DIGEST_BYTES):
        raise ProtocolError(f"a digest of {len(hello.digest)} bytes instead of {DIGEST_BYTES}")
    replaced = [one for ids in hello.replaced_stores.values() for one in ids]
    if any(len(one) > STORE_ID_MAX for one in (hello.group_id, *hello.stores.values(), *replaced)):
        raise ProtocolError(f"an id of more than {STORE_ID_MAX} characters")
    epoch, start = -1, 0
    for entry in hello.history:
        if entry.epoch <= epoch or entry.start < start:
            raise ProtocolError(
                f"the epoch history is out of order: {entry.epoch} from {entry.start} on follows "
                f"{epoch} from {start} on"
            )
        epoch, start = entry.epoch, entry.start
    for value in (hello.promised_epoch, hello.open_epoch, epoch + 1):
        if not 0 <= value < 1 << 62:
            raise ProtocolError(f"impossible epoch {value}")
