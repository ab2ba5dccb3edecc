"""SlaveStream: the slave's end of one link. It receives, appends, and reports after each receive.

Long bodies are spliced from the socket into the log's file; all other bytes, and all bytes of a
link under TLS or with MACs, go through one buffer. At ack point `flushed` another thread,
FlushReporter, syncs the log and reports after each sync.
"""

import fcntl
import logging
import os
import socket
import threading
from collections.abc import Container

from hastore.config.model import AckPoint
from hastore.errors import HastoreError, ProtocolError
from hastore.ha.hello.peer import break_link, wait_in_kernel
from hastore.ha.node.member import Member
from hastore.ha.replica.receiver import Receiver, require_open
from hastore.ha.rules.acks import own_reports_confirm
from hastore.ha.rules.epochs import History
from hastore.ha.slave.crc_check import CrcCheck, DamagedRecordError
from hastore.protocol.ha_link import (
    HEADER_BYTES,
    NO_READERS,
    READERS_WAIT,
    REPORT,
    Confirmed,
    Data,
    StreamDecoder,
)
from hastore.security.tls_socket import LinkSocket
from hastore.service import Service

log = logging.getLogger(__name__)

BUFFER_BYTES = 256 * 1024
SPLICE_BYTES_MIN = 64 * 1024
PIPE_BYTES = 1024 * 1024
_F_SETPIPE_SZ = 1031
FULL_PAUSE_S = 0.5
RECEIVE_MS = 1_000  # so often a silent link is looked at, and a heartbeat sent


