"""The client API of a node: one thread, one epoll over a listening socket, its connections and an
eventfd.

    wait on the epoll --> answer puts confirmed meanwhile --> read from connections with input
      ^                                                          |
      |                                                          v
      +-- pulls that are due, for PULLS_MS <-- accept <-- append all puts of this iteration at once

A failure affects one request only (`Failures` in replies.py): its client gets the reason, or its
connection is ended if the outcome is unknown. A MemoryError, or a failure outside a request, for
example of the epoll, ends this thread, and with it the node.

Each iteration is bounded. It reads from each connection once, and stops reading after DRAIN_PUTS
puts, DRAIN_BYTES of puts, DRAIN_BYTES of replies, or ITERATION_MS. Connections that were not read
come first in the next iteration; otherwise the epoll might report the same connections first each
time. A connection with requests left over comes after these. Pulls come after everything else, in
turn for each connection, for PULLS_MS; of the bulk pulls, an iteration answers one. So a put waits
for one of them at most, however many readers pull millions of records. No pull waits for the disk
in this thread: see cold_reads.py.

`_io_lock` protects the connections. The API's thread holds it for all of an iteration. While that
thread sleeps, a thread that learns of a confirmation takes the lock and answers the put itself.
This saves about 10 % of a single put's latency, because the API's thread need not wake.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import NamedTuple, Protocol, TypeGuard

import msgspec

from hastore.addresses import address_text, parse_address
from hastore.bounded_log import BoundedLines
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import ApiConfig
from hastore.counters import ApiCounts
from hastore.errors import (
    AuthenticationError,
    ConfigError,
    MessageIllegalError,
    NotCachedError,
    ProtocolError,
    StoreError,
    UsageError,
)
from hastore.heap import BurstMemory
from hastore.listeners import listen
from hastore.protocol import api
from hastore.protocol.committed_positions import Place
from hastore.protocol.remoting import Frame
from hastore.protocol.zmtp import Message
from hastore.security.identities import CHECK_MS
from hastore.security.tls_contexts import TlsContexts
from hastore.server.api.access import (
    FORBIDDEN,
    POSITIONS_MOVED,
    REFUSED_MAX,
    UNAUTHENTICATED,
    Access,
)
from hastore.server.api.administering import AdminService, CarryOut
from hastore.server.api.backend import ApiBackend
from hastore.server.api.cold_reads import TOO_MANY, ColdReads
from hastore.server.api.commits import CommitHandler, CommitsRead, PositionTable
from hastore.server.api.connections import (
    BACKLOG,
    RECEIVE_BYTES_MIN,
    Connection,
    Connections,
)
from hastore.server.api.handshakes import Handshakes
from hastore.server.api.newcomers import SLICE_MS
from hastore.server.api.parked import Asked, Parked
from hastore.server.api.position_reader import STOP_S, PositionReader, ReadCache
from hastore.server.api.pulls import KEPT_BYTES, UNREAD, PullHandler
from hastore.server.api.puts import TOLD_MS, PutHandler
from hastore.server.api.queries import (
    OwnQuery,
    QueryService,
    Sees,
    answer_at_once,
    everything,
)
from hastore.server.api.quotas import Quotas
from hastore.server.api.ranges import Done, RangeService
from hastore.server.api.replies import Failures, Replies, master_of
from hastore.server.api.topics import TopicChanges, described
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)

DRAIN_BYTES = 8 * 1024 * 1024
DRAIN_PUTS = 4_096
ITERATION_MS = 10.0  # for reading input
PULLS_MS = 1.0  # for answering pulls, then puts are looked for again
LENT_MS = 0.5  # for answering pulls in a thread that has other things to do
MAX_BULK = 1_000  # bulk pulls that wait for their turn; further ones are answered at once
MAX_FETCHES = 1_000  # fetches and commits that wait until the positions are read
LOOK_MS = 50.0  # while some wait: replay may have moved on unnoticed, or a take-over may be done
LINGER_S = 0.2  # for unsent replies when the server stops
_NO_IDENTITIES = (
    "this node has no identities, so it cannot prove that it knows yours: set the node's "
    "`security.identities`, or give the client no identity for it"
)
_NOBODY_MAY = (
    "this node does not ask its clients who they are, so nobody may change it from elsewhere: set "
    "security.identities in its file and start it again, or give the command on its machine"
)
_READS = (  # what a node that was removed from its group refuses
    *(api.Pull, api.Fetch, api.Commit, api.AskTopics, api.AskConfigs),
    *(api.FindKey, api.FindOffset, api.FindTime),
    *(api.Join, api.Lock, api.Unlock, api.SendBack),
)
# RocketMQ's brokers listen at this distance below their port, too, and its slaves ask there for the
# topics: they call it fast, or VIP.
FAST_PORT_BELOW = 2
_SCHEME = "tcp://"
_A_LINE = 10  # queues are named in a line of the audit log
_EVENTS_MAX = 256
_READ = ~select.EPOLLOUT
_BROKEN = select.EPOLLERR | select.EPOLLHUP


class ApiParts(NamedTuple):
    """The parts of the API that requests of RocketMQ's protocol use, too."""

    backend: ApiBackend
    clock: Clock
    puts: PutHandler
    pulls: PullHandler
    commits: CommitHandler
    positions: PositionTable
    cold: ColdReads
    queries: QueryService
    replies: Replies
    failures: Failures
    wake: Callable[[], None]  # of the API's thread; any thread may call it
    end: Callable[[Connection, str], None]  # a connection, for a reason
    lend: Callable[[Callable[[], None]], bool] = lambda _call: False  # see `ApiServer.lend`
    access: Access | None = None  # with identities
    welcome: Callable[[Connection], None] = lambda _connection: None  # see `Connections.welcome`


