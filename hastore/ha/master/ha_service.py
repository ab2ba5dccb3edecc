"""HAService: the master's side of replication; HAConnection: one connection of the HA port.

HAService accepts connections in every role, and streams the log while the node is master. Appending
threads, the flush thread and the connections' readers call it. Lock order: the write gate before
`_lock`. No lock of HAService is held while a waiting put's `done` runs or a socket blocks.

    accepted -> the first 8 bytes are
      CALL_MAGIC               -> HELLO -> SURVEY, PROMISE, COPY: answered, closed
                                        -> FORWARD: requests of clients (hello/forward_link.py)
                                        -> FOLLOW: STREAM, or answered, closed
      a classic slave's report -> STREAM, where allowed
    STREAM: ReadSocketService receives reports, WriteSocketService sends data

Any thread that finds the link broken calls `close(reason)`; only the first call has an effect.
"""

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hastore.config.model import SyncFrom
from hastore.errors import ProtocolError, ReplicationError
from hastore.ha.hello.accepting import (
    AcceptedConnection,
    AcceptedConnections,
    AcceptSocketService,
    ConnectionReader,
    admit,
    is_call,
    receive_first,
)
from hastore.ha.hello.answering import answer_call
from hastore.ha.hello.forward_link import ForwardPort
from hastore.ha.hello.peer import Deadline, wait_in_kernel, warn_of_tampering
from hastore.ha.master.group_transfer import GroupTransferService, Need, PutProgress
from hastore.ha.master.write_socket_service import WriteSocketService
from hastore.ha.node.member import Member
from hastore.ha.replica.digests import own_digest
from hastore.ha.rules.acks import AckTable, ClassicReporter, Intake
from hastore.ha.rules.epochs import EpochEntry
from hastore.ha.rules.following import FollowAnswer, MasterView, answer_follow, lacks_own_end
from hastore.protocol.ha_link import (
    CLASSIC_BODY_BYTES,
    NO_READERS,
    READERS_WAIT,
    ReportDecoder,
)
from hastore.protocol.hello import Answer, Forwarding, Hello, Refused, StreamFrom
from hastore.security.slots import KnownHosts

log = logging.getLogger(__name__)

TIMED_EVERY = 8  # of so many appends one is timed until each slave reports it


@dataclass(frozen=True, slots=True)
class SlaveStatus:
    """One linked slave as `hastore status` shows it; offsets and lag in bytes."""

    node: int | None
    address: str
    state: str
    ack_offset: int | None
    lag_bytes: int | None
    in_sync: bool
    classic: bool

    @property
    def name(self) -> str:
        """The slave's name in messages, the same on each connection."""
        return _name(self.node, self.address)


