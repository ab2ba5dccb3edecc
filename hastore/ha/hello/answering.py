"""The answerer's side of HELLO: identify the caller, then do what it asks for.

docs/ha-link.md, "HELLO", describes the exchange. The connection's reader calls `answer_call`.
"""

import logging
from typing import Protocol

import msgspec

from hastore.addresses import is_loopback
from hastore.bounded_log import BoundedLines
from hastore.errors import AuthenticationError, ProtocolError
from hastore.ha.hello.peer import Deadline, check_certificate, receive_frame, warn_of_tampering
from hastore.ha.hello.ranges import answer_range
from hastore.ha.node.member import Member
from hastore.ha.replica.digests import own_digest
from hastore.ha.rules.epochs import last_epoch
from hastore.ha.rules.following import FollowAnswer, digest_due, digest_problem
from hastore.protocol.ha_link import data_header
from hastore.protocol.hello import (
    ANSWER_MAGIC,
    Answer,
    CopyFrom,
    Forwarding,
    Hello,
    Purpose,
    Refused,
    StreamFrom,
    Surveyed,
    answerer_proof,
    caller_proof,
    check_proof,
    decode_hello,
    encode_answer,
    encode_hello,
    frame,
)
from hastore.security.tls_socket import LinkSocket, TlsSocket

log = logging.getLogger(__name__)

_refusals = BoundedLines(log, level=logging.INFO)  # anyone can cause these without secret and TLS
COPY_FRAME_BYTES = 1024 * 1024


class AnsweredConnection(Protocol):
    """What `answer_call` needs of the connection on which the HELLO arrived."""

    member: Member  # this node
    sock: LinkSocket
    address: str  # the caller's address
    proved: bool  # both ends have shown the secret before HELLO

    def identify(self, hello: Hello) -> None:
        """Record who the caller is.

        If a secret is configured, the caller has proved that it has the secret; with TLS, that it
        has the certificate of this node.
        """
        ...

    def follow(self, hello: Hello) -> FollowAnswer:
        """Answer a caller that wants to follow.

        If the answer is StreamFrom, the caller's stream is registered.
        """
        ...

    def start_stream(self) -> None:
        """Start the registered stream; called after the answer has been sent."""
        ...

    def forward(self) -> Answer:
        """Answer a caller that wants to forward requests of its clients."""
        ...


class Answerer(Protocol):
    """Who answers the callers of a node's HA port: the side of the node's replication mode."""

    @property
    def secret(self) -> bytes | None:
        """The group's secret, None without one."""
        ...

    @property
    def address(self) -> str:
        """The caller's address."""
        ...

    def may_be_old(self, node: int) -> bool:
        """Whether a node may be of the version before, which proves the secret after its HELLO."""
        ...

    def hello(self, purpose: Purpose) -> Hello:
        """Describe this node for the HELLO to a caller with this purpose."""
        ...

    def identify(self, hello: Hello) -> None:
        """Record who the caller is; if a secret is configured, it has proved that it has it."""
        ...

    def decide(self, hello: Hello) -> Answer:
        """Return the answer to the caller; what it promises is durable when this returns."""
        ...


def answer_hello(
    sock: LinkSocket, deadline: Deadline, answerer: Answerer, *, proved: bool = False
) -> tuple[Hello, Answer]:
    """Answer a HELLO whose magic has been read; return it with the answer that was sent.

    `proved`: both ends have shown the secret before (`admit`). Without that nothing changes before
    the caller has shown it, if one is configured. With TLS nothing changes before the caller's
    certificate was held against its HELLO.
    Raises AuthenticationError or ProtocolError for a fault of the caller, OSError when the caller
    has left or is too slow.
    """
    hello, answer = _exchange(sock, deadline, answerer, proved)
    if isinstance(answer, Refused):
        # A refused survey is logged at DEBUG: the caller gets the reason, and soon asks again.
        say = log.debug if hello.purpose is Purpose.SURVEY else _refusals.write
        say("refused %s of node %d: %s", hello.purpose.value, hello.node, answer.reason)
    return hello, answer


def _exchange(
    sock: LinkSocket, deadline: Deadline, answerer: Answerer, proved: bool
) -> tuple[Hello, Answer]:
    if not proved:
        sock.sendall(ANSWER_MAGIC)
    theirs = receive_frame(sock, deadline)
    hello = decode_hello(theirs)
    check_certificate(sock, hello)
    described = answerer.hello(hello.purpose)
    if proved:
        answerer.identify(hello)
        answer = answerer.decide(hello)
        sock.sendall(frame(encode_hello(described)) + frame(encode_answer(answer)))
        return hello, answer
    if answerer.secret is not None:
        _check_old(answerer, hello)
        described = msgspec.structs.replace(described, proves_first=True)
    mine = encode_hello(described)
    sock.sendall(frame(mine))
    check_proof(caller_proof(answerer.secret, theirs, mine), receive_frame(sock, deadline))
    if answerer.secret is not None and not isinstance(sock, TlsSocket):
        who = f"node {hello.node}"
        warn_of_tampering(answerer.address, who, "it is of the version before")
    answerer.identify(hello)
    answer = answerer.decide(hello)
    payload = encode_answer(answer)
    proof = answerer_proof(answerer.secret, theirs, mine, payload)
    sock.sendall(frame(proof) + frame(payload))
    return hello, answer