class SlaveStream:
    """One link of a slave to its master, until it breaks. HAClient's thread runs it.

    `master_end` is the end of the master's log, as its HELLO says: an unclean slave becomes clean
    when its own log has reached that offset. `accepted` lists damaged records to accept, as
    (offset, CRC). With `says_readers` the master is told whether readers wait; `counts_written` is
    the master's.
    """

    def __init__(
        self,
        member: Member,
        sock: LinkSocket,
        *,
        epoch: int,
        history: History,
        master_end: int | None,
        control_frames: bool = True,
        accepted: Container[tuple[int, int]] = (),
        says_readers: bool = False,
        counts_written: bool = False,
    ) -> None:
        self._member = member
        self._sock = sock
        self._splice_bytes_min = SPLICE_BYTES_MIN if isinstance(sock, socket.socket) else 1 << 62
        self.epoch = epoch
        self._master_end = master_end
        self._receiver = Receiver(member, epoch, history)
        self._decoder = StreamDecoder(control_frames=control_frames)
        self._told: Confirmed | None = None
        # From here on this node's reports confirm the log; None: only the master knows.
        self._confirms_from: int | None = None
        if history and history[-1].epoch == epoch:
            self._confirms_from = own_reports_confirm(
                history[-1], member.config.node, written=counts_written
            )
        self._says_readers = says_readers and self._confirms_from is None
        self._said_readers = False
        # A record starts at the dispatched offset: headers can be checked from there on.
        self._crcs = CrcCheck(member.store, accepted, member.store.dispatched_offset)
        self._checked = member.store.max_offset  # no report goes beyond this offset
        self._bulk = False  # the last body was long: receive headers alone, splice long bodies
        self._flushed = member.config.ha.ack_point is AckPoint.FLUSHED
        self._heartbeat_ms = member.config.ha.heartbeat_interval_ms
        self._send_lock = threading.Lock()
        self._reported: int | None = None
        self._reported_ms = 0.0
        self._closed = False

    def close(self) -> None:
        """Break the link, from any thread."""
        self._closed = True
        break_link(self._sock, "the master")

    def run(self) -> None:
        """Stream until the link ends, then close the gate.

        Raises ProtocolError when the master breaks the protocol or is superseded.
        """
        member = self._member
        self._open_gate()
        flusher = _FlushReporter(self) if self._flushed else None
        try:
            self._receiver.begin()
            member.store.confirmed_soon = self._confirms_from is not None
            if flusher is not None:
                member.store.flush()
                flusher.start()
            self.report()
            self._note_clean()
            self._receive()
        finally:
            member.store.confirmed_soon = False
            if flusher is not None:
                flusher.stop()
            with member.gate.lock:
                if member.gate.epoch == self.epoch and not member.open_epoch:
                    member.gate.close()
            self._fall_back()

    def _open_gate(self) -> None:
        member = self._member
        with member.gate.lock:
            if member.state.data.promised_epoch != self.epoch:
                raise ProtocolError(f"epoch {self.epoch} is not the promised epoch; trying again")
            member.gate.open(self.epoch)

    @property
    def full(self) -> str | None:
        """Why nothing of what the master sends is appended; None while it is."""
        return self._receiver.full

    def report(self, now_ms: float | None = None, *, full: bool = False) -> None:
        """Report the log's end at the ack point, if it grew or a heartbeat is due.

        Each time while the disk is `full`: from the same offset again the master knows that this
        slave takes nothing.
        """
        store, gate = self._member.store, self._member.gate
        require_open(store)
        # The gate's lock keeps an epoch's start from being reported before its entry is taken over.
        with gate.lock:
            if gate.epoch != self.epoch:
                raise ProtocolError(f"epoch {self.epoch} is superseded; nothing is reported in it")
            offset = store.flushed_offset if self._flushed else store.max_offset
            offset = min(offset, self._checked)
        now = self._member.clock.monotonic_ms() if now_ms is None else now_ms
        with self._send_lock:
            reported = self._reported
            if reported is not None and offset <= reported:
                if now - self._reported_ms < self._heartbeat_ms and not full:
                    return
                offset = reported
            data = REPORT.pack(offset)
            if self._says_readers and store.readers_wait() is not self._said_readers:
                self._said_readers = not self._said_readers
                data = REPORT.pack(READERS_WAIT if self._said_readers else NO_READERS) + data
            self._sock.sendall(data)
            self._reported, self._reported_ms = offset, now

    def _receive(self) -> None:
        sock, clock = self._sock, self._member.clock
        wait_in_kernel(sock, receive_ms=RECEIVE_MS)
        silence_ms = self._member.config.ha.housekeeping_interval_ms
        buffer = memoryview(bytearray(BUFFER_BYTES))
        heard_ms = clock.monotonic_ms()
        with _Pipe() as pipe:
            while not self._closed:
                try:
                    size = 0
                    if self._decoder.body_left >= self._splice_bytes_min:
                        if not self._splice(pipe):
                            return
                    else:
                        size = sock.recv_into(self._room(buffer) if self._bulk else buffer)
                        if not size:
                            return
                except BlockingIOError:
                    if clock.monotonic_ms() - heard_ms > silence_ms:
                        raise ProtocolError(
                            f"the master was silent for {silence_ms / 1000:g} s; look at its "
                            "machine and at the network"
                        ) from None
                    self.report()
                    continue
                heard_ms = clock.monotonic_ms()
                self._receive_bytes(buffer[:size], heard_ms)

    def _room(self, buffer: memoryview) -> memoryview:
        """Return the part of the buffer for the bytes before the next long body."""
        return buffer[: self._decoder.body_left or HEADER_BYTES]

    def _receive_bytes(self, data: memoryview, now_ms: float | None = None) -> None:
        for event in self._decoder.feed(data):
            if isinstance(event, Data):
                self._receiver.append(event.offset, event.data, self._while_full)
                try:
                    self._crcs.check_piece(event.offset, event.data)
                except DamagedRecordError as damaged:
                    self._met_damage(damaged)
            elif isinstance(event, Confirmed):
                self._told = event
            else:
                self._bulk = event.size >= self._splice_bytes_min
                self._check_place(event.offset)
                self._crcs.begin(event.offset, event.size)
        store = self._member.store
        end = store.max_offset
        try:
            self._crcs.check_appended(end)
        except DamagedRecordError as damaged:
            self._met_damage(damaged)
        # `_checked` is set before `flushed_offset` is read, so that either this thread or
        # FlushReporter reports the offset.
        self._checked = end
        if not self._flushed or store.flushed_offset > (self._reported or 0):
            self.report(now_ms)
        self._follow_limits()
        if self._master_end is not None:
            self._note_clean()

    def _met_damage(self, damaged: DamagedRecordError) -> None:
        """End the link, so that the damaged record is not reported."""
        raise damaged

    def _check_place(self, offset: int) -> None:
        """Refuse a frame or heartbeat whose offset is not this log's end."""
        if offset != self._member.store.max_offset:
            raise ProtocolError(
                f"the master sends offset {offset}, but this log ends at "
                f"{self._member.store.max_offset}"
            )

    def _splice(self, pipe: "_Pipe") -> bool:
        """Splice a part of a body into the log; False when the master has closed the link."""
        got = pipe.fill(self._sock.fileno(), self._decoder.body_left)
        if got:
            self._receiver.append_spliced(self._decoder.offset, pipe.drain, got, self._while_full)
            self._decoder.skip(got)
        return got > 0

    def _follow_limits(self) -> None:
        """Set the limits that the master sent, but none beyond this log's end.

        What this node's own report has confirmed needs no word of the master. Only a reader that
        waits is worth a write of the limits for each report: else the master's word comes soon.
        """
        told, store = self._told, self._member.store
        end, known, shown = store.max_offset, store.confirmed_offset, store.readable_offset
        confirmed, readable = 0, shown
        if told is not None:
            confirmed, readable = min(told.confirmed_offset, end), min(told.readable_offset, end)
        reported, confirms_from = self._reported, self._confirms_from
        if confirms_from is not None and reported is not None and reported >= confirms_from:
            own = min(reported, end) if store.readers_wait() else known
            confirmed = max(confirmed, own)
            readable = max(readable, confirmed)
        if confirmed > known or readable != shown:
            store.set_limits(confirmed=max(confirmed, known), readable=readable, tell=False)
            store.tell_readers()

    def _fall_back(self) -> None:
        """Set the readable offset back to the confirmed one, because the link has ended."""
        store = self._member.store
        store.set_limits(readable=store.confirmed_offset)

    def _note_clean(self) -> None:
        """Clear `unclean`, durably, once this log has reached `master_end`."""
        member = self._member
        store = member.store
        master_end = self._master_end
        if master_end is None:
            return
        if not member.state.data.unclean:
            self._master_end = None  # a clean node stays clean while the link lasts
            return
        with member.gate.entered(self.epoch) as mine:
            end = store.flushed_offset if self._flushed else store.max_offset
            if not mine or end < master_end:
                return
            member.state.save(unclean=False)
        log.warning("this node is clean again: it has the log up to %d", end)

    def _while_full(self) -> None:
        """While the disk is full: wait a little, and report, so that the master knows of it."""
        if self._closed:
            raise ProtocolError("the link was closed while the disk was full; make room")
        threading.Event().wait(FULL_PAUSE_S)
        self.report(full=True)