class HAService:
    """The connections of a node's HA port, the slaves' reports, and the limits that they move."""

    def __init__(self, member: Member, transfer: GroupTransferService) -> None:
        self.member = member
        self.transfer = transfer
        hosts = KnownHosts(
            lambda: [address for _, address in member.peers],
            member.clock,
            on_failure=member.on_failure,
        )
        self.accepted = AcceptedConnections(
            member.config.ha.max_connections, partial(HAConnection, self), hosts
        )
        self.acceptor = AcceptSocketService(self.accept, on_failure=member.on_failure)
        self._lock = threading.Lock()
        # Replaced, never changed: the appending thread reads it without a lock.
        self._streams: tuple[HAConnection, ...] = ()
        self._table: AckTable | None = None
        self._opened_at = 0  # the log's end when the epoch was opened here
        self._sync = False  # a SYNC_MASTER: readers stop at the confirmed offset
        self._serial = (
            0  # numbers the PutProgress made under `_lock`, so that older ones are ignored
        )
        self.push2_slave_max_offset = 0
        self._appends = 0
        self._timed = member.counts.round_trips.waiting  # by connection
        self.forward_port = ForwardPort(member.clock)
        # Why a RocketMQ slave at a host may not go on at its report; the node sets it.
        self.refuse_classic: Callable[[str, int], str | None] = lambda host, report: None

    @property
    def classic_hosts(self) -> set[str]:
        """The hosts of the RocketMQ slaves that are served now."""
        return {_host_of(one.address) for one in self._streams if one.classic}

    @property
    def failure(self) -> str | None:
        """The last defect of this node that ended a connection; None: there was none."""
        return self.accepted.failure

    def bind(self, address: str) -> str:
        """Bind the HA port and return the bound address; raises OSError when it is taken."""
        return self.acceptor.bind(address)

    def stop(self) -> None:
        """Close the port and every connection."""
        self.acceptor.stop()
        self.accepted.stop()

    def accept(self, sock: socket.socket, address: str) -> None:
        """Take a new connection, if there is room (AcceptedConnections)."""
        self.accepted.accept(sock, address)

    def open_epoch(self, entry: EpochEntry, *, sync: bool) -> None:
        """Serve slaves in this epoch from now on; the caller holds the gate and opens it next."""
        store = self.member.store
        with self._lock:
            self._sync, self._opened_at = sync, store.max_offset
            self._table = AckTable(
                epoch=entry.epoch,
                acks=entry.acks,
                epoch_start=entry.start,
                nodes=frozenset(entry.nodes),
                count_classic=self.member.config.ha.count_classic_peers,
                classics_alone=0 if entry.acks else max(1, self.member.config.acks),
                confirmed_offset=store.confirmed_offset,
            )
            self.push2_slave_max_offset = 0
            store.set_limits(readable=store.confirmed_offset if sync else store.max_offset)
            self.member.counts.promotions += 1
        log.info("epoch %d is open from %d on, acks %d", entry.epoch, entry.start, entry.acks)
        self.advance()

    def close_epoch(self, reason: str) -> None:
        """Stop being master.

        Drops the slaves, ends the waiting puts as not known to be confirmed, and sets the readable
        offset back to the confirmed one.
        """
        with self._lock:
            was, self._table = self._table, None
            self._serial += 1
            serial = self._serial
            connections = list(self._streams)
        for connection in connections:
            connection.close(reason)
        ended = self.transfer.abandon(serial)
        if was is not None:
            self.member.store.set_limits(readable=self.member.store.confirmed_offset)
            log.warning("not master any more: %s; %d waiting puts ended unconfirmed", reason, ended)

    def set_sync(self, sync: bool) -> None:
        """Switch between ASYNC_MASTER and SYNC_MASTER; the epoch and the waiting puts stay."""
        with self.member.gate.lock, self._lock:  # no append moves `readable` meanwhile
            self._sync = sync
            store = self.member.store
            if self._table is not None:
                readable = self._table.confirmed_offset if sync else store.max_offset
                store.set_limits(readable=readable)
        self._note_limits()

    def forget(self, connection: "HAConnection") -> None:
        """Drop a closed connection from the streams and from the table of reports."""
        with self._lock:
            self.member.counts.round_trips.forget(connection.connection_id)
            self._streams = tuple(c for c in self._streams if c is not connection)
            if self._table is not None:
                if connection.node is not None:
                    self._table.leave(connection.node, connection.connection_id)
                self._table.classics.pop(connection.connection_id, None)

    def follow(self, connection: "HAConnection", hello: Hello) -> FollowAnswer:
        """Answer a slave that wants to follow.

        If the answer is StreamFrom, the slave is registered. It has not reported in this epoch yet.
        """
        member = self.member
        digest = own_digest(member.store, hello)  # reads up to 64 MiB, so not under the gate's lock
        with member.gate.lock:
            epoch, data, store = member.open_epoch, member.state.data, member.store
            if not epoch:
                return Refused(f"node {member.config.node} is no master now", data.promised_epoch)
            view = MasterView(
                epoch,
                data.promised_epoch,
                data.history,
                store.min_offset,
                store.max_offset,
                store.file_size,
                digest,
                self._opened_at,
                data.unmet.get(hello.node),
            )
            answer = answer_follow(view, hello)
            if not isinstance(answer, Refused):
                member.state.learn_store(hello.node, hello.store_id)
                if isinstance(answer, StreamFrom):
                    member.state.note_met(hello.node)  # not at a cut: that may fail
                    self._register(connection, hello, answer.offset)
                return answer
        if lacks_own_end(view, hello):
            member.end_short_epoch(view.begin, hello.node, hello.max_offset)
        return answer

    def classic_start(self, report: int) -> int:
        """Return where a RocketMQ slave's stream starts, given its first report.

        Raises ProtocolError when the report is outside this log, or this node is not master.
        """
        store = self.member.store
        if not self.member.open_epoch:
            raise ProtocolError("this node is no master now")
        if report == 0:
            if self.member.config.ha.sync_from is SyncFrom.FIRST:
                return store.min_offset
            last = store.max_offset - store.max_offset % store.file_size
            return max(last, store.min_offset)
        if not store.min_offset <= report <= store.max_offset:
            raise ProtocolError(
                f"the RocketMQ slave's log ends at {report}, but this log covers "
                f"[{store.min_offset}, {store.max_offset}); empty that slave's store to start anew"
            )
        return report

    def join_classic(self, connection: "HAConnection", offset: int) -> None:
        """Register a RocketMQ slave's stream."""
        with self._lock:
            if self._table is None:
                raise ProtocolError("this node is no master now")
            self.member.counts.links.add(_host_of(connection.address))
            self._table.classics[connection.connection_id] = ClassicReporter(began=offset)
            self._streams = (*self._streams, connection)

    def _register(self, connection: "HAConnection", hello: Hello, offset: int) -> None:
        frame_bytes = min(self.member.config.ha.transfer_batch_size, hello.largest_frame)
        connection.open_stream(offset, frame_bytes_max=max(frame_bytes, 4096), classic=False)
        with self._lock:
            if self._table is None:
                raise ReplicationError(
                    f"epoch {self.member.open_epoch} is not open for slaves yet; node {hello.node} "
                    "connects again by itself"
                )
            earlier = [c for c in self._streams if c.node == hello.node]
            self._table.join(hello.node, connection.connection_id, hello.ack_point == "flushed")
            self._streams = (*(c for c in self._streams if c.node != hello.node), connection)
            self.member.counts.links.add(str(hello.node))
        for other in earlier:
            other.close("the same node has connected again")

    def on_append(self, start: int, end: int, data: bytearray | None = None) -> None:
        """Push an append to every slave that is caught up; the appending thread calls it.

        `data` are the bytes of [start, end); None when the caller does not have them in one piece.
        """
        if not self._sync and self._table is not None:
            self.member.store.set_limits(readable=end)  # before the push, which sends it too
        self._appends += 1
        if self._appends % TIMED_EVERY == 1:
            self._time_round_trips(end)
        for connection in self._streams:
            writer = connection.writer
            if writer is not None:
                writer.push(start, end, data)
        table = self._table
        if table is not None and table.acks == 0:
            self.advance()

    def _time_round_trips(self, end: int) -> None:
        """Measure how long each slave takes to report this append."""
        now_ms = self.member.clock.monotonic_ms()
        for connection in self._streams:
            if connection.writer is not None:
                self.member.counts.round_trips.sent(connection.connection_id, end, now_ms)

    def on_report(self, connection: "HAConnection", offset: int) -> None:
        """Count a report, and complete the puts that it confirms. The reader calls it."""
        with self._lock:
            table = self._table
            if table is None:
                return
            if connection.classic:
                classic = table.classics.get(connection.connection_id)
                if classic is not None:
                    classic.offset = offset
            else:
                node = connection.node
                if node is None or not table.report(node, connection.connection_id, offset):
                    return
            self.push2_slave_max_offset = max(self.push2_slave_max_offset, offset)
            if connection.connection_id in self._timed:
                trips, now_ms = self.member.counts.round_trips, self.member.clock.monotonic_ms()
                trips.reported(connection.connection_id, offset, now_ms)
            progress, moved = self._compute_progress(table)
        self._publish(progress, moved)
        writer = connection.writer
        if not moved and writer is not None and writer.at_once:
            writer.note_limits(offset)  # what others have confirmed before

    def on_stalled(self, connection: "HAConnection") -> None:
        """Count a slave that takes nothing as not in sync, until it takes something again."""
        stalled = connection.intake.stalled
        with self._lock:
            if self._table is not None:
                self._table.note_stalled(connection.node, connection.connection_id, stalled)
        if stalled:
            log.warning(
                "%s takes nothing of what it is sent, so it is not in sync; look at its disk",
                connection.name,
            )
        else:
            log.info("%s takes what it is sent again", connection.name)

    def on_flushed(self, _offset: int) -> None:
        """Complete the puts that waited for this node's disk; the flush thread calls it."""
        self.advance()

    def advance(self) -> None:
        """Compute and publish the limits, and complete the puts that they cover."""
        with self._lock:
            if self._table is None:
                return
            progress, moved = self._compute_progress(self._table)
        self._publish(progress, moved)

    def _publish(self, progress: PutProgress, moved: bool) -> None:
        """Complete puts, then tell slaves and readers of moved limits; `_lock` is free."""
        self.transfer.advance(progress)
        if moved:
            self._note_limits()
            self.member.store.tell_readers()

    def _compute_progress(self, table: AckTable) -> tuple[PutProgress, bool]:
        """Return up to which offset each need is met, and whether the confirmed offset moved.

        The caller holds `_lock`.
        """
        store = self.member.store
        flushed = store.flushed_offset
        own = flushed if self.member.counts_flushed else store.max_offset
        before = table.confirmed_offset
        confirmed = table.confirm(own)
        moved = confirmed > before
        limits = {
            Need.MASTER_DISK: flushed,
            Need.SLAVES: confirmed if table.acks else table.confirmed_for_puts(),
            Need.SLAVE_DISKS: table.confirmed_flushed(flushed),
        }
        if moved:
            readable = confirmed if self._sync else None
            store.set_limits(confirmed=confirmed, readable=readable, tell=False)
        by_classics, classics_to = None, 0
        if table.count_classic:
            by_classics = self._confirmed_by_classics
            classics_to = max([one.offset for one in table.classics.values()], default=0)
        self._serial += 1
        progress = PutProgress(
            self._serial, limits, self._level, by_classics, table.epoch, classics_to
        )
        return progress, moved

    def _confirmed_by_classics(self, end_offset: int) -> bool:
        with self._lock:
            if self._table is None or end_offset > self._own_offset():
                return False
            return self._table.confirmed_with_classics(end_offset)

    def _own_offset(self) -> int:
        """Return the end of this node's log at its own ack point."""
        store = self.member.store
        return store.flushed_offset if self.member.counts_flushed else store.max_offset

    def _note_limits(self) -> None:
        for connection in self._streams:
            if not connection.classic and connection.writer is not None:
                connection.writer.note_limits(connection.ack_offset)

    def _level(self, need: Need, end_offset: int) -> str:
        """Return the level that a put that ends at `end_offset` has for certain."""
        if need is Need.MASTER_DISK:
            return "MASTER_DISK"
        with self._lock:
            if self._table is None:
                return "MASTER_MEM"
            return self._table.level(end_offset, flushed=need is Need.SLAVE_DISKS)

    def can_confirm(self, *, flushed: bool) -> str | None:
        """Return why a synchronous put could not be confirmed now.

        Returns None when enough slaves are in sync.
        """
        config = self.member.config.ha
        with self._lock:
            table = self._table
            if table is None:
                return "this node is no master"
            return table.missing(
                self.member.store.max_offset, config.max_gap_not_in_sync, flushed=flushed
            )

    def never_flushed(self) -> str | None:
        """Return why no put with sync_flush can be confirmed with the slaves' configuration.

        Returns None when such a put can be confirmed.
        """
        with self._lock:
            table = self._table
            return None if table is None else table.never_flushed(self.member.config.node)

    def slaves(self) -> list[SlaveStatus]:
        """Return the status of each connected slave."""
        end, gap = self.member.store.max_offset, self.member.config.ha.max_gap_not_in_sync
        return [connection.status(end, gap) for connection in self._streams]

    def linked_nodes(self) -> set[int]:
        """Return the numbers of the nodes that follow this master now."""
        return {c.node for c in self._streams if c.node is not None}

    def without_remoting(self) -> set[int]:
        """Return which of them are of a version that knows no clients of RocketMQ."""
        linked = [c.hello for c in self._streams if c.hello is not None]
        return {hello.node for hello in linked if not hello.remoting}

    def slave_offsets(self) -> dict[str, int]:
        """Return the offset from which each connected slave needs the log, by its name.

        Of several with one name, RocketMQ slaves at one host, that of the slowest.
        """
        found: dict[str, int] = {}
        for connection in self._streams:
            offset, name = connection.reached_offset, connection.name
            found[name] = min(offset, found.get(name, offset))
        return found