class FrameDoor(Protocol):
    """Serves RocketMQ's protocol: server/remoting/door.py. The API's lock is held in every call."""

    @property
    def has_due(self) -> bool:
        """Whether `run_due` has something to do now."""
        ...

    def wait_ms(self, now_ms: float) -> float:
        """Return the time until `run_due` has something to do; infinity: nothing waits."""
        ...

    def receive(self, connection: Connection, frame: Frame, now_ms: float) -> None:
        """Take a frame of a client."""
        ...

    def take_own(self, connection: Connection, request: api.Transactional) -> None:
        """Take a request about transactions, of this API's own protocol."""
        ...

    def problems(self) -> list[str]:
        """Return what an operator should know; any thread may ask."""
        ...

    def run_due(self, now_ms: float) -> None:
        """Do what is due now, for a bounded time."""
        ...

    def forget_ended(self, ended: list[Connection]) -> None:
        """Forget connections that have ended."""
        ...

    def receive_member(
        self,
        connection: Connection,
        request: api.Sharing | api.Commit,
        now_ms: float,
        commit: Callable[[api.Commit], None],
    ) -> None:
        """Take a request of a member that shares queues.

        `commit` takes a commit once it can be decided whether the member may make it.
        """
        ...

    def end(self) -> None:
        """Answer what waits: the server stops."""
        ...


