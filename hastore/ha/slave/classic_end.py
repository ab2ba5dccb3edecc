"""Does the RocketMQ master still have the end of this log? The classic protocol does not say.

A broker that was cut off from power has lost what it had not flushed, which its slave may have, and
writes other messages there. So a link begins with bytes that this log has already: the slave
reports a place before its end, and compares what comes with its own bytes up to its end. Each
record that RocketMQ writes has its time and its place in its queue, so other records differ.

Nothing is cut: what only this log has may be acknowledged, and what the master has instead too.
"""

from hastore.clock import Clock
from hastore.errors import GroupDisagrees, ProtocolError
from hastore.ha.hello.peer import Deadline, receive_exactly
from hastore.ha.node.replica_log import ReplicaLog
from hastore.protocol.ha_link import BODY_BYTES_MAX, HEADER, HEADER_BYTES, REPORT
from hastore.security.tls_socket import LinkSocket

COMPARED_BYTES = 64 * 1024
REACH_BYTES = 8 * 1024 * 1024  # at most, for the sake of zeros or a long record's part at the end
_REMEDY = (
    "Nothing was cut: messages that only one of both has may be acknowledged. Decide which log is "
    "right: to go on with the master, stop this node, move its store away, and start it with a new "
    "copy of the master's log; to go on with this log, promote this node"
)


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