class HAConnection(AcceptedConnection):
    """A peer's connection to this node's HA port."""

    def __init__(
        self, owner: HAService, sock: socket.socket, address: str, connection_id: int
    ) -> None:
        self.owner = owner
        self.member = owner.member
        self.hello: Hello | None = None
        self.classic = False
        self.ack_offset: int | None = None
        self.intake = Intake()
        self.writer: WriteSocketService | None = None
        super().__init__(owner.accepted, sock, address, connection_id, self.member.on_refused)
        self.reader = ReadSocketService(self)

    @property
    def node(self) -> int | None:
        """The peer's node number; None for a classic peer, or before HELLO."""
        return self.hello.node if self.hello is not None else None

    @property
    def streaming(self) -> bool:
        """Whether the log is streamed on this connection."""
        return self.writer is not None and not self._closed

    @property
    def reached_offset(self) -> int:
        """The slave's last report, or the start of its stream before the first report."""
        writer = self.writer
        assert writer is not None
        return writer.start_offset if self.ack_offset is None else self.ack_offset

    @property
    def name(self) -> str:
        """The slave's name in messages."""
        return _name(self.node, self.address)

    def status(self, end: int, gap_max: int) -> SlaveStatus:
        """Describe the slave. `end` is the end of the master's log; a slave that lags more than
        `gap_max` bytes, or takes nothing, is not in sync.
        """
        ack, stalled = self.ack_offset, self.intake.stalled
        lag = None if ack is None else max(0, end - ack)
        state = "starting" if ack is None else "stalled" if stalled else "streaming"
        return SlaveStatus(
            self.node,
            self.address,
            state,
            ack,
            lag,
            lag is not None and lag <= gap_max and not stalled,
            self.classic,
        )

    def identify(self, hello: Hello) -> None:
        """Record who the peer is.

        If a secret is configured, the peer has proved that it has the secret.
        """
        self.hello = hello
        self.identified(proved=self.member.secret is not None or self.member.tls is not None)

    def follow(self, hello: Hello) -> FollowAnswer:
        """Answer a slave that wants to follow. For a StreamFrom, register the stream."""
        return self.owner.follow(self, hello)

    def forward(self) -> Answer:
        """Answer a node that wants to forward requests of its clients."""
        proved = self.member.secret is not None or self.member.tls is not None
        return self.owner.forward_port.decide(self.address, proved=proved)

    def serve_forwarding(self) -> str:
        """Take the requests that the node forwards, until the link ends; return why it ended."""
        assert self.node is not None
        number, note = str(self.connection_id), self.accepted.note_defect
        return self.owner.forward_port.serve(self.sock, self.node, number, note)

    def start_stream(self) -> None:
        """Start the registered stream; called after the answer has been sent."""
        assert self.writer is not None
        self.writer.start()

    def open_stream(
        self, offset: int, *, frame_bytes_max: int, classic: bool
    ) -> WriteSocketService:
        """Prepare the stream from `offset` on; it begins when the returned writer is started."""
        member, config = self.member, self.member.config.ha
        self.intake = Intake(offset)
        self.writer = WriteSocketService(
            self.sock,
            member.store,
            member.clock,
            name=f"WriteSocketService-{self.connection_id}",
            start_offset=offset,
            frame_bytes_max=frame_bytes_max,
            heartbeat_ms=config.heartbeat_interval_ms,
            history=() if classic else member.state.history,
            tell_limits=not classic,
            on_broken=self.close,
            on_failure=self.thread_failed,
        )
        return self.writer

    def ended(self, reason: str) -> None:
        """Note, once, that the connection was closed."""
        if self.writer is not None:
            log.info(
                "link of %s (%s) closed: %s", self.node or "a classic slave", self.address, reason
            )
        self.owner.forget(self)

    def release(self) -> None:
        """Stop the writer and free the descriptors; the reader calls it at its end."""
        if self.writer is not None and self.writer.stop():
            self.writer.release()
        super().release()