class ApiServer(Service):
    """Serve the client API on one address until stopped."""

    _listener: socket.socket  # from `start` on
    _fast: socket.socket | None = None

    def __init__(
        self,
        bind_address: str,
        backend: ApiBackend,
        config: ApiConfig,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_failure: OnFailure,
        always_all: bool = False,
        tls: TlsContexts | None = None,
        on_tls_failure: Callable[[str, str], None] = lambda _address, _why: None,
        access: Access | None = None,
        carry_out: CarryOut | None = None,
        make_door: Callable[[ApiParts], FrameDoor] | None = None,
        fast_port: bool = False,
        slow_ms: float | None = None,
        position_file: ReadCache | None = None,
    ) -> None:
        """Prepare; with `always_all` no put is acknowledged by this node alone (mode dledger).

        With `tls` clients must speak TLS: `on_tls_failure(address, why)` is called for each that
        it refuses. With `access` they must prove who they are; `carry_out` does what admins ask
        for, in a thread of its own. RocketMQ's frames go to the door that `make_door` makes; else
        their connections are ended. `fast_port`: FAST_PORT_BELOW.
        Puts and pulls slower than `slow_ms` are logged. `position_file` keeps what is read of the
        committed positions.
        """
        super().__init__("ApiServer", on_failure=on_failure)
        self._bind_address, self._backend = bind_address, backend
        self._config, self._clock, self._fast_port = config, clock, fast_port
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wakeup).atexit = False  # confirmations may come late
        self._woken = self._serving = self._readable_moved = False
        self.counts, self.endpoint, self._malformed = ApiCounts(), bind_address, 0
        self._told = BoundedLines(log, level=logging.INFO, clock=clock, burst=3, every_ms=TOLD_MS)
        self._failures = failures = Failures(clock)
        self._replies = Replies(self._cannot_encode)
        self._answer = self._replies.send
        self._puts = PutHandler(
            backend, config, clock, self._answer, self._end, failures, always_all=always_all,
            on_forbidden=None if access is None else partial(access.forbidden, "Put"),
            counts=self.counts, slow_ms=slow_ms,
        )  # fmt: skip
        self._tls, self._on_tls_failure, self._access = tls, on_tls_failure, access
        self._io_lock = threading.Lock()  # held while the connections are used
        self._failed: Exception | None = None  # a failure while another thread answered puts
        self._cold = ColdReads(self.wake, on_failure)
        self._pulls = PullHandler(
            backend, clock, self._answer, self._replies.has_room, failures, self._cold,
            self.counts, slow_ms,
        )  # fmt: skip
        self._positions = PositionTable(backend, clock)
        self._commits = CommitHandler(
            backend, self._positions, self._puts, self._answer, self._fail, self.wake, clock,
            self._note_moved,
        )  # fmt: skip
        self._topics = TopicChanges(backend, self._puts, clock)
        self._fetches: list[tuple[Connection, api.Fetch | api.Commit, float]] = []  # arrival in ms
        # `_positions_asked`: `positions` was asked, and the table has not caught up.
        self._reading_positions = self._positions_asked = False
        self._reader = self._make_reader(on_failure, position_file)
        self._ranges = RangeService(backend, clock, self.wake, on_failure=on_failure)
        self._queries = QueryService(backend, clock, self.wake, on_failure=on_failure)
        self._admin = self._make_admin(carry_out, on_failure)
        self._handshakes: Handshakes[Connection] = Handshakes(self.wake, on_failure=on_failure)
        self._door: FrameDoor | None = None if make_door is None else make_door(self._parts())
        self._left: list[tuple[int, int]] = []  # events that did not fit into the last iteration
        self._bulk: deque[tuple[Connection, Asked]] = deque()  # bulk pulls to answer
        self._served = False  # newcomers: their first requests may wait for the next iteration
        self._bursts = BurstMemory(2 * KEPT_BYTES)  # the heap keeps so much anyway

    def _make_admin(self, carry_out: CarryOut | None, fail: OnFailure) -> AdminService | None:
        if self._access is None or carry_out is None:
            return None
        return AdminService(
            self._backend, self._access, carry_out, self._clock, self.wake, on_failure=fail
        )

    def _make_reader(self, fail: OnFailure, file: ReadCache | None) -> PositionReader:
        return PositionReader(
            self._positions, self._io_lock, self._backend, self._clock,
            is_wanted=self._positions_wanted, on_read=self._positions_read, on_failure=fail,
            file=file,
        )  # fmt: skip

    def _parts(self) -> ApiParts:
        return ApiParts(
            self._backend, self._clock, self._puts, self._pulls, self._commits, self._positions,
            self._cold, self._queries, self._replies, self._failures, self.wake, self._end,
            self.lend, self._access, lambda whom: self._connections.welcome(whom),
        )  # fmt: skip

    def start(self) -> None:
        """Bind and serve; `endpoint` then has the real port. Raises ConfigError if that fails."""
        try:
            self._listener = _listen(self._bind_address)
        except OSError as failure:
            why = failure.strerror or failure
            raise ConfigError(
                f"cannot bind the client API to {self._bind_address}: {why}; "
                "free the address or change the node's `api`"
            ) from failure
        if self._fast_port:
            self._fast = _listen_below(_endpoint(self._listener))
        self._connections = Connections(
            self._listener, self._config, self._clock,
            tls=self._tls, handshakes=self._handshakes, on_tls_failure=self._on_tls_failure,
            asks_who=self._access is not None, fast=self._fast,
        )  # fmt: skip
        self._connections.epoll.register(self._wakeup, select.EPOLLIN)
        self._replies.open(self._connections)
        self.endpoint = _endpoint(self._listener)
        self._backend.attach_api(self)
        if self._access is not None:
            self._tell_what_is_kept(self._access.quotas)
        self._serving = True
        self._ranges.start()
        self._queries.start()
        self._cold.start()
        self._reader.start()
        if self._admin is not None:
            self._admin.start()
        if self._tls is not None:
            self._handshakes.start()
        super().start()

    def _tell_what_is_kept(self, quotas: Quotas) -> None:
        table, positions = self._backend.store.topic_table, self._positions
        quotas.has_topic = lambda topic: table.find(topic) is not None
        quotas.topics = lambda: [config.name for config in table.all()]
        quotas.has_pair = lambda group, topic: bool(positions.find(group, topic))
        quotas.pairs = positions.pairs

    @property
    def pending_puts(self) -> int:
        """The number of records that wait for a confirmation."""
        return self._puts.pending_puts

    @property
    def pending_bytes(self) -> int:
        """The bytes of the records that wait for a confirmation."""
        return self._puts.pending_bytes

    @property
    def connections(self) -> int:
        """The number of connections that have sent a message."""
        return self._connections.spoken

    @property
    def parked_pulls(self) -> int:
        """The number of pulls that wait for messages."""
        return self._pulls.parked

    def counted(self) -> dict[str, int]:
        """Return the counts of connections, logins and failures; before `start` most are 0.

        Any thread may ask: of connections `open` now, and since the start `accepted`, `refused`,
        `evicted`, `malformed`; `tls_handshakes`, `logins`, `refused_logins`, `failures`.
        """
        found = {"malformed": self._malformed, "failures": self._failures.count}
        if self._access is not None:
            found |= {
                "logins": self._access.logins, "refused_logins": self._access.refused_logins
            }  # fmt: skip
        if self._serving:
            of_all = self._connections
            found |= {
                "open": of_all.count,
                "accepted": of_all.accepted,
                "refused": of_all.refused,
                "evicted": of_all.evicted,
                "malformed": self.malformed,
                "tls_handshakes": of_all.tls_handshakes,
            }
        return found

    def positions(self) -> dict[tuple[str, str], Mapping[int, Place]]:
        """Return the committed positions by group and topic, and let the API's thread read on.

        Any thread may ask, and waits for nothing: a commit that was not read yet is there the next
        time. Positions that only retention has kept are not among them.
        """
        if not self._positions_asked and self._serving:
            self._positions_asked = True
            self.wake()
        return self._positions.snapshot()

    @property
    def malformed(self) -> int:
        """How many connections were ended because their input was malformed."""
        return self._malformed + self._connections.malformed

    def problems(self) -> list[str]:
        """Return what an operator should know of the API; any thread may ask."""
        door = self._door
        return [*self._reader.problems(), *([] if door is None else door.problems())]

    def readers_wait(self) -> bool:
        """Whether a reader waits for new records; see ApiWaker."""
        if self._fetches or self._commits.has_calls:
            return True
        return self._pulls.lately_parked(self._clock.monotonic_ms())

    def wake_readers(self) -> None:
        """Let parked pulls look again after the readable offset moved; any thread may call this."""
        waiting = self._fetches or self._commits.has_calls
        if not self._readable_moved and (waiting or self._pulls.has_news()):
            self._readable_moved = True
            self.wake()

    def answer_readers(self) -> None:
        """Answer the parked pulls that have news in the calling thread, for LENT_MS.

        If another thread holds the lock, or more is to do, the API's thread is woken to do it.
        """
        if self._readable_moved:
            return
        waiting = self._fetches or self._commits.has_calls
        if not waiting and not self._pulls.has_news():
            return
        if waiting or not self._io_lock.acquire(blocking=False):
            self._readable_moved = True
            self.wake()
            return
        left = True
        try:
            if self._serving:
                self._pulls.try_parked()
                self._answer_pulls(LENT_MS)
                left = self._pulls.has_due
        except Exception as failure:  # the API's failure, not the calling thread's
            self._failed = failure
        finally:
            self._io_lock.release()
        if left:
            self.wake()

    def run(self) -> None:
        """Serve until stopped, then answer the puts whose outcome is known by then."""
        try:
            while not self.stopping.is_set():
                events = self._sleep()
                with self._io_lock:
                    self._run_once(events)
            with self._io_lock:
                self._puts.answer_ended()
                if self._door is not None:
                    self._door.end()
                self._replies.flush()
        finally:
            with self._io_lock:
                self._serving = False
                self._release()
            self._reader.stop(STOP_S)
            self._ranges.stop()
            self._queries.stop()
            self._cold.stop()
            if self._admin is not None:
                self._admin.stop()
            self._handshakes.stop()

    def _release(self) -> None:
        self._listener.close()
        if self._fast is not None:
            self._fast.close()
        deadline_ms = self._clock.monotonic_ms() + LINGER_S * 1000.0
        for connection in self._connections.all():
            poller = select.poll()
            poller.register(connection.descriptor, select.POLLOUT)
            while connection.waits_for_room:
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if left_ms <= 0.0 or not poller.poll(left_ms):
                    break
                self._replies.flush_one(connection)
        self._connections.close()

    def wake(self) -> None:
        """Wake the thread: it sees `stopping`, and what there is to answer."""
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wakeup, 1)

    def puts_done(self) -> None:
        """Answer completed puts in the calling thread, which has just learnt of their confirmation.

        If another thread holds the lock, the API's thread is woken to do it.
        """
        if not self._io_lock.acquire(blocking=False):
            self.wake()
            return
        try:
            if self._serving:
                self._puts.answer_ended()
                self._replies.flush()
                return
        except Exception as failure:  # the API's failure, not the calling thread's
            self._failed = failure
        finally:
            self._io_lock.release()
        self.wake()

    def lend(self, call: Callable[[], None]) -> bool:
        """Make a call of the door in the calling thread, unless another one has the API's lock.

        What it appends and answers is appended and sent, too, so that the API's thread need not
        wake for it. Returns False if the call was not made.
        """
        door = self._door
        if door is None or not self._io_lock.acquire(blocking=False):
            return False
        try:
            if not self._serving or door.has_due:  # what came before goes first
                return False
            call()
            self._puts.append_admitted(self._clock.monotonic_ms())
            if self._puts.has_done:
                self._puts.answer_ended()
            self._replies.flush()
            return True
        except Exception as failure:  # the API's failure, not the calling thread's
            self._failed = failure
        finally:
            self._io_lock.release()
        self.wake()
        return True

    def _sleep(self) -> list[tuple[int, int]]:
        """Wait for events; return (descriptor, event mask) pairs."""
        connections = self._connections
        if self._left:
            left, self._left = self._left, []
            known = {descriptor for descriptor, _ in left}
            return left + [new for new in connections.epoll.poll(0, _EVENTS_MAX)
                           if new[0] not in known]  # fmt: skip
        done = self._puts.has_done or self._ranges.has_done or self._queries.has_done
        readers = self._cold.has_done or self._pulls.has_due or self._bulk
        newcomers = self._served or self._handshakes.has_done
        door = self._door
        if door is not None and door.has_due:
            done = True
        if self._admin is not None and self._admin.has_done:
            done = True
        if done or readers or newcomers or self._reading_positions:
            timeout_s = 0.0
        else:
            now = self._clock.monotonic_ms()
            wait_ms = min(self._pulls.wait_ms(now), connections.wait_ms(now))
            full = not self._handshakes.has_room
            wait_ms = min(wait_ms, connections.newcomers.wait_ms(now, only_knocking=full))
            wait_ms = min(wait_ms, self._bursts.wait_ms(now))
            if self._fetches or self._commits.has_calls:
                wait_ms = min(wait_ms, LOOK_MS)
            if self._access is not None:
                wait_ms = min(wait_ms, CHECK_MS)
            if door is not None:
                wait_ms = min(wait_ms, door.wait_ms(now))
            timeout_s = wait_ms / 1000.0 if wait_ms < float("inf") else -1.0
        return connections.epoll.poll(timeout_s, _EVENTS_MAX)

    def _run_once(self, events: list[tuple[int, int]]) -> None:
        if self._failed is not None:
            raise self._failed
        now = self._clock.monotonic_ms()
        puts, connections = self._puts, self._connections
        if self._access is not None and self._access.has_changed:
            self._access.changed(connections.all(), connections.end)
        if puts.has_done:
            puts.answer_ended()
        if self._ranges.has_done:
            self._answer_read(self._ranges.pop_done())
        if self._queries.has_done:
            self._answer_read(self._queries.pop_done())
        if self._admin is not None and self._admin.has_done:
            self._answer_read(self._admin.pop_done())
        for step in self._handshakes.pop_done():
            connections.shake_on(step)
        # Gathered puts wait until the iteration ends, so replies to pulls bound it too.
        full = connections.unsent_bytes + DRAIN_BYTES
        for place, (descriptor, mask) in enumerate(events, 1):
            connection = connections.find(descriptor)
            if connection is None:
                if descriptor == self._wakeup:
                    os.eventfd_read(self._wakeup)
                    self._woken = False
                elif descriptor in connections.listener_descriptors:
                    connections.newcomers.knocking = True
            elif not connection.spoken:
                connections.newcomers.add(connection, mask)
            else:
                self._take(connection, now, mask)
                if (
                    puts.gathered_bytes >= DRAIN_BYTES
                    or puts.gathered >= DRAIN_PUTS
                    or connections.unsent_bytes >= full
                    or self._clock.monotonic_ms() > now + ITERATION_MS
                ):
                    self._left = events[place:]
                    if connection.inbox:
                        self._left.append((descriptor, select.EPOLLIN))
                    break
        if self._fetches or self._commits.has_calls or self._positions_asked:
            self._answer_fetches()
        if self._door is not None:
            self._run_door(self._door, now)
        puts.append_admitted(now)
        if puts.has_done:
            puts.answer_ended()
        self._replies.flush()
        self._serve_newcomers()
        self._answer_readers(now)
        connections.end_late(now)
        self._bursts.look(connections.unsent_bytes + connections.held_bytes, now)

    def _run_door(self, door: FrameDoor, now: float) -> None:
        """Let the door do what is due, before the puts of this iteration are appended."""
        connections = self._connections
        if connections.left_remoting:
            left, connections.left_remoting = connections.left_remoting, []
            door.forget_ended(left)
        door.run_due(now)

    def _answer_readers(self, now: float) -> None:
        """Answer pulls for PULLS_MS, or one of them: puts and newcomers have gone before."""
        connections, pulls = self._connections, self._pulls
        if connections.left_parked:
            left, connections.left_parked = connections.left_parked, []
            pulls.forget_ended(left)
        if self._cold.has_done:
            self._cold.finish(self._cannot_finish)
        if self._readable_moved:
            self._readable_moved = False
            pulls.try_parked()
        pulls.end_expired(now)
        self._answer_pulls(PULLS_MS)
        if self._bulk:
            begun_ms, (connection, asked) = self._clock.monotonic_ms(), self._bulk.popleft()
            self._answer_pull(connection, asked)
            took_ms = self._clock.monotonic_ms() - begun_ms
            self.counts.pull_times.observe(took_ms)
            self._pulls.note_time(connection, asked, took_ms)
            self._replies.flush()

    def _answer_pulls(self, limit_ms: float) -> None:
        """Answer the pulls that are due for so long, or one of them."""
        pulls, times = self._pulls, self.counts.pull_times
        now_ms = self._clock.monotonic_ms()
        until_ms = now_ms + limit_ms
        while pulls.has_due and now_ms < until_ms:
            begun_ms, (connection, due) = now_ms, pulls.next_due()
            self._answer_pull(connection, due)
            now_ms = self._clock.monotonic_ms()
            times.observe(now_ms - begun_ms)
            pulls.note_time(connection, due, now_ms - begun_ms)
        self._replies.flush()

    def _serve_newcomers(self) -> None:
        """Accept and read connections without a request for a slice; see newcomers.py."""
        connections, newcomers = self._connections, self._connections.newcomers
        begun = now = self._clock.monotonic_ms()
        self._served = False
        if not newcomers.may_begin(now):
            return
        if newcomers.knocking:
            self._served = True
            connections.accept(now)
            now = self._clock.monotonic_ms()
        until_ms = now + SLICE_MS
        while self._handshakes.has_room and (turn := newcomers.pop()) is not None:
            self._served = True
            connection, mask = turn
            self._take(connection, now, mask)
            connections.end_turn(connection)
            if connection.inbox:
                self._left.append((connection.descriptor, select.EPOLLIN))
            now = self._clock.monotonic_ms()
            if now >= until_ms:
                break
        self._replies.flush()
        newcomers.spend(self._clock.monotonic_ms() - begun)

    # -- receiving

    def _take(self, connection: Connection, now: float, mask: int) -> None:
        """Do what the epoll has reported of a connection."""
        if mask & select.EPOLLOUT:
            self._replies.flush_one(connection)
        if (mask & _READ or connection.shaken is not None) and not connection.ended:
            try:
                self._receive(connection, now, mask)
            except Exception as failure:  # it is unknown which requests were answered
                _, reason = self._failures.note("a request", failure)
                self._end(connection, reason)

    def _receive(self, connection: Connection, now: float, mask: int) -> None:
        if connection.inbox:
            messages, connection.inbox = connection.inbox, []
        else:
            broken, was_open = bool(mask & _BROKEN), connection.wire.is_open
            step = connection.shaken
            if step is not None:
                messages = self._connections.finish_step(connection, step, now)
            else:
                messages = self._connections.receive(connection, now, broken=broken)
            if connection.decided and connection.wire.has_output:
                self._replies.send_raw(connection)
            if connection.tls is not None:
                self._replies.shake(connection)
            asks = self._access is not None and not connection.remoting
            if asks and connection.wire.is_open and not was_open:
                assert self._access is not None
                if self._access.meet(connection):
                    self._connections.welcome(connection)
        for done, message in enumerate(messages, 1):
            if connection.ended:
                return
            try:
                if connection.remoting:
                    self._handle_frame(connection, message, now)
                else:
                    self._handle_request(connection, message, now)
            except ProtocolError as failure:
                self._malformed += 1
                self._connections.end(connection, str(failure)[:200])
            if done < len(messages) and self._clock.monotonic_ms() > now + ITERATION_MS:
                connection.inbox = messages[done:]
                connection.receive_bytes = RECEIVE_BYTES_MIN
                return

    def _handle_frame(self, connection: Connection, frame: Frame, now: float) -> None:
        if self._door is None:
            raise ProtocolError("RocketMQ's protocol is not served here")
        if not frame.is_one_way and not frame.is_answer:
            connection.unanswered += 1  # until `Replies.send_frame`
        self._door.receive(connection, frame, now)

    def _handle_request(self, connection: Connection, message: Message, now: float) -> None:
        request = api.decode_request(message[0])
        if not isinstance(request, api.Put) or request.acks != 0:
            connection.unanswered += 1  # until `Replies.send`
        if self._access is not None and not self._is_allowed(self._access, connection, request):
            return
        if connection.meter is not None and self._is_over_quota(connection, request, message, now):
            return
        if isinstance(request, api.Put):
            payload = message[1] if len(message) > 1 else b""
            self._puts.admit_put(connection, request, payload, now)
        else:
            self._dispatch(connection, request)

    def _is_allowed(self, access: Access, connection: Connection, request: api.Request) -> bool:
        """Whether a client may send this request; if not, answer it."""
        if not access.asks(connection, request):
            if isinstance(request, api.Put):
                return True  # each of its records is checked when it is stored
            why = access.refusal(connection, request)
            if why is not None:
                self.counts.refusals.add(FORBIDDEN)
                self._answer(connection, api.Failed(request.rid, FORBIDDEN, why))
            return why is None
        claimed = None if connection.exchange is None else connection.exchange.claimed
        over = None
        try:
            self._answer(connection, access.answer(connection, request))
            if connection.refused >= REFUSED_MAX and connection.proof is None:
                over = f"{REFUSED_MAX} requests without an identity"
        except AuthenticationError as failure:
            over = str(failure)
            self.counts.refusals.add(UNAUTHENTICATED)
            access.refused(connection, claimed, over)
            self._answer(connection, api.Failed(request.rid, UNAUTHENTICATED, over))
        if over is not None:
            self._replies.flush_one(connection)
            self._end(connection, over)
        elif connection.stranger and connection.proof is not None:
            self._connections.welcome(connection)
        return False

    def _is_over_quota(
        self, connection: Connection, request: api.Request, message: Message, now: float
    ) -> bool:
        """Whether a request is too much for its identity's quota; if so, it is answered BUSY."""
        assert self._access is not None
        why = self._access.over_quota(connection, request, sum(map(len, message)), now)
        if why is None:
            return False
        if isinstance(request, api.Put):
            self._puts.refuse_for_now(connection, request, why)
        else:
            self._fail(connection, request.rid, "BUSY", why)
        return True

    def _dispatch(self, connection: Connection, request: api.Question | api.Proving) -> None:
        outdated = self._backend.outdated()
        if outdated is not None and isinstance(request, _READS):
            self._fail(connection, request.rid, "SERVICE_NOT_AVAILABLE", outdated)
        elif isinstance(request, api.Pull):
            if not self._backend.store.topic_table.may_read(request.topic):
                text = f"topic {request.topic} is not read now: its permission has no 4"
                self._fail(connection, request.rid, FORBIDDEN, text)
            elif request.filter is not None:
                self._pull_filtered(connection, request)
            elif request.bulk and len(self._bulk) < MAX_BULK:
                self._bulk.append((connection, request))
            else:
                self._pulls.offer(connection, request)
        elif isinstance(request, api.Sharing):
            if self._replies.has_room(connection):
                self._take_member(connection, request)
            else:
                self._fail(connection, request.rid, "BUSY", UNREAD)
        elif isinstance(request, api.Fetch | api.Commit):
            if isinstance(request, api.Commit) and request.member is not None:
                self._take_member(connection, request)
            else:
                self._accept_fetch(connection, request)
        elif not self._replies.has_room(connection):
            self._fail(connection, request.rid, "BUSY", UNREAD)
        elif isinstance(request, api.RangeQuestion):
            self._accept_range(connection, request)
        elif isinstance(request, api.TopicChange):
            self._change_topic(connection, request)
        elif isinstance(request, api.Transactional):
            self._take_transaction(connection, request)
        elif isinstance(request, api.Administer):
            self._administer(connection, request)
        elif isinstance(request, api.Query) or _is_listing(request):
            sees: Sees = everything
            if self._access is not None and _is_listing(request):
                sees = self._access.sees(connection, request)
            busy = self._queries.accept_query(connection, request, sees)
            if busy is not None:
                self._fail(connection, request.rid, "BUSY", busy)
        elif isinstance(request, api.Proving):
            self._answer(connection, api.Failed(request.rid, UNAUTHENTICATED, _NO_IDENTITIES))
        else:
            try:
                reply = answer_at_once(self._backend, request)
            except Exception as failure:
                self._give_up(connection, request, failure)
                return
            self._answer(connection, reply)

    def _accept_fetch(self, connection: Connection, request: api.Fetch | api.Commit) -> None:
        if len(self._fetches) < MAX_FETCHES:
            self._fetches.append((connection, request, self._clock.monotonic_ms()))
        else:
            self._fail(connection, request.rid, "BUSY", "too many commits and fetches wait")

    def _take_member(self, connection: Connection, request: api.Sharing | api.Commit) -> None:
        if self._door is None:
            self._fail(connection, request.rid, "UsageError", "no queues are shared at this node")
            return
        now = self._clock.monotonic_ms()
        commit = partial(self._accept_fetch, connection)
        self._door.receive_member(connection, request, now, commit)

    def _take_transaction(self, connection: Connection, request: api.Transactional) -> None:
        if self._door is None:
            self._fail(connection, request.rid, "UsageError", "transactions are not served here")
            return
        try:
            self._door.take_own(connection, request)
        except Exception as failure:  # it is unknown whether it was answered
            self._end(connection, self._failures.note("a transaction", failure)[1])

    def _administer(self, connection: Connection, request: api.Administer) -> None:
        if self._admin is None:
            self._fail(connection, request.rid, FORBIDDEN, _NOBODY_MAY)
            return
        busy = self._admin.accept_change(connection, request)
        if busy is not None:
            self._fail(connection, request.rid, "BUSY", busy)

    def _answer_fetches(self) -> None:
        """Answer waiting fetches and take waiting commits, once the positions are read."""
        store = self._backend.store
        self._reading_positions = False  # what they wait for may take long: not at once again
        if self._positions.lent or self._backend.positions_wait():
            return
        try:
            if store.dispatched_offset <= self._commits.last_offset < store.max_offset:
                return  # wake_readers is called when replay has dispatched the last commit
            # After a start or a cut there may be millions: another thread reads them.
            if self._positions.warm:
                self._reading_positions = not self._positions.catch_up()
            if not self._positions.warm:
                self._reading_positions = False
                self._reader.wake()
                return
            if self._reading_positions:
                return  # the next iteration reads on
        except NotCachedError:
            self._read_cold_positions()
            return
        except Exception as failure:
            self._give_up_fetches(failure)
            return
        self._positions_asked = False
        self._commits.make_calls()
        waiting, self._fetches = self._fetches, []
        for connection, request, came_ms in waiting:
            if connection.ended:
                continue  # its client may have sent later commits on a new connection
            try:
                if isinstance(request, api.Fetch):
                    found = self._positions.find(request.group, request.topic)
                    self._answer(connection, api.Positions(request.rid, found))
                elif not self._commits.begin_commit(connection, request, came_ms):
                    self._fetches.append((connection, request, came_ms))
            except Exception as failure:
                self._give_up(connection, request, failure)

    def _give_up_fetches(self, failure: Exception) -> None:
        self._reading_positions = self._positions_asked = False
        self._commits.make_calls(failure)
        fetches, self._fetches = self._fetches, []
        for connection, request, _ in fetches:
            self._give_up(connection, request, failure)

    def _positions_wanted(self) -> bool:
        return bool(self._fetches or self._commits.has_calls)

    def _positions_read(self, failure: Exception | None) -> None:
        """Go on with what waits for the positions: PositionReader has read them, or has failed."""
        if failure is not None:
            self._give_up_fetches(failure)
        if failure is not None or self._positions_wanted() or self._positions_asked:
            self.wake()

    def _read_cold_positions(self) -> None:
        """Let another thread read on in the topic of the positions, from the disk."""
        read = self._positions.next_read()

        def then(result: CommitsRead | None | Exception) -> None:
            self._positions.lent = False
            if isinstance(result, Exception):
                self._give_up_fetches(result)
            elif read is not None:
                self._positions.take(read, result)
                self._reading_positions = True  # the next iteration reads on

        self._reading_positions = False
        if read is not None:
            self._positions.lent = self._cold.accept(None, read.run, then)
        if not self._positions.lent:
            self._give_up_fetches(StoreError(TOO_MANY))

    def _change_topic(self, connection: Connection, request: api.TopicChange) -> None:
        note = self._noting(connection, *described(request, self._backend.store.find_topic))

        def respond(done: api.PutDone) -> None:
            note(done)
            master = None
            if done.status is api.Status.SERVICE_NOT_AVAILABLE:
                master = master_of(self._backend, self._failures)
            self._answer(connection, msgspec.structs.replace(done, master=master))

        try:
            self._topics.take(request, respond)
        except MessageIllegalError as failure:
            respond(api.PutDone(request.rid, api.Status.MESSAGE_ILLEGAL, 0, reason=str(failure)))

    def _note_moved(
        self, connection: Connection, request: api.Commit, done: api.PutDone
    ) -> None:
        places = sorted((queue, at.queue_offset) for queue, at in request.positions.items())
        moved = ", ".join(f"queue {queue} to {offset}" for queue, offset in places[:_A_LINE])
        what = f"group {request.group}, topic {request.topic}: {moved}"
        self._noting(connection, POSITIONS_MOVED, what)(done)

    def _noting(
        self, connection: Connection, action: str, what: str
    ) -> Callable[[api.PutDone], None]:
        """Return what notes the outcome of a change in the audit log, if clients are known."""
        access, proof = self._access, connection.proof
        if access is None or proof is None:
            return lambda _done: None
        name, peer = proof.identity.name, connection.peer

        def note(done: api.PutDone) -> None:
            outcome = "refused"
            if done.status is api.Status.PUT_OK:
                outcome = "done" if done.offsets else "unchanged"
            elif done.status.is_stored:
                outcome = "unconfirmed"
            why = done.reason or ("" if done.status is api.Status.PUT_OK else done.status.value)
            access.administered(name, peer, action, outcome, f"{what}: {why}" if why else what)

        return note

    def _accept_range(self, connection: Connection, request: api.RangeQuestion) -> None:
        try:
            busy = self._ranges.accept_range(connection, request)
        except UsageError as failure:
            self._give_up(connection, request, failure)
            return
        if busy is not None:
            self._fail(connection, request.rid, "BUSY", busy)

    # -- answering

    def _pull_filtered(self, connection: Connection, request: api.Pull) -> None:
        try:
            pull: Asked = self._pulls.filtered(connection, request) or request
        except UsageError as failure:
            self._fail(connection, request.rid, UsageError.__name__, str(failure))
            return
        if request.bulk and len(self._bulk) < MAX_BULK:
            self._bulk.append((connection, pull))
        else:
            self._pulls.offer(connection, pull)

    def _answer_pull(self, connection: Connection, due: Asked | Parked) -> None:
        try:
            self._pulls.answer_due(connection, due)
        except Exception as failure:  # it is unknown whether it was answered
            _, reason = self._failures.note("a request", failure)
            self._end(connection, reason)

    def _cannot_finish(self, whom: Hashable, failure: Exception) -> None:
        """Go on after a failure with what was read from the disk, for a connection or positions."""
        if isinstance(whom, Connection):  # it is unknown whether it was answered
            self._end(whom, self._failures.note("a request", failure)[1])
        else:
            self._give_up_fetches(failure)

    def _answer_read(self, ready: list[Done]) -> None:
        """Answer what other threads have read; answers for ended connections are dropped."""
        outdated = self._backend.outdated()
        for done in ready:
            if isinstance(done.request, OwnQuery):
                done.request.respond(*self._own_answer(done, outdated))
            elif outdated is not None and isinstance(done.request, _READS):
                self._fail(done.connection, done.request.rid, "SERVICE_NOT_AVAILABLE", outdated)
            elif isinstance(done.answer, Exception):
                self._give_up(done.connection, done.request, done.answer)
            elif isinstance(done.request, api.Administer) or self._replies.has_room(
                done.connection
            ):  # a change that was made must not be answered BUSY, which says that it was not
                reply, records = done.answer
                self._answer(done.connection, reply, records)
            else:
                self._fail(done.connection, done.request.rid, "BUSY", UNREAD)

    def _own_answer(self, done: Done, outdated: str | None) -> tuple[object, bytes | None]:
        """Return what the one who asked an OwnQuery gets."""
        if outdated is not None:
            return api.Failed(0, "SERVICE_NOT_AVAILABLE", outdated), None
        if isinstance(done.answer, Exception):
            return api.Failed(0, *self._failures.note("a query", done.answer)), None
        if not self._replies.has_room(done.connection):
            return api.Failed(0, "BUSY", UNREAD), None
        return done.answer

    def _fail(self, connection: Connection, rid: int, status: str, reason: str) -> None:
        self.counts.refusals.add(status)
        self._told.write(f"api: a request of %s was refused: {status}: %s", connection.peer, reason)
        master = master_of(self._backend, self._failures)
        self._answer(connection, api.Failed(rid, status, reason, master))

    def _give_up(self, connection: Connection, request: api.Question, failure: Exception) -> None:
        """Answer a request that failed; nothing of it was stored."""
        what = f"a request ({type(request).__name__})"
        self._fail(connection, request.rid, *self._failures.note(what, failure))

    def _cannot_encode(self, connection: Connection, reply: api.Reply, failure: Exception) -> None:
        """Answer that the request failed, because its reply cannot be encoded.

        The connection is ended instead in two cases. If the reply is to a put, a Failed would mean
        that nothing is stored. If the reply is a Failed, a second one would fail the same way.
        """
        status, reason = self._failures.note(f"a reply ({type(reply).__name__})", failure)
        if isinstance(reply, api.PutDone | api.Failed):
            self._end(connection, f"its request cannot be answered: {reason}")
        else:
            self._fail(connection, reply.rid, status, reason)

    def _end(self, connection: Connection, reason: str) -> None:
        """End a connection, unless it has ended."""
        if not connection.ended:
            self._connections.end(connection, reason[:200])


