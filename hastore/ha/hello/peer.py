"""The calling end of the HA port: `call` says HELLO to one node, `ask_all` to all in parallel.

`ask_all` asks for the nodes' state (a survey) or for promises. The functions block, at most until
their deadline. First come the steps on a link's socket that both ends need.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from hastore.addresses import is_loopback, is_numeric
from hastore.bounded_log import BoundedLines
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import (
    AuthenticationError,
    ClassicPeerError,
    HastoreError,
    ProtocolError,
    TamperedError,
)
from hastore.protocol.hello import (
    ANSWER_MAGIC,
    CALL_MAGIC,
    LENGTH_BYTES,
    MAGIC_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    SECRET_ANSWER_MAGIC,
    SECRET_CALL_MAGIC,
    Answer,
    Hello,
    Opening,
    Purpose,
    answerer_proof,
    caller_proof,
    check_proof,
    decode_answer,
    decode_hello,
    encode_hello,
    frame,
    frame_length,
)
from hastore.security.sealed_socket import SealedSocket
from hastore.security.tls_contexts import TlsContexts
from hastore.security.tls_engine import TLS_ALERT, NodeName, TlsEngine
from hastore.security.tls_socket import LinkSocket, TlsSocket
from hastore.service import Service, raise_failure

if TYPE_CHECKING:  # it loads the store, which `hastore doctor` does not need
    from hastore.ha.node.member import Member

log = logging.getLogger(__name__)


class ClosedError(ProtocolError):
    """The other end closed the connection in the middle of a message."""


@dataclass(slots=True)
class Call:
    """An open connection, with the HELLO and the answer that the peer sent."""

    sock: LinkSocket
    hello: Hello
    answer: Answer
    proved: bool = False  # the secret, before anything was said

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


class Deadline:
    """A point in monotonic time that limits several blocking calls together."""

    def __init__(self, clock: Clock, timeout_ms: float) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._end_ms = clock.monotonic_ms() + timeout_ms

    def left_s(self) -> float:
        """Return the seconds left; raises TimeoutError after the deadline."""
        left = (self._end_ms - self._clock.monotonic_ms()) / 1000.0
        if left <= 0:
            raise TimeoutError(
                f"the other end was too slow for a limit of {self._timeout_ms / 1000:g} s; look at "
                "the load of its machine, and at the network between both"
            )
        return left


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT" (an IPv6 host may stand in brackets)."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def connect(endpoint: tuple[str, int], timeout_s: float) -> socket.socket:
    """Connect over TCP within `timeout_s`. Raises OSError, also for a name that no host can have.

    The look-up of a name is a part of that time, and the addresses of the name share the rest.
    """
    host, port = endpoint
    if is_numeric(host):
        return socket.create_connection(endpoint, timeout_s)
    deadline = Deadline(SYSTEM_CLOCK, timeout_s * 1000.0)
    found = _look_up(host, timeout_s)
    failure: OSError | None = None
    for place, address in enumerate(found):
        try:
            share_s = deadline.left_s() / (len(found) - place)
            return socket.create_connection((address, port), share_s)
        except OSError as refused:
            failure = refused
    raise failure or OSError(f"{host} has no address")


class _LookUp(Service):
    """Look up one name; DNS cannot be interrupted, so who has no more time goes on without it."""

    under_way: ClassVar[dict[str, _LookUp]] = {}  # so that a DNS that hangs costs one thread a name
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, host: str) -> None:
        super().__init__("PeerLookUp", on_failure=raise_failure)
        self.host = host
        self.done = threading.Event()
        self.found: list[str] = []
        self.problem: OSError | None = None

    def run(self) -> None:
        """Look it up once."""
        try:
            infos = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
            self.found = list(dict.fromkeys(str(info[4][0]) for info in infos))
        except OSError as failure:
            self.problem = failure
        except ValueError as failure:  # UnicodeError too
            self.problem = OSError(f"{self.host} is no name of a host: {failure}")
        finally:  # also after any other failure
            with self.lock:
                self.under_way.pop(self.host, None)
            self.done.set()


def _look_up(host: str, timeout_s: float) -> list[str]:
    """Return the addresses of a name. Raises OSError, TimeoutError if that takes too long."""
    with _LookUp.lock:
        look = _LookUp.under_way.get(host)
        if look is None:
            look = _LookUp(host)
            try:
                look.start()
            except RuntimeError as failure:
                raise OSError(f"no thread to look up {host}: {failure}") from failure
            _LookUp.under_way[host] = look
    if not look.done.wait(timeout_s):
        raise TimeoutError(
            f"the look-up of {host} took more than {timeout_s:g} s; look at this machine's name "
            "servers, or write the address itself"
        )
    if look.problem is not None:
        raise look.problem
    return look.found


def _forget_look_ups() -> None:
    _LookUp.under_way, _LookUp.lock = {}, threading.Lock()


# A child must not wait for a look-up of its parent's, nor find its lock held.
os.register_at_fork(after_in_child=_forget_look_ups)


def receive_exactly(sock: LinkSocket, size: int, deadline: Deadline) -> bytes:
    """Return exactly `size` bytes.

    Raises ProtocolError when the peer closes the connection earlier, TimeoutError after the
    deadline.
    """
    data = bytearray()
    while len(data) < size:
        sock.settimeout(deadline.left_s())
        piece = sock.recv(size - len(data))
        if not piece:
            raise ClosedError(
                "the other end closed the connection in the middle of a message; its log says why"
            )
        data += piece
    return bytes(data)


def receive_frame(sock: LinkSocket, deadline: Deadline) -> bytes:
    """Return the payload of the next length-prefixed frame, at most 64 KiB."""
    return receive_exactly(
        sock, frame_length(receive_exactly(sock, LENGTH_BYTES, deadline)), deadline
    )


def wait_in_kernel(sock: LinkSocket, *, receive_ms: float, send_ms: float | None = None) -> None:
    """Make a link blocking, with the kernel's timeouts, which cost no call for each receive.

    A receive or a send that lasts longer raises BlockingIOError.
    """
    sock.settimeout(None)
    for option, milliseconds in ((socket.SO_RCVTIMEO, receive_ms), (socket.SO_SNDTIMEO, send_ms)):
        if milliseconds is not None:
            seconds, rest_ms = divmod(milliseconds, 1000)
            microseconds = int(rest_ms * 1000) or int(not seconds)  # 0 and 0: it waits for ever
            value = struct.pack("@ll", int(seconds), microseconds)
            sock.setsockopt(socket.SOL_SOCKET, option, value)


def break_link(sock: LinkSocket, whose: str) -> None:
    """End a link, from any thread: the threads that use it meet its end. Its owner closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("shutdown of the link of %s: %s", whose, error)


