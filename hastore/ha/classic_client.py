"""Follow a RocketMQ master by the classic protocol (FORMATS.md, section 3): `ha.classic_master`.

No handshake, identity or epoch: what comes from there is epoch 0 of this log's history. An empty
log starts where the master's first frame says; any other must be continued exactly, heartbeats
included.
"""

import logging
import socket

from hastore.errors import HastoreError, ProtocolError
from hastore.ha.epochs import CLASSIC_EPOCH, EpochEntry
from hastore.ha.follower import Follower
from hastore.ha.member import Member
from hastore.ha.peer import split_address
from hastore.ha.slave_stream import SlaveStream

log = logging.getLogger(__name__)

RECONNECT_S = 5.0


class ClassicHAClient(Follower):
    """Keep the log equal to a RocketMQ master's; reconnects every 5 s, as RocketMQ's own slaves
    do.
    """

    def __init__(self, member: Member, address: str) -> None:
        super().__init__(member, f"connecting to the RocketMQ master {address}")
        self._address = address

    def run(self) -> None:
        """Connect and stream until stopped."""
        while not self.stopping.is_set():
            try:
                self._follow()
                self._complain(f"the RocketMQ master {self._address} closed the link")
            except (HastoreError, OSError) as error:
                self._complain(f"RocketMQ master {self._address}: {error}")
            if self._hurry.wait(RECONNECT_S):
                self._hurry.clear()

    def _follow(self) -> None:
        with socket.create_connection(split_address(self._address), timeout=5.0) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = ClassicStream(self._member, sock)
            self._run_stream(stream, None, f"following the RocketMQ master {self._address}")


class ClassicStream(SlaveStream):
    """The link to a RocketMQ master."""

    def __init__(self, member: Member, sock: socket.socket) -> None:
        super().__init__(
            member,
            sock,
            epoch=CLASSIC_EPOCH,
            history=member.state.history,
            master_end=None,
            control_frames=False,
        )

    def _open_gate(self) -> None:
        member = self._member
        with member.gate.lock:
            if member.state.last_epoch != CLASSIC_EPOCH or member.open_epoch:
                raise ProtocolError(
                    "this log was written in an epoch of its own group and cannot follow "
                    "RocketMQ any more; "
                    "use an empty store"
                )
            if member.state.data.promised_epoch > CLASSIC_EPOCH:
                raise ProtocolError(
                    f"epoch {member.state.data.promised_epoch} of this node's own group is "
                    "promised, no lower master is followed; drop ha.classic_master"
                )
            if not member.state.history and member.store.max_offset > member.store.min_offset:
                self._begin_history(member.store.min_offset)  # a RocketMQ wrote this store
            member.gate.open(CLASSIC_EPOCH)

    def _check_place(self, offset: int) -> None:
        store = self._member.store
        empty = store.max_offset == store.min_offset
        if empty and not self._member.state.history:
            with self._member.gate.lock:
                if offset != store.max_offset:
                    store.begin_at(offset)
                self._begin_history(offset)
        super()._check_place(offset)

    def _fall_back(self) -> None:
        """Keep the readers' limit: it never rested on the link."""

    def _begin_history(self, start: int) -> None:
        config = self._member.config
        entry = EpochEntry(CLASSIC_EPOCH, start, config.effective_acks, self._member.nodes)
        self._member.state.take_entries([entry])

    def _follow_limits(self) -> None:
        """Let readers see all whole records: a RocketMQ master says nothing of what is
        confirmed.
        """
        store = self._member.store
        if store.readable_offset != store.whole_offset:
            store.set_limits(readable=store.whole_offset)
