"""Links on which a node forwards requests of RocketMQ's clients to the master, over the HA port.

    ForwardLink    the calling end: a thread that calls one node, and reads its answers
    ForwardPort    the called end, of all links of a node: it hands requests to the node's handler
    ForwardChannel an open link, in either end: `send` never blocks, a thread sends what waits

docs/ha-link.md ("Forwarding") describes the link, protocol/forward_link.py its frames. What matters
is that nobody ever takes a request for undone that may have been done. A request counts as not sent
only while it waits in this process; as refused, only if the other end says so. When a link ends,
whatever else was sent on it has an unknown outcome.

A link is closed if the other end breaks the protocol, says nothing or takes nothing for
`silence_ms`, and by the calling end when it was not used for `idle_ms`.
"""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hastore.addresses import is_loopback
from hastore.clock import Clock
from hastore.errors import HastoreError, ProtocolError
from hastore.ha.hello.peer import (
    Call,
    ClosedError,
    break_link,
    call,
    check_peer,
    telling_of_tampering,
    wait_in_kernel,
)
from hastore.protocol.forward_link import (
    KEEP_ALIVE,
    ClientRequest,
    Kind,
    LinkFrame,
    LinkReceiver,
    answer_frame,
    client_request,
    refused_frame,
    request_frame,
    unknown_frame,
)
from hastore.protocol.hello import Answer, Forwarding, Purpose, Refused
from hastore.security.sealed_socket import send_whole
from hastore.security.tls_socket import LinkSocket
from hastore.service import OnFailure, Service

if TYPE_CHECKING:  # it loads the store, which the other mode's nodes have already
    from hastore.ha.node.member import Member

log = logging.getLogger(__name__)

REQUESTS_MAX = 4_096  # of one node, that a master works at
BYTES_MAX = 64 << 20  # of these requests; of the answers that wait to be sent
SEND_BYTES = 256 * 1024  # are handed to the kernel at once
PROGRESS_BYTES = 64 * 1024  # received, of a long frame, show that the other end lives
# Why a node takes no forwarded requests. The first lasts until an operator does something.
NOT_TAKEN = "this node takes no forwarded requests: set remoting.enabled: true on every node"
STARTS = "this node starts; call again"
STOPS = "this node stops"
_OLD = "One of the version before closes each call so: upgrade it"
_TO_MASTER = frozenset({Kind.REQUEST, Kind.AGED})
_TO_FORWARDER = frozenset({Kind.ANSWER, Kind.REFUSED, Kind.UNKNOWN, Kind.LATE})


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """The times of these links, in milliseconds."""

    silence_ms: float = 3_000  # a link is closed after so long without a sign of life
    keep_alive_ms: float = 250  # a link is never silent for longer
    idle_ms: float = 30_000  # a link without requests is closed
    dial_ms: float = 1_000  # a call and its HELLO end within this time
    retry_ms: float = 20  # before the first call that follows one in vain; the pauses double
    retry_most_ms: float = 320
    closed_ms: float = 1_000  # one that closes each call for so long does not know these links
    old_ms: float = 2_000  # it is called again after so long


DEFAULT_TIMES = ForwardTimes()