def check_certificate(sock: LinkSocket, hello: Hello) -> None:
    """Raise AuthenticationError if TLS has shown another node than the HELLO names.

    A link without TLS has no certificates.
    """
    if not isinstance(sock, TlsSocket):
        return
    peer, named = sock.peer, NodeName(hello.cluster, hello.group, hello.node)
    shown = None if peer is None else peer.node
    if shown is None:
        name = None if peer is None else peer.common_name
        raise AuthenticationError(
            f"its certificate ({name}) is not a node's; make one with `hastore keys cert -c "
            "NODE.yaml`"
        )
    if shown != named:
        raise AuthenticationError(
            f"its certificate is that of {shown}, but its HELLO says {named}; give each node its "
            "own with `hastore keys cert -c NODE.yaml`"
        )


class _SilentError(ProtocolError):
    """The other end closed the connection instead of its magic."""


def _receive_magic(sock: LinkSocket, address: str, deadline: Deadline) -> bytes:
    sock.settimeout(deadline.left_s())
    first = sock.recv(1)
    if not first:
        raise _SilentError(
            f"{address} closed the connection at once; its log says why. A node of the version "
            "before does so if this one must prove the secret first: upgrade it"
        )
    if first[0] == TLS_ALERT:
        raise AuthenticationError(
            f"{address} speaks TLS only; set security.ha: tls on this node too"
        )
    return first + receive_exactly(sock, MAGIC_BYTES - 1, deadline)