class ReadSocketService(ConnectionReader[HAConnection]):
    """Read one connection: first a HELLO or a classic report, then the slave's reports."""

    def __init__(self, connection: HAConnection) -> None:
        super().__init__(f"ReadSocketService-{connection.connection_id}", connection)

    def serve(self) -> str:
        """Read what the peer begins with, and act on it; return why the connection ends."""
        connection = self._connection
        member, plain = connection.member, connection.plain
        config = member.config.ha
        hello = Deadline(member.clock, config.hello_timeout_ms)
        # A RocketMQ slave sometimes sends no report before its first heartbeat, after 5 s or more.
        late = config.allow_classic_peers
        first = receive_first(
            plain, Deadline(member.clock, config.housekeeping_interval_ms) if late else hello
        )
        if is_call(first):
            if late:
                hello = Deadline(member.clock, config.hello_timeout_ms)
            connection.sock, connection.proved = admit(
                plain, first, hello, member.tls, member.secret, may_be_old=member.may_be_old()
            )
            answer = answer_call(connection, hello)
            if answer is None:
                return "answered"
            if isinstance(answer, Forwarding):
                return connection.serve_forwarding()
        else:
            self._accept_classic(first)
        return self._read_reports()

    def _accept_classic(self, first: bytes) -> None:
        connection = self._connection
        config = connection.member.config.ha
        report = int.from_bytes(first, "big", signed=True)
        if report < 0:
            raise ProtocolError(
                "the caller sent neither a HELLO nor a RocketMQ slave's report; only nodes and "
                "slaves may connect to the HA port"
            )
        if not config.allow_classic_peers:
            raise ProtocolError(
                "a RocketMQ slave wants to follow; to serve such slaves, set "
                "ha.allow_classic_peers: true"
            )
        offset = connection.owner.classic_start(report)
        why = connection.owner.refuse_classic(_host_of(connection.address), report)
        if why:
            raise ProtocolError(why)
        connection.classic = connection.spoken = True
        writer = connection.open_stream(offset, frame_bytes_max=CLASSIC_BODY_BYTES, classic=True)
        connection.owner.join_classic(connection, offset)
        log.info("RocketMQ slave %s follows from %d", connection.address, offset)
        warn_of_tampering(connection.address, "a RocketMQ slave", "its protocol knows no secret")
        # sendfile needs a blocking socket. Set it now, while only this thread uses the socket.
        connection.sock.settimeout(None)
        writer.start()

    def _read_reports(self) -> str:
        connection = self._connection
        sock, clock = connection.sock, connection.member.clock
        housekeeping_ms = connection.member.config.ha.housekeeping_interval_ms
        wait_in_kernel(sock, receive_ms=1_000)
        decoder = ReportDecoder()
        heard_ms = clock.monotonic_ms()
        while not self.stopping.is_set():
            try:
                data = sock.recv(8192)
            except BlockingIOError:
                if clock.monotonic_ms() - heard_ms > housekeeping_ms:
                    return f"the slave was silent for {housekeeping_ms / 1000:g} s"
                continue
            if not data:
                return "closed by the slave"
            heard_ms = clock.monotonic_ms()
            reports = decoder.feed(data)
            if reports:
                self._count_reports(reports)
        return "the node stops"

    def _count_reports(self, reports: list[int]) -> None:
        """Check that the reports neither go back nor exceed what was sent; count the last one."""
        connection = self._connection
        writer = connection.writer
        assert writer is not None
        last, said = connection.ack_offset, False
        says = connection.hello is not None and connection.hello.readers
        for report in reports:
            if says and report in (READERS_WAIT, NO_READERS):
                writer.at_once = report == READERS_WAIT
                continue
            if report < 0 or (last is not None and report < last):
                raise ProtocolError(
                    f"a report went back from {last} to {report}; it confirmed no put"
                )
            last, said = report, True
        if last is not None and last > writer.reach_offset:
            raise ProtocolError(
                f"a report of {last}, beyond {writer.reach_offset}, the end of the sent bytes; "
                "it confirmed no put"
            )
        connection.ack_offset = last
        if last is not None:
            connection.owner.on_report(connection, last)
        if said and last is not None and connection.intake.report(last, writer.reach_offset):
            connection.owner.on_stalled(connection)


def _host_of(address: str) -> str:
    return address.rpartition(":")[0]


def _name(node: int | None, address: str) -> str:
    """Return a slave's name; the port of a RocketMQ slave changes with each connection."""
    return f"RocketMQ slave {_host_of(address)}" if node is None else f"node {node}"