def _check_old(answerer: Answerer, hello: Hello) -> None:
    """Refuse a caller that proves the secret after its HELLO, unless it knows no better.

    This comes before anything is said of this node.
    """
    if hello.proves_first:
        raise AuthenticationError(
            f"node {hello.node} can prove the secret first, but a connection on which it began so "
            "was cut: there was no room here, or somebody between both nodes wants a link that can "
            "be changed"
        )
    if not answerer.may_be_old(hello.node):
        raise AuthenticationError(
            f"node {hello.node} has once proved the secret before its HELLO, and does not now; "
            "run the same version on all nodes"
        )


class _ClassicAnswerer:
    """The classic mode's side of one connection."""

    def __init__(self, connection: AnsweredConnection) -> None:
        self._connection = connection
        self.secret = connection.member.secret
        self.hello = connection.member.hello
        self.identify = connection.identify
        self.address = connection.address
        self.may_be_old = connection.member.may_be_old

    def decide(self, hello: Hello) -> Answer:
        """Return the answer of a node of the classic mode."""
        return _decide(self._connection, hello)


def answer_call(connection: AnsweredConnection, deadline: Deadline) -> Answer | None:
    """Answer a HELLO of the classic mode; return the answer if something follows on the link.

    That is a stream, or requests of clients. Raises what `answer_hello` raises.
    """
    member, sock = connection.member, connection.sock
    answerer = _ClassicAnswerer(connection)
    hello, answer = answer_hello(sock, deadline, answerer, proved=connection.proved)
    if isinstance(answer, StreamFrom):
        # sendfile needs a blocking socket. Set it now, while only this thread uses the socket.
        sock.settimeout(None)
        connection.start_stream()
        return answer
    if isinstance(answer, Forwarding):
        return answer
    if isinstance(answer, CopyFrom):
        sock.settimeout(member.config.ha.housekeeping_interval_ms / 1000)
        _copy(connection, hello)
    return None


def _decide(connection: AnsweredConnection, hello: Hello) -> Answer:
    member = connection.member
    problem = member.identity_problem(hello)
    if problem is not None:
        member.on_refused(connection.address, f"{hello.purpose.value}: {problem}")
        return Refused(problem)
    if connection.proved:
        member.state.learn_proved(hello.node)
    if hello.purpose is Purpose.DLEDGER:
        return Refused("a node of the classic mode has no DLedger links")
    if hello.purpose is Purpose.PROMISE:
        return _promise(connection, hello)
    # A master that meets a higher epoch in any HELLO turns read-only at once, durably.
    member.observe_epoch(max(hello.promised_epoch, last_epoch(hello.history)), f"node {hello.node}")
    if hello.purpose is Purpose.SURVEY:
        return Surveyed()
    if hello.purpose is Purpose.FORWARD:
        return connection.forward()
    if hello.purpose is Purpose.REPAIR:
        entries = member.state
        return answer_range(
            member.store, lambda: [(one.epoch, one.start) for one in entries.history], hello
        )
    if hello.purpose is Purpose.COPY:
        if not 0 <= hello.copy_from <= hello.copy_to <= member.store.max_offset:
            return Refused(f"no range [{hello.copy_from}, {hello.copy_to}) in this log")
        problem = _digest_problem(connection, hello)
        if problem is not None:
            return Refused(problem)
        return CopyFrom(hello.copy_from)
    return connection.follow(hello)


def _digest_problem(connection: AnsweredConnection, hello: Hello) -> str | None:
    member = connection.member
    store = member.store
    due = digest_due(hello, member.state.history, store.min_offset, store.max_offset)
    return digest_problem(hello, due, own_digest(store, hello))


def _promise(connection: AnsweredConnection, hello: Hello) -> Answer:
    member = connection.member
    host = connection.address.rpartition(":")[0].strip("[]")
    proved = member.secret is not None or member.tls is not None
    if not proved and not is_loopback(host):
        why = "without ha.secret_file or security.ha: tls promises are made to loopback only"
        member.on_refused(connection.address, why)
        return Refused(why)
    try:
        answer = member.promise(hello)
    except OSError as failure:  # no promise: the candidate, and its operator, are told why
        log.warning("no promise of epoch %d to node %d: %s",
                    hello.promised_epoch, hello.node, failure)  # fmt: skip
        return Refused(f"its promise cannot be saved: {failure}; see to its disk")
    if not isinstance(answer, Refused):
        member.state.learn_store(hello.node, hello.store_id)
    return answer


def _copy(connection: AnsweredConnection, hello: Hello) -> None:
    """Send the range in pieces.

    Before each piece this checks that this node's promise, last epoch and log end are those that
    the caller expects.
    """
    member, sock = connection.member, connection.sock
    store, state = member.store, member.state
    offset = hello.copy_from
    while offset < hello.copy_to:
        with member.gate.lock:  # cuts and appends hold it, so all values are of one moment
            data = state.data
            now = (data.promised_epoch, state.last_epoch, store.max_offset)
            due = (hello.promised_epoch, hello.expect_epoch, hello.expect_end)
            if now != due:
                raise ProtocolError(f"the copy's source has changed: {now} instead of {due}")
            limit = min(COPY_FRAME_BYTES, hello.copy_to - offset)
            with store.view(offset, limit) as view:
                piece = bytes(view)
        if not piece:
            raise ProtocolError(
                f"retention has removed the bytes at {offset}, which were to be copied next; the "
                "promotion tries again"
            )
        sock.sendall(data_header(offset, len(piece)) + piece)
        offset += len(piece)