def call(
    address: str,
    hello: Hello,
    secret: bytes | None,
    clock: Clock,
    timeout_ms: float,
    tls: TlsContexts | None = None,
    *,
    may_be_old: bool = False,
) -> Call:
    """Connect, say HELLO and return the peer's answer, all within `timeout_ms`.

    With `secret` nothing is said before the peer has proved that it has it, and without TLS the
    result's socket has MACs. `may_be_old`: a peer that closes the connection instead may be of the
    version before, which proves it later and has no MACs; it is called again so, and refused if it
    is of this version after all. With `tls` nothing is said before TLS has verified the peer's
    certificate, and the certificate must be that of the node that the peer's HELLO names.
    The socket of the result is blocking, without a timeout. Raises OSError when the peer is not
    reachable or too slow, ClassicPeerError when it is a RocketMQ master, ProtocolError when it
    breaks the protocol, and AuthenticationError when its proof or its certificate is wrong or it
    belongs to another cluster or group.
    """
    deadline = Deadline(clock, timeout_ms)
    opened = _Caller(address, hello, secret, deadline)
    if secret is not None:
        try:
            return opened.call(SECRET_CALL_MAGIC, tls)
        except _SilentError:
            if not may_be_old:
                raise
    return opened.call(CALL_MAGIC, tls)


@dataclass(frozen=True, slots=True)
class _Caller:
    """One call: what it says, to whom, and until when."""

    address: str
    hello: Hello
    secret: bytes | None
    deadline: Deadline

    def call(self, magic: bytes, tls: TlsContexts | None) -> Call:
        """Connect, and call by the exchange that begins with this magic."""
        address, deadline = self.address, self.deadline
        plain = connect(split_address(address), deadline.left_s())
        sock: LinkSocket = plain
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                engine = TlsEngine(tls.node_client(), server_side=False)
                sock = TlsSocket.over(plain, engine, deadline.left_s)
            sock.sendall(magic)
            self._check_magic(_receive_magic(sock, address, deadline), magic)
            if magic == SECRET_CALL_MAGIC:
                sock = self._prove(sock)
                made = self._say_proved(sock)
            else:
                made = self._say(sock)
            self._check_group(made.hello)
            sock.settimeout(None)
            return made
        except BaseException:
            sock.close()
            raise

    def _check_magic(self, answered: bytes, magic: bytes) -> None:
        address = self.address
        if answered == magic:
            raise ClassicPeerError(
                f"{address} speaks RocketMQ's classic HA protocol; to follow it, set "
                "ha.classic_master to this address"
            )
        secret = magic == SECRET_CALL_MAGIC
        if answered == (SECRET_ANSWER_MAGIC if secret else ANSWER_MAGIC):
            return
        if answered in (ANSWER_MAGIC, SECRET_ANSWER_MAGIC):
            has = "has no ha.secret_file" if secret else "wants a proof of ha.secret_file first"
            raise AuthenticationError(
                f"{address} {has}; give the same secret and version to every node"
            )
        raise ProtocolError(f"{address} does not speak this version of the HA protocol")

    def _prove(self, sock: LinkSocket) -> LinkSocket:
        """Prove the secret to each other; return the link with MACs, or the same one under TLS."""
        assert self.secret is not None
        theirs = receive_exactly(sock, NONCE_BYTES, self.deadline)
        mine = secrets.token_bytes(NONCE_BYTES)
        opening = Opening(self.secret, mine, theirs, tls=isinstance(sock, TlsSocket))
        sock.sendall(mine + opening.caller_proof)
        try:
            shown = receive_exactly(sock, PROOF_BYTES, self.deadline)
        except ProtocolError as closed:
            raise AuthenticationError(
                f"{self.address} closed the connection when it had this node's proof of the "
                "secret: ha.secret_file must hold the same bytes on every node (or there was no "
                "room for the connection; its log says which)"
            ) from closed
        check_proof(opening.answerer_proof, shown)
        if not isinstance(sock, socket.socket):
            return sock
        callers, answerers = opening.keys
        return SealedSocket(sock, callers, answerers)

    def _say_proved(self, sock: LinkSocket) -> Call:
        """Exchange HELLO and answer with a peer that has proved the secret."""
        sock.sendall(frame(encode_hello(self.hello)))
        peer = decode_hello(receive_frame(sock, self.deadline))
        check_certificate(sock, peer)
        return Call(sock, peer, decode_answer(receive_frame(sock, self.deadline)), proved=True)

    def _say(self, sock: LinkSocket) -> Call:
        """Exchange HELLO and answer without a secret, or with a peer of the version before."""
        secret, deadline = self.secret, self.deadline
        hello = msgspec.structs.replace(self.hello, proves_first=secret is not None)
        mine = encode_hello(hello)
        sock.sendall(frame(mine))
        theirs = receive_frame(sock, deadline)
        peer = decode_hello(theirs)
        check_certificate(sock, peer)
        if secret is not None and peer.proves_first:
            raise AuthenticationError(
                f"{self.address} proves the secret first, but the connection was cut when this "
                "node began so: it has no room, or somebody between both nodes wants a link that "
                "can be changed; trying again"
            )
        sock.sendall(frame(caller_proof(secret, mine, theirs)))
        proof = receive_frame(sock, deadline)
        answer = receive_frame(sock, deadline)
        check_proof(answerer_proof(secret, mine, theirs, answer), proof)
        if secret is not None and not isinstance(sock, TlsSocket):
            warn_of_tampering(self.address, f"node {peer.node}", "it is of the version before")
        return Call(sock, peer, decode_answer(answer))

    def _check_group(self, peer: Hello) -> None:
        mine = self.hello
        if (peer.cluster, peer.group) != (mine.cluster, mine.group):
            raise AuthenticationError(
                f"{self.address} belongs to {peer.cluster}/{peer.group}, not to "
                f"{mine.cluster}/{mine.group}; check the addresses under `nodes`"
            )


