"""ClassicHAClient: follows the RocketMQ master that `ha.classic_master` names, by the classic
protocol (docs/ha-link.md).

The protocol has no handshake, identity or epoch: the received bytes are epoch 0 of this log's
history. An empty log starts at the offset of the master's first frame, also if an earlier link has
brought heartbeats only: a RocketMQ master sends whoever reports 0 its last file. If the log is not
empty, its end is compared with the master's bytes first (`compare_end`). From there on each frame
and heartbeat must continue it exactly.

The comparison is there because a broker that was cut off from power has lost what it had not
flushed, which its slave may have, and writes other messages there. So a link begins with bytes that
this log has already: the slave reports a place before its end, and compares what comes with its own
bytes up to its end. Each record that RocketMQ writes has its time and its place in its queue, so
other records differ. Nothing is cut: what only this log has may be acknowledged, and what the
master has instead too.

RocketMQ can write an unreadable record: its topic has at most 127 characters, but more than 127
bytes. At its next start RocketMQ cuts this record and all that follows. This slave does not keep
the record either: it archives the record and all that follows in `rescued/`, and ends its log
before the record. It follows again when the master has something else at that offset.
"""

import logging
import socket

from hastore.clock import Clock
from hastore.errors import CorruptRecordError, GroupDisagrees, HastoreError, ProtocolError
from hastore.ha.hello.peer import (
    Deadline,
    break_link,
    connect,
    receive_exactly,
    split_address,
    warn_of_tampering,
)
from hastore.ha.node.member import Member
from hastore.ha.node.replica_log import ReplicaLog
from hastore.ha.replica.rewind import cut_back
from hastore.ha.rules.epochs import CLASSIC_EPOCH, EpochEntry
from hastore.ha.slave.crc_check import CrcCheck, DamagedRecordError
from hastore.ha.slave.ha_client import Follower
from hastore.ha.slave.slave_stream import SlaveStream
from hastore.protocol.ha_link import BODY_BYTES_MAX, HEADER, HEADER_BYTES, REPORT
from hastore.security.tls_socket import LinkSocket

log = logging.getLogger(__name__)

RECONNECT_S = 5.0
CONNECT_S = 5.0
STUCK_MS = 1_000.0  # after so long without progress of replay, the record there is checked
HEAD_BYTES = 64  # of a record: its offset, time and CRC are in them and identify it
_UNREADABLE = (
    "its record at %d is unreadable: at its next start RocketMQ cuts this record and all that "
    "follows. This node keeps all earlier records; the received part of the rest is in rescued/. "
    "Stop the producers of such a topic (up to 127 characters, but more than 127 bytes), let the "
    "broker's consumers read to the end, then promote this node; or restart the broker, and this "
    "node continues by itself"
)
COMPARED_BYTES = 64 * 1024
REACH_BYTES = 8 * 1024 * 1024  # at most, for the sake of zeros or a long record's part at the end
_REMEDY = (
    "Nothing was cut: messages that only one of both has may be acknowledged. Decide which log is "
    "right: to go on with the master, stop this node, move its store away, and start it with a new "
    "copy of the master's log; to go on with this log, promote this node"
)


