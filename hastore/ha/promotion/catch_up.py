"""A promotion's catch-up: copy the missing part of the log from a more advanced node.

It is step 4 of docs/failover.md, "Promotion". The thread that promotes calls it.
"""

import logging
from collections.abc import Callable

from hastore.errors import HastoreError, PromotionRefused, ProtocolError
from hastore.ha.hello.peer import Call, call
from hastore.ha.hello.survey import check_peer
from hastore.ha.node.member import Member
from hastore.ha.replica.digests import digest_fields
from hastore.ha.replica.receiver import Receiver
from hastore.ha.replica.rewind import cut_back, entries_at
from hastore.ha.rules.epochs import (
    History,
    common_point,
    forgotten_end,
    last_epoch,
    nothing_to_compare,
)
from hastore.protocol.ha_link import Data, FrameStart, StreamDecoder
from hastore.protocol.hello import CopyFrom, Hello, Purpose, Refused
from hastore.security.tls_socket import LinkSocket

log = logging.getLogger(__name__)

BUFFER_BYTES = 1024 * 1024


def catch_up(
    member: Member,
    epoch: int,
    node: int,
    address: str,
    history: History,
    end: int,
    *,
    source_min: int,
    accept_loss: bool,
    on_progress: Callable[[int, int], None],
) -> None:
    """Make this log equal to the log of `node`, as that node described it with its promise.

    The log is cut to the common point, then bytes and entries are copied up to `end`. `source_min`
    is the source's first byte. `on_progress(done, due)` is called with numbers of bytes.

    Raises PromotionRefused when the source has changed since it answered. The refusal is `final`
    when the source lacks bytes that this log needs, when the logs share no known history, or when
    bytes that no epoch vouches for differ. Raises GroupDisagrees when a confirmed record would be
    cut and `accept_loss` is False.
    """
    store, state = member.store, member.state
    _compare(member, node, address, history, source_min, end)
    with member.gate.lock:
        if state.data.promised_epoch != epoch:
            raise PromotionRefused(f"epoch {state.data.promised_epoch} was promised meanwhile")
        common, kept = common_point(state.history, store.max_offset, history, end)
        foreign = not state.history and store.max_offset > 0
        if not kept and forgotten_end(state.history, store.max_offset, history, end):
            raise PromotionRefused(
                f"node {node} is ahead, and the two logs diverged more epochs ago than a history "
                f"holds; promote node {node}; this node then copies its log",
                final=True,
            )
        # A common point of 0 alone is no reason to refuse: all of this log is then cut as a tail.
        if common < store.min_offset or foreign:
            raise PromotionRefused(
                f"node {node} is ahead and shares no history with this node's log; promote "
                f"node {node}",
                final=True,
            )
        blind = nothing_to_compare(
            state.history, store.min_offset, store.max_offset, history, source_min, end
        )
        if blind or common < min(source_min, end):
            raise PromotionRefused(
                f"node {node} is ahead and its log begins at {source_min}, beyond this node's "
                f"common point {common}; promote node {node}",
                final=True,
            )
        if common < store.max_offset:
            entries = entries_at(state.history, common, kept)
            cut_back(
                store, state, common, entries, accept_loss=accept_loss, why=f"node {node} is ahead"
            )
        member.gate.open(epoch)
    log.info("catching up from node %d: bytes %d to %d", node, store.max_offset, end)
    try:
        receiver = Receiver(member, epoch, history)
        receiver.begin()
        if store.max_offset < end:
            _copy(member, receiver, node, address, history, source_min, end, on_progress)
    finally:
        member.gate.close()
    if store.max_offset != end or last_epoch(state.history) != last_epoch(history):
        raise PromotionRefused(f"the copy from node {node} ended early; trying again")


def _compare(
    member: Member, node: int, address: str, history: History, source_min: int, end: int
) -> None:
    """Compare the bytes that no epoch vouches for, before anything is cut or copied.

    This asks for a COPY of zero bytes and sends the digest with it. Raises PromotionRefused when
    the source refuses: final when the bytes differ, not final when retention has changed the range
    of either log meanwhile.
    """
    digest = digest_fields(member, history, source_min, end)
    if digest:
        at = digest["digest_to"]
        hello = member.hello(Purpose.COPY, copy_from=at, copy_to=at, **digest)
        _ask(member, hello, node, address, final_from=source_min).close()


def _ask(
    member: Member, hello: Hello, node: int, address: str, *, final_from: int | None = None
) -> Call:
    """Ask for a copy. Raises PromotionRefused when the source refuses.

    The refusal is final when the digest was sent and the source's log still begins at `final_from`.
    """
    timeout_ms = member.config.ha.hello_timeout_ms
    opened = call(address, hello, member.secret, member.clock, timeout_ms, member.tls)
    try:
        check_peer(member, opened.hello, node, address)
        if isinstance(opened.answer, Refused):
            reason = f"node {node} refuses the copy: {opened.answer.reason}"
            final = bool(hello.digest) and opened.hello.min_offset == final_from
            raise PromotionRefused(reason, final=final)
        if not isinstance(opened.answer, CopyFrom):
            raise ProtocolError(f"node {node} answered a COPY with {opened.answer!r}")
    except HastoreError:
        opened.close()
        raise
    return opened


def _copy(
    member: Member,
    receiver: Receiver,
    node: int,
    address: str,
    history: History,
    source_min: int,
    end: int,
    on_progress: Callable[[int, int], None],
) -> None:
    hello = member.hello(
        Purpose.COPY,
        copy_from=member.store.max_offset,
        copy_to=end,
        expect_epoch=last_epoch(history),
        expect_end=end,
        **digest_fields(member, history, source_min, end),
    )
    opened = _ask(member, hello, node, address)
    try:
        opened.sock.settimeout(member.config.ha.housekeeping_interval_ms / 1000)
        _receive(member, receiver, opened, end, on_progress)
    finally:
        opened.close()


def _receive(
    member: Member,
    receiver: Receiver,
    opened: Call,
    end: int,
    on_progress: Callable[[int, int], None],
) -> None:
    decoder = StreamDecoder(control_frames=False)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    start = member.store.max_offset
    while member.store.max_offset < end:
        size = _receive_some(opened.sock, buffer)
        if not size:
            return
        for event in decoder.feed(buffer[:size]):
            if isinstance(event, FrameStart) and event.offset != member.store.max_offset:
                raise ProtocolError(
                    f"the copy continues at {event.offset}, the log at {member.store.max_offset}"
                )
            if isinstance(event, Data):
                if event.offset + len(event.data) > end:
                    raise ProtocolError("the copy goes beyond the answered end")
                receiver.append(event.offset, event.data, _refuse_full)
        on_progress(member.store.max_offset - start, end - start)


def _receive_some(sock: LinkSocket, buffer: memoryview) -> int:
    try:
        return sock.recv_into(buffer)
    except TimeoutError as error:
        raise ProtocolError("the copy's source has stopped sending") from error


def _refuse_full() -> None:
    raise PromotionRefused("the disk became full during the catch-up; make room")