class _FlushReporter(Service):
    """Sync and report the received bytes, as often as the disk allows."""

    def __init__(self, stream: SlaveStream) -> None:
        super().__init__("FlushReporter", on_failure=stream._member.on_failure)
        self._stream = stream

    def run(self) -> None:
        """Sync and report until stopped; a failed sync or send ends the link."""
        stream = self._stream
        store = stream._member.store
        try:
            # `reported` does not start at `flushed_offset`: the periodic flush sends no reports.
            reported = 0
            while not self.stopping.is_set():
                if store.wait_beyond(reported, 0.2) > reported:
                    reported = store.flush()
                    stream.report()
                    stream._note_clean()
        except (HastoreError, OSError) as error:
            log.error("no more reports on this link: %s", error)
            stream.close()


class _Pipe:
    """A kernel pipe for splice; empty between two moves."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC)

    def __enter__(self) -> "_Pipe":
        try:
            fcntl.fcntl(self._write, _F_SETPIPE_SZ, PIPE_BYTES)
        except OSError as error:
            log.debug("the pipe stays at its default size: %s", error)
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self._read)
        os.close(self._write)

    def fill(self, source: int, size: int) -> int:
        """Move up to `size` bytes from a socket into the pipe, and return how many.

        Returns 0 at the end of the stream; raises BlockingIOError when no data comes in time.
        """
        return os.splice(source, self._write, min(size, PIPE_BYTES))

    def drain(self, target: int, position: int, size: int) -> int:
        """Move `size` bytes from the pipe into a file; return `size`."""
        left = size
        while left:
            done = os.splice(self._read, target, left, offset_dst=position)
            if not done:
                raise OSError(f"splice wrote nothing into the log's file at {position}")
            position += done
            left -= done
        return size
