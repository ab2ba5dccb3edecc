"""HAConnection: one accepted connection of the HA port, and ReadSocketService, its reading thread.

    accepted -> the first 8 bytes are
      CALL_MAGIC               -> HELLO -> SURVEY, PROMISE, COPY: answered, closed
                                        -> FOLLOW: STREAM, or answered, closed
      a classic slave's report -> STREAM, where allowed
    STREAM: ReadSocketService receives reports, WriteSocketService sends data

Any thread that finds the link broken calls `close(reason)`; only the first call has an effect.
"""

import logging
import socket
from dataclasses import dataclass
from typing import Protocol

from hastore.errors import ProtocolError
from hastore.ha.hello.accepting import (
    AcceptedConnection,
    AcceptedConnections,
    ConnectionReader,
    admit,
    is_call,
)
from hastore.ha.hello.answering import answer_call
from hastore.ha.hello.peer import Deadline, receive_exactly, wait_in_kernel
from hastore.ha.master.write_socket_service import WriteSocketService
from hastore.ha.node.member import Member
from hastore.ha.rules.following import FollowAnswer
from hastore.protocol.ha_link import CLASSIC_BODY_BYTES, REPORT_BYTES, ReportDecoder
from hastore.protocol.hello import Hello

log = logging.getLogger(__name__)


class ConnectionOwner(Protocol):
    """What a connection needs of the service that accepted it; HAService implements it."""

    member: Member
    accepted: AcceptedConnections["HAConnection"]

    def follow(self, connection: "HAConnection", hello: Hello) -> FollowAnswer:
        """Answer a slave that wants to follow. For a StreamFrom, register the stream."""
        ...

    def classic_start(self, report: int) -> int:
        """Return where a RocketMQ slave's stream starts.

        Raises ProtocolError when `report` is outside the log.
        """
        ...

    def join_classic(self, connection: "HAConnection", offset: int) -> None:
        """Register a RocketMQ slave's stream."""
        ...

    def on_report(self, connection: "HAConnection", offset: int) -> None:
        """Count a checked report; the connection's reader calls it."""
        ...

    def forget(self, connection: "HAConnection") -> None:
        """Drop a closed connection."""
        ...


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
        """The slave's name in messages; a node has the same name on each connection."""
        return _name(self.node, self.address)


class HAConnection(AcceptedConnection):
    """A peer's connection to this node's HA port."""

    def __init__(
        self, owner: ConnectionOwner, sock: socket.socket, address: str, connection_id: int
    ) -> None:
        self.owner = owner
        self.member = owner.member
        self.hello: Hello | None = None
        self.classic = False
        self.ack_offset: int | None = None
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
        `gap_max` bytes is not in sync.
        """
        ack = self.ack_offset
        lag = None if ack is None else max(0, end - ack)
        return SlaveStatus(
            self.node,
            self.address,
            "starting" if ack is None else "streaming",
            ack,
            lag,
            lag is not None and lag <= gap_max,
            self.classic,
        )

    def identify(self, hello: Hello) -> None:
        """Record who the peer is.

        If a secret is configured, the peer has proved that it has the secret.
        """
        self.hello = hello
        self.spoken = True

    def follow(self, hello: Hello) -> FollowAnswer:
        """Answer a slave that wants to follow. For a StreamFrom, register the stream."""
        return self.owner.follow(self, hello)

    def start_stream(self) -> None:
        """Start the registered stream; called after the answer has been sent."""
        assert self.writer is not None
        self.writer.start()

    def open_stream(
        self, offset: int, *, frame_bytes_max: int, classic: bool
    ) -> WriteSocketService:
        """Prepare the stream from `offset` on; it begins when the returned writer is started."""
        member, config = self.member, self.member.config.ha
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
        first = receive_exactly(
            plain,
            REPORT_BYTES,
            Deadline(member.clock, config.housekeeping_interval_ms) if late else hello,
        )
        if is_call(first):
            if late:
                hello = Deadline(member.clock, config.hello_timeout_ms)
            connection.sock = admit(plain, first, hello, member.tls)
            if not answer_call(connection, hello):
                return "answered"
        else:
            self._accept_classic(first)
        return self._read_reports()

    def _accept_classic(self, first: bytes) -> None:
        connection = self._connection
        config = connection.member.config.ha
        report = int.from_bytes(first, "big", signed=True)
        if report < 0:
            raise ProtocolError("the caller sent neither a HELLO nor a RocketMQ slave's report")
        if not config.allow_classic_peers:
            raise ProtocolError(
                "a RocketMQ slave wants to follow; to serve such slaves, set "
                "ha.allow_classic_peers: true"
            )
        offset = connection.owner.classic_start(report)
        connection.classic = connection.spoken = True
        writer = connection.open_stream(offset, frame_bytes_max=CLASSIC_BODY_BYTES, classic=True)
        connection.owner.join_classic(connection, offset)
        log.info("RocketMQ slave %s follows from %d", connection.address, offset)
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
                    return f"silent for {housekeeping_ms / 1000:g} s"
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
        last = connection.ack_offset
        for report in reports:
            if report < 0 or (last is not None and report < last):
                raise ProtocolError(
                    f"a report went back from {last} to {report}; it confirmed no put"
                )
            last = report
        if last is not None and last > writer.reach_offset:
            raise ProtocolError(
                f"a report of {last}, beyond {writer.reach_offset}, the end of the sent bytes; "
                "it confirmed no put"
            )
        connection.ack_offset = last
        if last is not None:
            connection.owner.on_report(connection, last)


def _name(node: int | None, address: str) -> str:
    return f"RocketMQ slave {address}" if node is None else f"node {node}"