class ClassicHAClient(Follower):
    """Follow a RocketMQ master; connect again every 5 s, as RocketMQ's own slaves do."""

    def __init__(self, member: Member, address: str) -> None:
        super().__init__(member, f"connecting to the RocketMQ master {address}")
        self._address = address
        self._unreadable = b""  # the first bytes of the unreadable record that was cut off
        self._comparing: socket.socket | None = None  # a link that is no stream yet

    def run(self) -> None:
        """Connect and stream until stopped."""
        while not self.stopping.is_set():
            try:
                self._finish_cut()
                self._cut_unreadable_tail()
                if not self._master_sends_same():
                    self._follow()
                    self._note_problem(f"the RocketMQ master {self._address} closed the link")
            except GroupDisagrees as error:
                self._note_problem(f"RocketMQ master {self._address}: {error}", logging.ERROR)
                self.notice = self.problem
            except (HastoreError, OSError) as error:
                self._note_problem(f"RocketMQ master {self._address}: {error}")
            if self._retry_now.wait(RECONNECT_S):
                self._retry_now.clear()

    def _follow(self) -> None:
        with connect(split_address(self._address), CONNECT_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rest = self._compare_end(sock)
            stream = ClassicStream(self._member, sock, rest)
            warn_of_tampering(self._address, "the RocketMQ master", "its protocol knows no secret")
            try:
                self._run_stream(stream, None, f"following the RocketMQ master {self._address}")
            except CorruptRecordError:
                self._cut_unreadable(stream.replayed)
                raise

    def _compare_end(self, sock: socket.socket) -> bytes:
        """Compare this log's end with the master's bytes; return what the stream begins with."""
        member = self._member
        rest = b""
        if member.store.max_offset > member.store.min_offset:
            with self._lock:
                self._comparing = sock
            try:
                if self.stopping.is_set():  # stop() may have come before the link was set
                    return rest
                silence_ms = member.config.ha.housekeeping_interval_ms
                rest = compare_end(sock, member.store, member.clock, silence_ms)
            finally:
                with self._lock:
                    self._comparing = None
        self.notice = None
        return rest

    def drop_link(self) -> None:
        """Close the link, also one that is no stream yet, and connect again at once."""
        with self._lock:
            if self._comparing is not None:
                break_link(self._comparing, "the RocketMQ master")
        super().drop_link()

    def _cut_unreadable_tail(self) -> None:
        """Cut off an unreadable record that this node had received but not cut when it stopped.

        This node does so before it connects, because the master may have cut its own log there
        meanwhile. Raises CorruptRecordError after a cut.
        """
        store = self._member.store
        end = store.whole_offset
        if store.dispatched_offset >= end or store.wait_dispatched(end, STUCK_MS / 1000.0):
            return
        offset = store.dispatched_offset
        if store.record_size(offset) and not store.record_size(offset, check=True):
            self._cut_unreadable(offset)
            raise CorruptRecordError(_UNREADABLE % offset)

    def _cut_unreadable(self, offset: int) -> None:
        """Cut the log before an unreadable record, and archive the cut bytes."""
        member = self._member
        store, state = member.store, member.state
        with member.gate.lock:
            if state.last_epoch != CLASSIC_EPOCH or member.open_epoch:
                return  # promoted meanwhile
            with store.view(offset, HEAD_BYTES) as view:
                self._unreadable = bytes(view)
            cut_back(
                store, state, offset, len(state.history), accept_loss=False,
                why="an unreadable record of RocketMQ",
            )  # fmt: skip

    def _master_sends_same(self) -> bool:
        """Whether the master still sends the unreadable record that was cut off."""
        if not self._unreadable:
            return False
        deadline = Deadline(self._member.clock, CONNECT_S * 1000.0)
        with connect(split_address(self._address), CONNECT_S) as sock:
            sock.sendall(REPORT.pack(self._member.store.max_offset))
            offset, size = HEADER.unpack(receive_exactly(sock, HEADER_BYTES, deadline))
            if offset != self._member.store.max_offset or not size:
                return False  # a heartbeat: the master's log ends there now
            head = receive_exactly(sock, min(size, len(self._unreadable)), deadline)
        if head == self._unreadable[: len(head)]:
            return True
        self._unreadable = b""
        return False


class ClassicStream(SlaveStream):
    """The link to a RocketMQ master; `rest`: the header of the frame that it is in."""

    def __init__(self, member: Member, sock: socket.socket, rest: bytes) -> None:
        super().__init__(
            member,
            sock,
            epoch=CLASSIC_EPOCH,
            history=member.state.history,
            master_end=None,
            control_frames=False,
        )
        self.replayed, self._moved_ms = -1, 0.0
        self._rest = rest

    def _receive(self) -> None:
        if self._rest:
            self._receive_bytes(memoryview(self._rest))
        super()._receive()

    def _open_gate(self) -> None:
        member = self._member
        with member.gate.lock:
            if member.state.last_epoch != CLASSIC_EPOCH or member.open_epoch:
                raise ProtocolError(
                    "this log has bytes of an epoch of this node's own group, so it cannot follow "
                    "a RocketMQ master any more; use an empty store"
                )
            if member.state.data.promised_epoch > CLASSIC_EPOCH:
                raise ProtocolError(
                    f"this node has promised epoch {member.state.data.promised_epoch} of its own "
                    "group, so it follows no RocketMQ master; remove ha.classic_master"
                )
            if not member.state.history and member.store.max_offset > member.store.min_offset:
                self._begin_history(member.store.min_offset)  # RocketMQ wrote this store
            member.gate.open(CLASSIC_EPOCH)

    def _check_place(self, offset: int) -> None:
        store = self._member.store
        empty, began = store.max_offset == store.min_offset, bool(self._member.state.history)
        if empty and (not began or offset != store.max_offset == 0):
            with self._member.gate.lock:
                if offset != store.max_offset:
                    store.begin_at(offset)
                self._begin_history(offset)
        super()._check_place(offset)

    def _met_damage(self, damaged: DamagedRecordError) -> None:
        """Warn of a damaged record and keep it, as RocketMQ's own slaves do."""
        log.warning(
            "the record at %d of the RocketMQ master has a wrong CRC; it was kept, as RocketMQ's "
            "own slaves keep it; `hastore log verify` tells more",
            damaged.offset,
        )
        self._crcs = CrcCheck(self._member.store)

    def _fall_back(self) -> None:
        """Keep the readable offset, because it does not depend on the link."""

    def _begin_history(self, start: int) -> None:
        config = self._member.config
        entry = EpochEntry(CLASSIC_EPOCH, start, config.effective_acks, self._member.nodes)
        self._member.state.take_entries([entry], ())

    def _follow_limits(self) -> None:
        """Let readers see all whole records: a RocketMQ master sends no confirmed offset."""
        store = self._member.store
        self._check_replay()
        if store.readable_offset != store.whole_offset:
            store.set_limits(readable=store.whole_offset)

    def _check_replay(self) -> None:
        """Raise CorruptRecordError when replay is stuck because the record there is unreadable."""
        store, now_ms = self._member.store, self._member.clock.monotonic_ms()
        replayed = store.dispatched_offset
        if replayed != self.replayed or replayed >= store.whole_offset:
            self.replayed, self._moved_ms = replayed, now_ms
        elif now_ms - self._moved_ms >= STUCK_MS:
            self._moved_ms = now_ms
            if store.record_size(replayed) and not store.record_size(replayed, check=True):
                raise CorruptRecordError(_UNREADABLE % replayed)


def compared_from(store: ReplicaLog) -> int:
    """Return where the comparison begins in a log that is not empty; never 0.

    A first report of 0 would mean the master's last file. The bytes are those of one file, and
    have the begin of a record of which the log has only a part. Zeros at the end do not count:
    they may be the filler behind a file's last record.
    """
    end = store.max_offset
    first = max(store.min_offset, end - REACH_BYTES, (end - 1) // store.file_size * store.file_size)
    at = end
    while at > first:
        begin = max(first, at - COMPARED_BYTES)
        with store.view(begin, at - begin) as view:
            filled = len(bytes(view).rstrip(b"\0"))
        at = begin + filled
        if filled:
            break
    return max(1, first, min(at - COMPARED_BYTES, store.whole_offset))


def compare_end(sock: LinkSocket, store: ReplicaLog, clock: Clock, silence_ms: float) -> bytes:
    """Compare the end of a log that is not empty with the master's bytes, on a new link.

    Return the header of what is left of the last frame: its body follows on the link, and continues
    this log. Raises GroupDisagrees, ProtocolError, OSError.
    """
    at, end, left, beats = compared_from(store), store.max_offset, 0, 0
    sock.sendall(REPORT.pack(at))
    while at < end:
        deadline = Deadline(clock, silence_ms)
        offset, size = HEADER.unpack(receive_exactly(sock, HEADER_BYTES, deadline))
        if offset != at or not 0 <= size <= BODY_BYTES_MAX:
            raise ProtocolError(
                f"the master sends {size} bytes at offset {offset}, but was asked for {at}"
            )
        # It has no more if there is a second heartbeat: one may come before the data, on a machine
        # that was busy for 5 s.
        beats = 0 if size else beats + 1
        if beats > 1:
            raise GroupDisagrees(_problem_of_end(at, end))
        left = size - min(size, end - at)
        body = receive_exactly(sock, size - left, deadline)
        while body:
            body = _compare(store, at, end, body)
            at = offset + size - left - len(body)
    return HEADER.pack(end, left) if left else b""


def _compare(store: ReplicaLog, at: int, end: int, body: bytes) -> bytes:
    """Compare bytes of the master with the log's at `at`; return those that are not compared."""
    with store.view(at, len(body)) as view:
        own = bytes(view)
    if not own:
        raise ProtocolError(f"this log has no byte at {at} any more; it is asked for again")
    if own != body[: len(own)]:
        same = next(i for i, (mine, its) in enumerate(zip(own, body, strict=False)) if mine != its)
        raise GroupDisagrees(_problem_of_bytes(at + same, end))
    return body[len(own) :]


def _problem_of_bytes(at: int, end: int) -> str:
    return (
        f"its bytes at {at} are not those of this log, which ends at {end}: the master has lost "
        f"its end, as after a power loss, or it is another one. {_REMEDY}"
    )


def _problem_of_end(at: int, end: int) -> str:
    return (
        f"it sends nothing from {at} on, but this log ends at {end}: the master has lost its end, "
        "as after a power loss, or its retention has removed these bytes, or it is another one. "
        f"{_REMEDY}"
    )