_unsafe_links = BoundedLines(log)


def warn_of_tampering(address: str, who: str, why: str) -> None:
    """Say loudly that a link beyond loopback is not tamper-proof, whose it is and why."""
    if not is_loopback(split_address(address)[0]):
        _unsafe_links.write(
            "the link with %s at %s is not tamper-proof (%s): who is between both can change what "
            "is on it, unseen",
            who, address, why,
        )  # fmt: skip


@contextmanager
def telling_of_tampering(on_refused: Callable[[str, str], None], address: str) -> Iterator[None]:
    """Tell the audit log that bytes of the link with `address` were changed, and raise that on."""
    try:
        yield
    except TamperedError as error:
        on_refused(address, str(error))
        raise


CALL_TIMEOUT_MS = 1_000.0


@dataclass(frozen=True, slots=True)
class SurveyReply:
    """One node's reply: its HELLO and answer, or why there is none."""

    node: int
    address: str
    hello: Hello | None = None
    answer: Answer | None = None
    problem: str | None = None


def ask_all(
    member: Member,
    purpose: Purpose,
    *,
    skip: frozenset[int] = frozenset(),
    timeout_ms: float = CALL_TIMEOUT_MS,
    **extra: Any,
) -> list[SurveyReply]:
    """Call every other node except those in `skip`, in parallel; return their replies.

    This takes at most about `timeout_ms`. `extra` are further fields of the HELLO.
    """
    peers = [(node, address) for node, address in member.peers if node not in skip]
    if not peers:
        return []

    def ask(peer: tuple[int, str]) -> SurveyReply:
        return ask_one(member, peer[0], peer[1], purpose, timeout_ms=timeout_ms, **extra)

    with ThreadPoolExecutor(len(peers), thread_name_prefix=f"Survey-{purpose.value}") as pool:
        return list(pool.map(ask, peers))


def ask_one(
    member: Member, node: int, address: str, purpose: Purpose, *, timeout_ms: float, **extra: Any
) -> SurveyReply:
    """Call one node and close the connection. A failure is returned as the reply's `problem`."""
    try:
        with telling_of_tampering(member.on_refused, address):
            opened = call(
                address,
                member.hello(purpose, **extra),
                member.secret,
                member.clock,
                timeout_ms,
                member.tls,
                may_be_old=member.may_be_old(node),
            )
        opened.close()
        check_peer(member, opened, node, address)
    except (HastoreError, OSError) as error:
        return SurveyReply(node, address, problem=str(error) or type(error).__name__)
    return SurveyReply(node, address, opened.hello, opened.answer)


def check_number(hello: Hello, node: int, address: str) -> None:
    """Raise ProtocolError when another node than `node` answers at this address."""
    if hello.node != node:
        raise ProtocolError(
            f"node {hello.node} answers at {address}, which `nodes` gives to node {node}; "
            "correct `nodes`"
        )


def check_peer(member: Member, opened: Call, node: int, address: str) -> None:
    """Raise ProtocolError when another node answers at this address, or the peer is no member.

    A peer with a known number and another store is no member: its promises were lost with its disk.
    """
    check_number(opened.hello, node, address)
    problem = member.identity_problem(opened.hello)
    if problem is not None:
        raise ProtocolError(f"{address}: {problem}")
    if opened.proved:
        member.state.learn_proved(node)