def _is_listing(request: object) -> TypeGuard[api.AskTopics | api.AskConfigs]:
    """Whether a request is for all topics."""
    return isinstance(request, api.AskTopics | api.AskConfigs) and request.topic is None


def _listen(address: str) -> socket.socket:
    """Return a socket that listens on "tcp://HOST:PORT", at the first address that can be bound."""
    endpoint = parse_address(address.removeprefix(_SCHEME))
    if endpoint is None:
        raise ConfigError(f"api: {address!r} is not an address; write tcp://HOST:PORT")
    listener = listen(*endpoint, BACKLOG)
    listener.setblocking(False)
    return listener


def _listen_below(endpoint: str) -> socket.socket | None:
    """Listen on the fast port of an address as well; without it the node goes on, and says so."""
    host, _, port = endpoint.removeprefix(_SCHEME).rpartition(":")
    below = f"{_SCHEME}{host}:{int(port) - FAST_PORT_BELOW}"
    try:
        return _listen(below)
    except (OSError, OverflowError) as failure:
        why = getattr(failure, "strerror", None) or failure
        log.warning(
            "cannot bind %s: %s; RocketMQ's slaves ask there for the topics, and get none: free "
            "that port", below, why,
        )  # fmt: skip
        return None


def _endpoint(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{_SCHEME}{address_text(host, port)}"