class ForwardChannel(Service):
    """An open link. Any thread may call `send` and `close`; the own thread sends what waits.

    `on_close(reason, unsent)` is called once, in the thread that calls `close`: `unsent` are the
    keys of the frames of which nothing was given to the kernel.
    """

    def __init__(
        self,
        sock: LinkSocket,
        peer: int,
        clock: Clock,
        times: ForwardTimes,
        *,
        name: str,
        on_close: Callable[[str, list[int]], None],
        on_failure: OnFailure,
    ) -> None:
        super().__init__(f"ForwardWriter-{name}", on_failure=self._failed)
        self.peer = peer
        self.heard_ms = clock.monotonic_ms()
        self.reason: str | None = None  # why it was closed
        self._sock = sock
        self._clock = clock
        self._times = times
        self._on_close = on_close
        self._note_failure = on_failure
        self._lock = threading.Lock()
        self._wakeup = threading.Condition(self._lock)
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._rest = b""  # the end of a frame that the kernel did not take at once
        self._busy = False  # the thread is sending
        self._last_send_ms = self.heard_ms
        wait_in_kernel(sock, receive_ms=times.keep_alive_ms, send_ms=times.silence_ms)

    # -- out ---------------------------------------------------------------------------------------

    def send(self, key: int, frame: bytes) -> bool:
        """Send a frame, or let it wait; False if the link is closed, and nothing was sent."""
        slow, broken = False, None
        with self._lock:
            if self.reason is not None:
                return False
            if self._busy or self._rest or self._queue:
                self._queue.append((key, frame))
                self._queued_bytes += len(frame)
                slow = self._queued_bytes > 2 * BYTES_MAX
            else:
                broken = self._hand_over(frame)
            if self._rest or self._queue:
                self._wakeup.notify()
        if broken is not None:  # the kernel has taken nothing of the frame
            self.close(f"sending to node {self.peer} failed: {broken}")
            return False
        if slow:
            self.close(f"node {self.peer} reads too slowly: {self._queued_bytes} bytes wait")
        return True

    def _hand_over(self, frame: bytes) -> OSError | None:
        """Hand a frame to the kernel without waiting; return why it takes nothing any more.

        The caller holds `_lock`.
        """
        self._last_send_ms = self._clock.monotonic_ms()
        try:
            sent = self._sock.sendmsg([frame], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            return error
        self._rest = frame[sent:]
        return None

    def run(self) -> None:
        """Send what waits, until the link is closed."""
        while True:
            with self._wakeup:
                while self.reason is None and not self._rest and not self._queue:
                    self._busy = False
                    self._wakeup.wait()
                if self.reason is not None:
                    return
                self._busy = True
                parts = [self._rest]
                size, self._rest = len(self._rest), b""
                while self._queue and size < SEND_BYTES:
                    _, frame = self._queue.popleft()
                    self._queued_bytes -= len(frame)
                    parts.append(frame)
                    size += len(frame)
            try:
                send_whole(self._sock, b"".join(parts))
            except BlockingIOError:
                lasted_s = self._times.silence_ms / 1000
                self.close(f"node {self.peer} took no bytes for {lasted_s:g} s")
                return
            except (OSError, HastoreError) as error:
                self.close(f"sending to node {self.peer} failed: {error}")
                return
            self._last_send_ms = self._clock.monotonic_ms()

    # -- in ----------------------------------------------------------------------------------------

    def receive(
        self,
        kinds: frozenset[Kind],
        on_frames: Callable[[list[LinkFrame]], None],
        is_over: Callable[[float], str | None] = lambda _now_ms: None,
    ) -> None:
        """Receive until the link is closed; pass on the frames that came together.

        `is_over(now_ms)` is asked several times a second: a text closes the link. Raises
        ProtocolError or OSError if the link broke; `close` gives other reasons.
        """
        self.start()
        receiver = LinkReceiver(kinds)
        progress = 0
        while self.reason is None:
            now = self._clock.monotonic_ms()
            self._keep_alive(now)
            over = is_over(now)
            if over is not None:
                self.close(over)
                return
            try:
                size = self._sock.recv_into(receiver.room())
            except BlockingIOError:
                size = -1
            if not size:
                self.close(f"closed by node {self.peer}")
                return
            now = self._clock.monotonic_ms()
            got = receiver.received(size) if size > 0 else []
            progress += max(size, 0)
            if got or progress >= PROGRESS_BYTES:
                self.heard_ms, progress = now, 0
                frames = [one for one in got if one.kind is not Kind.KEEP_ALIVE]
                if frames:
                    on_frames(frames)
            elif now - self.heard_ms > self._times.silence_ms:
                self.close(f"node {self.peer} was silent for {self._times.silence_ms / 1000:g} s")

    def _keep_alive(self, now_ms: float) -> None:
        if now_ms - self._last_send_ms >= self._times.keep_alive_ms:
            with self._lock:
                if self.reason is None and not (self._busy or self._rest or self._queue):
                    self._hand_over(KEEP_ALIVE)  # the reader meets the end of a broken link
                    if self._rest:
                        self._wakeup.notify()

    # -- end ---------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """End the link, from any thread; the first reason counts."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            unsent = [key for key, _ in self._queue]
            self._queue.clear()
            self._wakeup.notify()
        break_link(self._sock, f"node {self.peer}")
        self._on_close(reason, unsent)

    def wake(self) -> None:
        """End the wait of the thread."""
        self.close("the link ends")

    def release(self) -> None:
        """Wait for the writer, then close the socket; the thread of `receive` calls it last."""
        self.close("its thread has ended")
        self.stop()
        self._sock.close()

    def _failed(self, name: str, failure: BaseException) -> None:
        """End the link, not the node."""
        self._note_failure(name, failure)
        self.close(repr(failure))


# -- the calling end -------------------------------------------------------------------------------


class LinkEvents(Protocol):
    """Who forwards; called in the link's threads."""

    def on_open(self, link: "ForwardLink", limits: Forwarding) -> None:
        """Note that requests may be sent."""
        ...

    def on_outcomes(self, link: "ForwardLink", frames: list[LinkFrame]) -> None:
        """Take what came together: answers, refusals, unknown outcomes."""
        ...

    def on_close(self, link: "ForwardLink", reason: str, unsent: list[int]) -> None:
        """Note that an open link has ended: of these requests nothing was sent.

        What else was sent and has no outcome yet will never have one.
        """
        ...

    def on_problem(self, link: "ForwardLink", reason: str, *, lasting: bool) -> None:
        """Note why a call was in vain; the link calls again.

        `lasting`: it will be in vain until an operator does something.
        """
        ...


def dial_member(
    member: "Member", node: int, timeout_ms: float, purpose: Purpose = Purpose.FORWARD, **extra: int
) -> Call:
    """Call a node of mode classic, by default to forward requests to it.

    `extra` are further fields of the HELLO. Raises HastoreError or OSError.
    """
    address = dict(member.peers).get(node)
    if address is None:
        raise ProtocolError("its address is not known; add the node to `nodes`")
    with telling_of_tampering(member.on_refused, address):
        made = call(
            address, member.hello(purpose, **extra), member.secret, member.clock, timeout_ms,
            member.tls, may_be_old=member.may_be_old(node),
        )  # fmt: skip
    try:
        check_peer(member, made, node, address)
    except BaseException:
        made.close()
        raise
    return made


class ForwardLink(Service):
    """The link to one node: call it until it answers, and again when the link ends."""

    def __init__(
        self,
        node: int,
        dial: Callable[[int, float], Call],
        events: LinkEvents,
        clock: Clock,
        *,
        times: ForwardTimes = DEFAULT_TIMES,
        on_refused: Callable[[str, str], None] = lambda _address, _why: None,
        on_failure: OnFailure,
    ) -> None:
        """Prepare; `dial(node, timeout_ms)` says HELLO to a node, and has checked who answers.

        `on_refused(who, why)` is called if bytes of the link were changed on their way.
        """
        super().__init__(f"ForwardLink-{node}", on_failure=on_failure)
        self.node = node
        self._dial = dial
        self._events = events
        self._clock = clock
        self._times = times
        self._on_refused = on_refused
        self._channel: ForwardChannel | None = None
        self._used_ms = clock.monotonic_ms()  # when a request was last sent, or a call was wanted
        self._awaited = 0  # requests without an outcome
        self._aged = False  # the other end knows requests that say their age
        self._count = threading.Lock()

    # -- any thread --------------------------------------------------------------------------------

    def send(self, number: int, client: ClientRequest) -> bool:
        """Send a request; False if the link is not open, and nothing was sent.

        Raises ProtocolError if the request is too long to be forwarded; nothing was sent.
        """
        channel = self._channel
        if channel is None:
            return False
        frame = request_frame(number, client, aged=self._aged)
        with self._count:
            if self._channel is not channel:  # the next one may be of another version
                return False
            self._used_ms = self._clock.monotonic_ms()
            self._awaited += 1
        sent = channel.send(number, frame)
        if not sent:
            with self._count:
                self._awaited -= 1
        return sent

    def want(self) -> None:
        """Keep the link for now: requests wait for it."""
        self._used_ms = self._clock.monotonic_ms()

    @property
    def silent_ms(self) -> float:
        """For how long the other end has said nothing; it says something 4 times a second."""
        channel = self._channel
        return 0.0 if channel is None else self._clock.monotonic_ms() - channel.heard_ms

    def close(self, reason: str) -> None:
        """End the link for good, without waiting for its thread."""
        self.stopping.set()
        channel = self._channel
        if channel is not None:
            channel.close(reason)

    def wake(self) -> None:
        """Let the thread see `stopping`."""
        self.close("the node stops")

    # -- the link's thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Call, and serve the link, until it is closed or was not used for long."""
        pause_ms = self._times.retry_ms
        closes_ms: float | None = None  # since when the other end closes each call
        while not self.stopping.is_set():
            now = self._clock.monotonic_ms()
            if now - self._used_ms > self._times.idle_ms:
                self.stopping.set()
                self._events.on_problem(self, "not used any more", lasting=False)
                return
            try:
                made = self._dial(self.node, self._times.dial_ms)
            except ClosedError as error:  # so does one that ends, or has no room
                closes_ms = now if closes_ms is None else closes_ms
                lasting = now - closes_ms >= self._times.closed_ms
                text = f"node {self.node} takes no forwarded requests: {error}"
                if lasting:
                    text = f"{text}. {_OLD}"
                    pause_ms = self._times.old_ms
                self._events.on_problem(self, text, lasting=lasting)
            except (HastoreError, OSError) as error:
                closes_ms = None
                text = f"node {self.node}: {str(error) or type(error).__name__}"
                self._events.on_problem(self, text, lasting=False)
            else:
                closes_ms = None
                begun_ms = self._clock.monotonic_ms()
                self._serve(made)
                if self._clock.monotonic_ms() - begun_ms > self._times.retry_most_ms:
                    pause_ms = self._times.retry_ms
            self.stopping.wait(pause_ms / 1000)
            pause_ms = min(2 * pause_ms, self._times.retry_most_ms)

    def _serve(self, made: Call) -> None:
        if isinstance(made.answer, Refused) or not isinstance(made.answer, Forwarding):
            made.close()
            refused = isinstance(made.answer, Refused)
            reason = made.answer.reason if isinstance(made.answer, Refused) else str(made.answer)
            verb = "refuses" if refused else "answers something else"
            text = f"node {self.node} {verb}: {reason}"
            self._events.on_problem(self, text, lasting=reason == NOT_TAKEN)
            return
        with self._count:
            self._awaited = 0
        self._aged = made.answer.aged  # before there is a channel
        channel = ForwardChannel(
            made.sock, self.node, self._clock, self._times, name=f"{self.node}",
            on_close=self._closed, on_failure=self._on_failure,
        )  # fmt: skip
        self._channel = channel
        try:
            self._events.on_open(self, made.answer)
            if self.stopping.is_set():
                channel.close("the node stops")
            with telling_of_tampering(self._on_refused, f"node {self.node}"):
                channel.receive(_TO_FORWARDER, self._take, self._is_over)
        except (HastoreError, OSError) as error:
            channel.close(str(error) or type(error).__name__)
        finally:
            channel.release()

    def _take(self, frames: list[LinkFrame]) -> None:
        with self._count:
            self._awaited -= len(frames)
        self._events.on_outcomes(self, frames)

    def _closed(self, reason: str, unsent: list[int]) -> None:
        self._channel = None
        self._events.on_close(self, reason, unsent)

    def _is_over(self, now_ms: float) -> str | None:
        with self._count:  # a request must not be sent on a link that ends for want of them
            if self._awaited > 0 or now_ms - self._used_ms < self._times.idle_ms:
                return None
            self._channel = None
        self.stopping.set()
        return "not used any more"


# -- the called end --------------------------------------------------------------------------------


class ForwardedRequest:
    """A client's request that another node has forwarded. It gets one outcome, from any thread."""

    __slots__ = ("_done", "_link", "client", "id", "node")

    def __init__(self, link: "_Answering", number: int, client: ClientRequest) -> None:
        self._link = link
        self._done = False
        self.id = number
        self.client = client
        self.node = link.node

    def answer(self, frame: bytes) -> None:
        """Answer the client with a frame; empty if the request has no answer."""
        try:
            self._end(answer_frame(self.id, frame))
        except ProtocolError as failure:  # it is too long: what was done cannot be said
            self.leave_open(str(failure))

    def refuse(self, reason: str) -> None:
        """Say that nothing of it was done: the forwarder may send it elsewhere."""
        self._end(refused_frame(self.id, reason))

    def leave_open(self, reason: str, *, is_late: bool = False) -> None:
        """Say that what was done is not known: the forwarder answers nothing.

        `is_late`: the client does not wait any more.
        """
        self._end(unknown_frame(self.id, reason, is_late=is_late))

    def _end(self, frame: bytes) -> None:
        if not self._done:
            self._done = True
            self._link.end(self, frame)


OnForwarded = Callable[[list[ForwardedRequest]], None]


class _Pending:
    """The requests of one node that have no outcome yet, over all its links. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = 0
        self.size = 0

    def add(self, size: int) -> bool:
        """Count a request; False if there are too many."""
        with self._lock:
            if self.requests >= REQUESTS_MAX or self.size > BYTES_MAX:
                return False
            self.requests += 1
            self.size += size
            return True

    def remove(self, size: int) -> None:
        """Count no more a request that has its outcome."""
        with self._lock:
            self.requests -= 1
            self.size -= size


class _Answering:
    """One accepted link: requests go to the handler, outcomes back."""

    def __init__(
        self, handler: OnForwarded, pending: _Pending, channel: ForwardChannel, node: int
    ) -> None:
        self.node = node
        self._handler = handler
        self._pending = pending
        self._channel = channel

    def take(self, frames: list[LinkFrame]) -> None:
        """Hand requests on; the thread of the connection calls it."""
        requests = []
        try:
            for frame in frames:
                client = client_request(frame.kind, frame.payload)
                if self._pending.add(len(client.frame)):
                    requests.append(ForwardedRequest(self, frame.id, client))
                else:
                    text = f"too many requests of node {self.node} wait here"
                    self._channel.send(frame.id, refused_frame(frame.id, text))
        finally:  # those before a wrong one are counted: each must get its outcome
            if requests:
                self._handler(requests)

    def end(self, request: ForwardedRequest, frame: bytes) -> None:
        """Send an outcome; nobody waits for it if the link has ended."""
        self._pending.remove(len(request.client.frame))
        self._channel.send(request.id, frame)


class ForwardPort:
    """The called end of all these links of a node. `handler` is None while none is taken.

    The handler is called in the threads of the connections, and must not block. `refusal` is why
    there is none.
    """

    def __init__(self, clock: Clock, *, times: ForwardTimes = DEFAULT_TIMES) -> None:
        self.handler: OnForwarded | None = None
        self.refusal = STARTS
        self._clock = clock
        self._times = times
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}  # by node; there are as many as in the group
        self._channels: dict[int, ForwardChannel] = {}

    def decide(self, address: str, *, proved: bool) -> Answer:
        """Answer a node of the group that wants to forward; `proved`: by a secret or by TLS."""
        host = address.rpartition(":")[0].strip("[]")
        if not proved and not is_loopback(host):
            return Refused(
                "without ha.secret_file or security.ha: tls requests are taken from loopback only"
            )
        if self.handler is None:
            return Refused(self.refusal)
        return Forwarding(REQUESTS_MAX, BYTES_MAX, aged=True)

    def serve(self, sock: LinkSocket, node: int, name: str, on_failure: OnFailure) -> str:
        """Serve an accepted link to its end; return why it ended. A second link replaces it."""
        handler = self.handler
        if handler is None:  # the node stops since `decide`
            sock.close()
            return self.refusal
        channel = ForwardChannel(
            sock, node, self._clock, self._times, name=f"to-{name}",
            on_close=lambda _reason, _unsent: None, on_failure=on_failure,
        )  # fmt: skip
        with self._lock:
            pending = self._pending.setdefault(node, _Pending())
            earlier = self._channels.get(node)
            self._channels[node] = channel
        if earlier is not None:
            earlier.close("the same node has connected again")
        log.info("node %d forwards requests of its clients", node)
        try:
            channel.receive(_TO_MASTER, _Answering(handler, pending, channel, node).take)
        except (HastoreError, OSError) as error:
            channel.close(str(error) or type(error).__name__)
            if isinstance(error, ProtocolError):
                raise
        finally:
            with self._lock:
                if self._channels.get(node) is channel:
                    del self._channels[node]
            channel.release()
        return channel.reason or "closed"
