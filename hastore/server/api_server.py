"""The client API of a node: a ROUTER socket, and a thread that sleeps on it and turns a loop.

A turn of the loop: sleep on the socket's raw descriptor, the monitor's and an eventfd; answer the
puts that were confirmed meanwhile; drain up to 64 messages; append all their puts in one go; wake
parked pulls. The descriptor of a ZeroMQ socket is edge-triggered, so before every sleep the socket
itself is asked whether messages are left, after the last use of it.

Whoever uses the socket, or what hangs on it, holds `_turning`: the API's thread for all of a turn,
and while that one sleeps the thread that learns of a confirmation, to answer the put at once. The
API's thread need not be woken for it: a tenth of the time of a lone put.

ROUTER_MANDATORY is on: a reply to a connection that is gone, or that does not read its replies,
raises here instead of vanishing or blocking the others. ROUTER_HANDOVER stays off: nobody takes
over another's connection by claiming its routing id.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from collections.abc import Callable

import zmq

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config import ApiConfig
from hastore.errors import ConfigError, ProtocolError, StoreError, UsageError
from hastore.protocol import api
from hastore.server.api_backend import ApiBackend
from hastore.server.api_connections import Connection, Connections, descriptor_of, has_message
from hastore.server.api_positions import PositionTable
from hastore.server.api_pulls import PullDesk
from hastore.server.api_puts import PutDesk
from hastore.server.api_queries import answer_query
from hastore.server.api_replies import Replies
from hastore.service import Service

log = logging.getLogger(__name__)

DRAIN_FRAMES = 64
DRAIN_BYTES = 8 * 1024 * 1024
# libzmq 4.3.5 aborts the process when it has stopped a connection's input at a receive mark and the
# peer is gone: so there is no mark. What a connection holds is bounded by how fast the loop reads.
RECEIVE_HWM = 0
SEND_HWM = 2_048  # replies of one connection that wait
HANDSHAKE_MS = 5_000
_NOBLOCK = int(zmq.NOBLOCK)


class ApiServer(Service):
    """Serve the client API on one address until stopped."""

    def __init__(
        self,
        bind_address: str,
        backend: ApiBackend,
        config: ApiConfig,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_failure: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        super().__init__("ApiServer", on_failure)
        self._bind_address = bind_address
        self._backend = backend
        self._config = config
        self._clock = clock
        self._context = zmq.Context(1)
        self._router: zmq.Socket[bytes]  # from `start` on: a context with a socket must be ended
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wakeup)  # a late `done` may still write to it
        self._woken = False
        self._more = True  # a message may be left to read: look before sleeping
        self._serving = False
        self._router_descriptor = -1
        self._readable_moved = False
        self._replies = Replies()
        self._answer = self._replies.send
        self._puts = PutDesk(backend, config, clock, self._answer)
        self._turning = threading.Lock()  # whoever uses the socket has it
        self._failed: Exception | None = None  # when another thread answered
        self._pulls = PullDesk(backend, clock, self._answer)
        self._positions = PositionTable(backend, clock)
        self._fetches: list[tuple[Connection, api.Fetch]] = []
        self._reading_positions = False
        self._committed = 0  # the last commit confirmed here starts at this offset
        self.malformed = 0
        self.endpoint = bind_address

    def start(self) -> None:
        """Bind and serve; ConfigError when the address is taken. `endpoint` has the real port."""
        router = self._router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, api.MAX_FRAME_BYTES)
        router.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
        router.setsockopt(zmq.SNDHWM, SEND_HWM)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        router.setsockopt(zmq.BACKLOG, 1_024)
        # Half-open connections are found by TCP: a ZMTP heartbeat's timer meets the same abort.
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
        router.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)
        self._connections = Connections(router, self._config.max_connections, self._clock)
        self._replies.open(router, self._connections)
        try:
            router.bind(self._bind_address)
        except zmq.ZMQError as failure:
            self._release()
            raise ConfigError(
                f"cannot bind the client API to {self._bind_address}: {failure}; "
                "free the address or change the node's `api`"
            ) from failure
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._backend.transfer.after_done = self._puts_done
        self._backend.watch_readable(self.wake_readers, self._readers_wait)
        super().start()

    @property
    def pending_puts(self) -> int:
        """The records that wait for a confirmation."""
        return self._puts.pending_puts

    @property
    def pending_bytes(self) -> int:
        """Their bytes."""
        return self._puts.pending_bytes

    @property
    def connections(self) -> int:
        """The connections that have spoken."""
        return self._connections.spoken

    def _readers_wait(self) -> bool:
        return bool(self._fetches) or self._pulls.lately_parked(self._clock.monotonic_ms())

    def wake_readers(self) -> None:
        """Let parked pulls look again; any thread may call this after the readable offset moved."""
        if (self._pulls.parked or self._fetches) and not self._readable_moved:
            self._readable_moved = True
            self._wake()

    def wake(self) -> None:
        """Let the thread see `stopping`."""
        self._wake()

    def run(self) -> None:
        """Serve until stopped, then answer what is known by then."""
        epoll = select.epoll()
        try:
            self._router_descriptor = self._router.fileno()
            epoll.register(self._router_descriptor, select.EPOLLIN)
            epoll.register(self._connections.monitor_descriptor, select.EPOLLIN)
            epoll.register(self._wakeup, select.EPOLLIN)
            self._connections.take_events()  # libzmq signals only what comes after a look
            self._serving = True
            while not self.stopping.is_set():
                ready = self._sleep(epoll)
                with self._turning:
                    self._turn(ready)
            with self._turning:
                self._puts.finish()
        finally:
            epoll.close()
            with self._turning:
                self._serving = False
                self._release()

    def _release(self) -> None:
        self._connections.close()
        self._router.disable_monitor()
        self._router.close(linger=200)
        self._context.destroy(linger=200)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wakeup, 1)

    def _puts_done(self) -> None:
        """Answer what is done, in the thread that learnt of it: the API's own need not wake up.

        While that one has the socket it is left to it.
        """
        if not self._turning.acquire(blocking=False):
            self._wake()
            return
        try:
            if self._serving:
                self._puts.finish()
                self._look()
                if not self._more:
                    return
        except Exception as failure:  # the API's, not that of the thread that came by
            self._failed = failure
        finally:
            self._turning.release()
        self._wake()

    def _turn(self, ready: dict[int, int]) -> None:
        if self._failed is not None:
            raise self._failed
        now = self._clock.monotonic_ms()
        puts = self._puts
        if puts.has_done:
            puts.finish()
        if self._connections.monitor_descriptor in ready:
            self._connections.take_events()
        if self._more or self._router_descriptor in ready:
            self._replies.used = False
            self._drain(now)
            puts.append(now)
            if puts.has_done:
                puts.finish()
        if self._readable_moved:
            self._readable_moved = False
            self._pulls.advance()
        self._pulls.expire(now)
        if self._fetches:
            self._answer_fetches()
        if self._replies.used:  # sending too uses up the descriptor's edge
            self._look()
        if not self._more:
            self._connections.check(now)

    def _look(self) -> None:
        """Ask the socket whether a message is left, after the last use of it."""
        self._replies.used = False
        self._more = has_message(self._router)

    def _sleep(self, epoll: select.epoll) -> dict[int, int]:
        """Wait for something to do; returns the descriptors that have it."""
        if self._reading_positions or self._more or self._puts.has_done:
            timeout_s = 0.0
        else:
            now = self._clock.monotonic_ms()
            wait_ms = min(self._pulls.wait_ms(now), self._connections.wait_ms(now))
            timeout_s = wait_ms / 1000.0 if wait_ms < float("inf") else -1.0
        ready = dict(epoll.poll(timeout_s))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
            self._woken = False
        return ready

    # -- receiving

    def _drain(self, now: float) -> None:
        # Bounded by the answers to pulls too: puts wait behind them.
        full = self._replies.unsent_bytes + DRAIN_BYTES
        for _ in range(DRAIN_FRAMES):
            self._more = self._receive(now) and has_message(self._router)
            if not self._more:
                return
            if self._puts.gathered_bytes >= DRAIN_BYTES or self._replies.unsent_bytes >= full:
                return

    def _receive(self, now: float) -> bool:
        """Take the next message; False when there is none."""
        recv = self._router.recv
        try:
            routing_id = recv(_NOBLOCK)
        except zmq.Again:
            return False
        connection = self._connections.find(routing_id)
        frame = recv(_NOBLOCK, copy=False)  # a Frame knows whether more follow
        if connection is None:
            connection = self._connections.first_words(routing_id, descriptor_of(frame))
        header, payload = frame.bytes, b""
        frames = 1
        while frame.more:
            frame = recv(_NOBLOCK, copy=False)
            frames += 1
            payload = frame.bytes if frames == 2 else b""
        if connection is None:
            self.malformed += 1
            return True
        connection.messages += 1
        if connection.ended:
            return True
        try:
            if frames > 2:
                raise ProtocolError(f"a message of {frames} frames; at most 2")
            request = api.decode_request(header)
            if isinstance(request, api.Put):
                self._puts.take(connection, request, payload, now)
            else:
                self._dispatch(connection, request)
        except ProtocolError as failure:
            self.malformed += 1
            self._connections.end(connection, str(failure)[:200])
        return True

    def _dispatch(self, connection: Connection, request: api.Question) -> None:
        try:
            if isinstance(request, api.Pull):
                if self._replies.has_room(connection):
                    self._pulls.take(connection, request)
                else:
                    self._fail(connection, request.rid, "BUSY", "earlier replies are not read yet")
            elif isinstance(request, api.Commit):
                self._commit(connection, request)
            elif isinstance(request, api.Fetch):
                self._fetches.append((connection, request))
            else:
                self._answer(connection, *answer_query(self._backend, request))
        except (StoreError, UsageError) as failure:
            self._fail(connection, request.rid, type(failure).__name__, str(failure))

    def _commit(self, connection: Connection, request: api.Commit) -> None:
        if not self._positions.has_room(request.group, request.topic):
            self._fail(connection, request.rid, "BUSY", "too many consumer groups keep positions")
            return
        put = api.Put(request.rid, None, False, request.timeout_ms)
        record = self._positions.record_of(request)

        def respond(done: api.PutDone) -> None:
            if done.status is api.Status.PUT_OK and done.offsets:
                self._committed = max(self._committed, done.offsets[0])
            self._answer(connection, done)

        self._puts.take_own(connection, put, record, respond)

    def _answer_fetches(self) -> None:
        store = self._backend.store
        if store.dispatched_offset <= self._committed < store.max_offset:
            return  # wake_readers comes when the queues know of the last commit
        try:
            self._reading_positions = not self._positions.catch_up()
            if self._reading_positions:
                return  # the rest in the next turn
        except StoreError as failure:
            self._reading_positions = False
            for connection, request in self._fetches:
                self._fail(connection, request.rid, type(failure).__name__, str(failure))
            self._fetches = []
            return
        for connection, request in self._fetches:
            found = self._positions.find(request.group, request.topic)
            self._answer(connection, api.Positions(request.rid, found))
        self._fetches = []

    # -- answering

    def _fail(self, connection: Connection, rid: int, status: str, reason: str) -> None:
        master = self._backend.master_map().master_api
        self._answer(connection, api.Failed(rid, status, reason, master))
