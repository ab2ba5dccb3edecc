"""A group of nodes in one thread: the product's own replication over a log in memory.

All decisions are made by the real code: NodeState, Member, HAService with its AckTable and
GroupTransferService, HAClient, SlaveStream and Receiver, Promoter, catch-up, rewind. The
environment is simulated: the disk (a log of tiny records, a file that is replaced), the network
(lost calls, frames and reports in flight), time, crashes (at each durable effect), power losses,
and, in walks with `replay`, a replay that stops or is slow.
A walk is a number of random steps from one seed. `World.check` checks every state against the
promises of docs/failover.md.

A record is one value of 1 to 255, repeated 1 to 3 times, so a stream may stop inside a record.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hastore.config.model import AckPoint, Config, HAConfig, NodeAddress, Role, StoreConfig
from hastore.errors import (
    GroupDisagrees,
    HastoreError,
    PromotionRefused,
    ProtocolError,
    UsageError,
)
from hastore.ha import promoter
from hastore.ha.hello import answering
from hastore.ha.hello.peer import Call, SurveyReply, check_peer
from hastore.ha.master.group_transfer import GroupTransferService, Need, Outcome
from hastore.ha.master.ha_service import HAService, ReadSocketService
from hastore.ha.node.member import Member
from hastore.ha.node.node_state import BOOT_ID_PATH, NodeState
from hastore.ha.promoter import CatchUp, Flags, Promoter, surveyed_answers
from hastore.ha.replica import rewind
from hastore.ha.replica.digests import digest_fields
from hastore.ha.rules import epochs
from hastore.ha.rules.acks import Intake
from hastore.ha.rules.epochs import (
    CLASSIC_EPOCH,
    FLOOR_EPOCH,
    EpochEntry,
    epoch_at,
    epoch_node,
    last_epoch,
)
from hastore.ha.rules.promotion import has_more, may_resume
from hastore.ha.slave import ha_client
from hastore.ha.slave.slave_stream import SlaveStream
from hastore.protocol.ha_link import Data as DataEvent
from hastore.protocol.ha_link import ReportDecoder, StreamDecoder, confirmed_frame, data_header
from hastore.protocol.hello import Hello, Purpose, Refused, StreamFrom
from hastore.service import raise_failure
from tests.ha.sim_history import SimHistory

FILE_SIZE = 1 << 30
VALUES_MAX = 255
NESTED_MAX = 2
PLAIN = Flags()


class Violation(AssertionError):
    """A state that must never be reached."""


class Crash(BaseException):
    """A node's process dies here. Not an Exception: the node's own code must not catch it."""

    def __init__(self, node: int) -> None:
        super().__init__(f"node {node} dies")
        self.node = node


def size_of(value: int) -> int:
    return 1 + value % 3


class MemoryFiles:
    """The node's state file and its boot id; a replaced file is durable."""

    def __init__(self, effect: Callable[[], None]) -> None:
        self.files: dict[str, bytes] = {}
        self.boot = self.mount = 1
        self._effect = effect

    def exists(self, path: str) -> bool:
        return path in self.files

    def make_dirs(self, path: str) -> None:
        del path

    def read_bytes(self, path: str, max_bytes: int = 1 << 26) -> bytes:
        return b"boot-%d\n" % self.boot if path == BOOT_ID_PATH else self.files[path][:max_bytes]

    def mount_id(self, path: str) -> str:
        del path
        return f"mount {self.mount}"

    def replace_bytes(self, path: str, data: bytes) -> None:
        self._effect()
        self.files[path] = data
        self._effect()


class MemoryLog:
    """A ReplicaLog of tiny records. `data` survives a kill; the bytes below `flushed_offset` also
    survive a power loss.
    """

    def __init__(self, effect: Callable[[], None], rng: random.Random) -> None:
        self.file_size = FILE_SIZE
        self.data = bytearray()
        self.min_offset = 0
        self.flushed_offset = 0
        self.confirmed_offset = 0
        self.readable_offset = 0
        self.on_flushed: Callable[[int], None] | None = None
        self.on_confirmed: Callable[[int], None] = lambda _offset: None
        self.on_readers: Callable[[], bool] = lambda: False
        self.replay_problem: str | None = None
        self.on_replay_wait: Callable[[], bool] = lambda: True
        self._effect = effect
        self._rng = rng

    @property
    def max_offset(self) -> int:
        return len(self.data)

    @property
    def dispatched_offset(self) -> int:
        return -1  # these bytes are no records: a slave must not look for record headers

    @property
    def whole_offset(self) -> int:
        end = len(self.data)
        if end == self.min_offset:
            return end
        value, start = self.data[-1], end
        while start > self.min_offset and self.data[start - 1] == value:
            start -= 1
        return end if end - start == size_of(value) else start

    def records(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, value) of each whole record."""
        at, whole = self.min_offset, self.whole_offset
        while at < whole:
            yield at, self.data[at]
            at += size_of(self.data[at])

    def record_size(self, offset: int, *, check: bool = False) -> int | None:
        del check
        if not self.min_offset <= offset < len(self.data):
            return None
        value = self.data[offset]
        if offset > self.min_offset and self.data[offset - 1] == value:
            return None
        return size_of(value) if offset + size_of(value) <= self.whole_offset else None

    def cut_point(self, offset: int) -> int:
        return offset

    def after_blank(self, offset: int) -> int:
        return offset

    def set_limits(
        self, *, confirmed: int | None = None, readable: int | None = None, tell: bool = True
    ) -> None:
        del tell
        if confirmed is not None:
            self.confirmed_offset = confirmed
            self.on_confirmed(confirmed)
        if readable is not None:
            self.readable_offset = readable

    def readers_wait(self) -> bool:
        return self.on_readers()

    def tell_readers(self) -> None:
        return

    @contextlib.contextmanager
    def view(self, offset: int, max_bytes: int) -> Iterator[memoryview]:
        if not self.min_offset <= offset <= len(self.data):
            raise UsageError(f"{offset} is outside the log")
        yield memoryview(bytes(self.data[offset : offset + max_bytes]))

    def append_replica(self, offset: int, data: bytes | memoryview) -> int:
        if offset != len(self.data):
            raise UsageError(f"{offset} is not the end")
        self._effect()
        self.data += data
        self._effect()
        return len(self.data)

    def flush(self) -> int:
        self._effect()
        self.flushed_offset = len(self.data)
        self._effect()
        if self.on_flushed is not None:
            self.on_flushed(self.flushed_offset)
        return self.flushed_offset

    def archive(self, offset: int, name: str) -> int:
        del name
        self._effect()
        return len(self.data) - offset

    def truncate(self, offset: int, *, exact: bool = False) -> None:
        del exact
        if not self.min_offset <= offset <= len(self.data):
            raise UsageError(f"no cut at {offset}")
        self._effect()
        self._cut(self._rng.randint(offset, len(self.data)))  # a crash in the middle
        self._effect()
        self._cut(min(offset, len(self.data)))
        if offset != self.whole_offset:
            self._cut(self.whole_offset)
        self._effect()

    def _cut(self, end: int) -> None:
        del self.data[end:]
        self.flushed_offset = min(self.flushed_offset, end)
        self.confirmed_offset = min(self.confirmed_offset, end)
        self.readable_offset = min(self.readable_offset, end)

    def set_aside(self, name: str, shared: int | None = None) -> str:
        del shared
        self._effect()
        self.min_offset = 0
        self._cut(0)
        self._effect()
        return name

    def begin_at(self, offset: int) -> None:
        assert len(self.data) == self.min_offset
        self._effect()
        self.data = bytearray(offset)
        self.min_offset = self.flushed_offset = offset
        self.confirmed_offset = self.readable_offset = 0
        self._effect()

    spare_bytes = 0
    no_room = broken_reason = None

    def free_bytes(self) -> int:
        return 1 << 40

    def wait_dispatched(self, offset: int, timeout_s: float) -> bool:
        del timeout_s
        return not offset or self.on_replay_wait()

    def lose_power(self) -> None:
        """Lose any part of the unsynced bytes, and perhaps the confirmed offset."""
        self._cut(self._rng.randint(self.flushed_offset, len(self.data)))
        self.confirmed_offset = self._rng.choice((0, self.confirmed_offset))

    def recover(self) -> None:
        self._cut(self.whole_offset)
        self.flushed_offset = len(self.data)


class Clock:
    def __init__(self) -> None:
        self.now_ms = 0.0

    def monotonic_ms(self) -> float:
        self.now_ms += 1.0
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms)


class SimWriter:
    """How far a stream is; the steps of the World send."""

    def __init__(self, offset: int) -> None:
        self.sent_offset = offset
        self.reach_offset = offset
        self.at_once = False

    def push(self, start: int, end: int, data: bytearray | None = None) -> None:
        del start, end

    def note_limits(self, reported: int | None) -> None:
        del reported


class SimConnection:
    """The master's end of a connection, and what is in flight on it both ways."""

    def __init__(self, host: SimNode, hello: Hello, connection_id: int) -> None:
        assert host.ha is not None
        self.host = host
        self.owner = host.ha
        self.member = host.member
        self.life = host.life
        self.hello = hello
        self.node = hello.node
        self.connection_id = connection_id
        self.address = "127.0.0.1:1"
        self.proved = False  # the links here have no secret
        self.classic = False
        self.ack_offset: int | None = None
        self.intake = Intake()
        self.name = f"node {hello.node}"
        self.writer: SimWriter | None = None
        self.closed = False
        self.to_slave: deque[bytes] = deque()
        self.to_master: deque[bytes] = deque()
        self.thread_failed = raise_failure
        self.reader = ReadSocketService(self)  # type: ignore[arg-type]
        self.decoder = ReportDecoder()
        self.sock = self

    @property
    def streaming(self) -> bool:
        return self.writer is not None and not self.closed

    def follow(self, hello: Hello) -> Any:
        return self.owner.follow(self, hello)  # type: ignore[arg-type]

    def open_stream(self, offset: int, *, frame_bytes_max: int, classic: bool) -> SimWriter:
        del frame_bytes_max, classic
        self.writer = SimWriter(offset)
        return self.writer

    def next_frame(self, size: int, *, limits: bool) -> bytes:
        """Return what WriteSocketService sends next, at most `size` bytes, of one epoch."""
        writer, store = self.writer, self.host.store
        assert writer is not None
        offset = writer.sent_offset
        size = min(size, store.max_offset - offset)
        for entry in self.host.state.history:
            if entry.start > offset:
                size = min(size, entry.start - offset)
        if size < 0:
            raise Violation("a master's log is shorter than what it sent")
        frame = data_header(offset, size) + bytes(store.data[offset : offset + size])
        if limits:
            frame = confirmed_frame(store.confirmed_offset, store.readable_offset) + frame
        writer.reach_offset = writer.sent_offset = offset + size
        return frame

    def take_report(self, data: bytes) -> None:
        """Let ReadSocketService take a report, which it must not refuse."""
        try:
            self.reader._count_reports(self.decoder.feed(data))
        except ProtocolError as error:
            self.close("it erred")
            raise Violation(f"a correct slave's report is refused: {error}") from error

    def close(self, reason: str) -> None:
        del reason
        if not self.closed:
            self.closed = True
            self.owner.forget(self)  # type: ignore[arg-type]


class SlaveSocket:
    """The slave's end; sent bytes are in flight to the master."""

    def __init__(self, connection: SimConnection) -> None:
        self.connection = connection

    def sendall(self, data: bytes) -> None:
        self.connection.to_master.append(bytes(data))

    def shutdown(self, how: int) -> None:
        del how

    def close(self) -> None:
        return


class SimStream(SlaveStream):
    """A slave's link whose loop is the steps of the World."""

    def run(self) -> None:
        # These bytes are no records: CrcCheck would wait for a record header for ever, and read
        # where retention has removed the bytes. With real records it lags by less than one.
        self._crcs.begin = lambda _offset, _size: None  # type: ignore[method-assign]
        self._open_gate()
        world_node: SimNode = self._member.sim_node  # type: ignore[attr-defined]
        world_node.stream = self
        self._receiver.begin()
        if self._flushed:
            self._member.store.flush()
        self.report()
        self._note_clean()

    def _follow_limits(self) -> None:
        own, begins = self._reported or 0, self._confirms_from
        if begins is not None and own >= begins:
            node: SimNode = self._member.sim_node  # type: ignore[attr-defined]
            node.world.count("own")
            node.world.note_confirmed(node, own, self.epoch)
        super()._follow_limits()

    @property
    def connection(self) -> SimConnection:
        return self._sock.connection  # type: ignore[attr-defined, no-any-return]

    @property
    def closed(self) -> bool:
        return self._closed

    def end(self) -> None:
        """Do what `SlaveStream.run` does after the link has ended."""
        self._closed = True
        member = self._member
        with member.gate.lock:
            if member.gate.epoch == self.epoch and not member.open_epoch:
                member.gate.close()
        self._fall_back()


class SimNode:
    """One node: the state that survives its process, and the product's objects while it runs."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.files = MemoryFiles(self._effect)
        self.store = MemoryLog(self._effect, world.rng)
        self.acks = world.acks
        self.life = 0
        self.up = False
        self.state: NodeState
        self.member: Member
        self.transfer: GroupTransferService
        self.ha: HAService | None = None
        self.client: ha_client.HAClient
        self.stream: SimStream | None = None
        self.promoting = False
        self.replay_waits: list[int] = []  # of one attempt: the promised epoch at each
        self.waited_blocked = False  # the last of them was in vain

    def _effect(self) -> None:
        world = self.world
        if self.up and world.crashes and world.rng.random() < world.crash_rate:
            raise Crash(self.number)

    @property
    def config(self) -> Config:
        world = self.world
        return Config(
            cluster="c",
            group="g",
            node=self.number,
            role=Role.SYNC_MASTER,
            acks=self.acks,
            nodes={n: NodeAddress(api="", ha=f"sim:{n}", http="") for n in world.numbers},
            store=StoreConfig(root="/n"),
            ha=HAConfig(ack_point=world.ack_point),
        )

    @property
    def open(self) -> bool:
        return self.up and bool(self.member.open_epoch)

    def start(self) -> None:
        world = self.world
        self.life += 1
        self.stream, self.promoting = None, False
        self.state = NodeState(self.files, "/n")  # type: ignore[arg-type]
        self.state.load(self.number, "c", "g")
        world.history.begun(self.state.last_epoch)  # also of an attempt that a crash has ended
        self.store.on_flushed = None
        self.store.on_confirmed = lambda _offset: None
        self.store.recover()
        rewind.finish_cut(self.store, self.state)  # type: ignore[arg-type]
        self.state.begin_boot(world.ack_point.value, alone=False, log_end=self.store.max_offset)
        self.store.set_limits(readable=min(self.store.confirmed_offset, self.store.max_offset))
        store: Any = self.store
        self.member = Member(
            self.config, store, self.state, world.clock, None, on_failure=raise_failure
        )
        self.member.sim_node = self  # type: ignore[attr-defined]
        self.transfer = GroupTransferService(world.clock, lambda: None, on_failure=raise_failure)
        self.ha = ha = HAService(self.member, self.transfer)
        self.member.on_superseded = lambda epoch, who: ha.close_epoch(f"{epoch} of {who}")
        self.member.on_lost_end = self._on_lost_end
        self.member.on_promise = self._on_promise
        self.client = ha_client.HAClient(self.member)
        self.promoter = Promoter(
            self.member, lambda entry: ha.open_epoch(entry, sync=True), lambda _text: None,
            lambda: None,
        )  # fmt: skip
        self.store.on_flushed = ha.on_flushed
        self.store.on_confirmed = self._on_confirmed
        self.store.on_replay_wait = self._wait_for_replay
        self.store.on_readers = lambda: world.replay_rng.random() < 0.5
        self.up = True

    def _on_promise(self) -> None:
        if self.stream is not None:
            self.stream._closed = True  # the loop ends in another step

    def _on_lost_end(self) -> None:
        self.world.count("lost end")
        if self.ha is not None:
            self.ha.close_epoch("a slave has more")

    def _on_confirmed(self, confirmed: int) -> None:
        if self.ha is not None and self.ha._table is not None and self.member.open_epoch:
            self.world.note_confirmed(self, confirmed, self.member.open_epoch)

    def ask_for_promises(self) -> None:
        """Do what RoleService does right before a promotion asks for promises."""
        if self.store.replay_problem is not None:
            raise Violation(f"9: node {self.number} fences the others; its replay is blocked")
        self.leave_office()
        self.end_stream()

    def leave_office(self) -> None:
        if self.member.step_down():
            assert self.ha is not None
            self.ha.close_epoch("a new promotion")

    def _wait_for_replay(self) -> bool:
        """Wait a little, while anything may happen; return whether replay is at the log's end."""
        world, waits, problem = self.world, self.replay_waits, self.store.replay_problem
        if problem is None and (not world.replay or world.replay_rng.random() < 0.3):
            return True
        waits.append(self.state.data.promised_epoch)
        if waits[-1] != waits[0]:
            raise Violation(f"9: node {self.number} waits on, but has promised a newer epoch")
        if len(waits) > 1 and problem is not None and self.waited_blocked:
            raise Violation(f"9: node {self.number} waits on, but its replay is blocked")
        self.waited_blocked = problem is not None
        world.count("replay")
        for _ in range(4):  # replay is slow
            world.nested(self)
        return False

    def die(self) -> None:
        self.up = False
        self.ha = None
        for node in self.world.nodes.values():
            if node.stream is not None and node.stream.connection.host is self:
                node.stream._closed = True
        self.stream = None
        self.store.on_flushed = None

    def resume(self) -> bool:
        """Go on as master in the last epoch, if that may be; return whether it does."""
        data, member = self.state.data, self.member
        epoch = may_resume(data.history, data.promised_epoch, self.number, data.epoch_over)
        if epoch is None:
            return False
        replies = self.world.ask_all(member, Purpose.SURVEY)
        for reply in replies:
            if reply.hello is not None and reply.hello.promised_epoch > epoch:
                member.state.promise(reply.hello.promised_epoch)
        end, unmet = self.store.max_offset, data.unmet
        more = has_more(epoch, end, surveyed_answers(replies), unmet)
        if more is not None:
            self.world.count("lost end")
            member.state.note_lost_end(end, more.node, more.log_end)
            return False
        with member.gate.lock:
            if member.state.data.promised_epoch != epoch or member.open_epoch:
                return False
            assert self.ha is not None
            others = [node for node, _ in member.peers]
            member.state.note_resumed(others, end, self.world.clock.wall_ms())
            self.ha.open_epoch(member.state.history[-1], sync=True)
            member.open_epoch = epoch
            member.gate.open(epoch)
        return True

    def flush(self) -> None:
        """Sync the log, and tell the master of it."""
        self.store.flush()
        if self.stream is not None and not self.stream.closed:
            self.stream.report()
            self.stream._note_clean()

    def end_stream(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.end()


class World:
    """One walk: the group, the messages in flight, and what was observed."""

    def __init__(
        self,
        seed: int,
        *,
        nodes: int = 3,
        acks: int = 1,
        flushed: bool = False,
        power: bool = False,
        retention: bool = False,
        reacks: bool = False,
        crash_rate: float = 0.01,
        classic: str = "",
        entries: int = epochs.ENTRIES_MAX,
        replay: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.replay = replay  # it may stop and be slow
        self.replay_rng = random.Random(seed ^ 0x4E91A7)  # so the other choices stay what they are
        self.mount_rng = random.Random(seed ^ 0x5D0FF)
        self.entries = entries  # the bound of a history
        self.numbers = list(range(1, nodes + 1))
        self.acks = acks
        self.ack_point = AckPoint.FLUSHED if flushed else AckPoint.WRITTEN
        self.power, self.retention, self.reacks = power, retention, reacks
        self.crash_rate = crash_rate
        self.crashes = False
        self.loss_rate = 0.1
        self.clock = Clock()
        self.links = 0
        self.depth = 0
        self.cut_off: set[int] = set()  # nodes that nobody reaches
        self.more_steps: list[str] = []
        self.calm = 0  # how many more steps have no faults
        self.busy: list[SimNode] = []
        self.connections: list[SimConnection] = []
        self.trace: list[str] = []
        self.counts: dict[str, int] = {}
        self.powers = self.resyncs = 0
        # What nodes do not know: of each value its epoch, offset and confirming epoch; all acked.
        self.values = 0
        self.written: dict[int, tuple[int, int]] = {}
        self.confirmed_in: dict[int, int] = {}
        self.acked: set[int] = set()
        self.history = SimHistory()  # of the clients
        self.untold: set[int] = set()  # values that may have been confirmed
        self.nodes = {n: SimNode(self, n) for n in self.numbers}
        for node in self.nodes.values():
            node.start()
        self.stranger: set[int] = set()  # values of another RocketMQ master
        self.inside: set[int] = set()  # offsets inside those records: no file would begin there
        if classic:
            self._follow_rocketmq(classic)

    def _follow_rocketmq(self, classic: str) -> None:
        """Give every node the log of a RocketMQ master; with `classic` "two" the last node has that
        of another master, with "same" all have the same.
        """
        logs = []
        for _ in range(1 if classic == "same" else 2):
            log = bytearray()
            for _ in range(self.rng.randint(1, 20)):
                self.values += 1
                self.written[self.values] = (CLASSIC_EPOCH, len(log))
                self.inside |= set(range(len(log) + 1, len(log) + size_of(self.values)))
                log += bytes([self.values]) * size_of(self.values)
            logs.append(log)
        if len(logs) > 1:
            self.stranger = set(logs[1])
        for node in self.nodes.values():
            log = logs[-1] if node.number == self.numbers[-1] else logs[0]
            store = node.store
            store.data = log[: self.rng.randint(0, len(log))]
            store.flushed_offset = len(store.data)
            if store.data:
                entry = EpochEntry(CLASSIC_EPOCH, 0, self.acks, tuple(self.numbers))
                node.state.take_entries([entry])

    # ---- the network

    def call(self, source: SimNode, number: int, hello: Hello) -> tuple[Hello, Any, SimConnection]:
        """Deliver a HELLO and return HELLO and answer; OSError when either way is lost."""
        target = self.nodes[number]
        lost = self.rng.random() < self.loss_rate and not self.calm
        if not target.up or lost or {source.number, number} & self.cut_off:
            raise ConnectionRefusedError(f"node {number} does not answer")
        life = source.life
        try:
            said = target.member.hello(hello.purpose)
            connection = SimConnection(target, hello, self._next_link())
            answer = answering._decide(connection, hello)  # type: ignore[arg-type]
        except Crash as crash:
            self._bury(crash)
            raise ConnectionResetError(f"node {number} died") from None
        if isinstance(answer, StreamFrom):
            self.connections.append(connection)
        if isinstance(answer, Refused) and "the group disagrees" in answer.reason:
            raise Violation(f"node {source.number}: {answer.reason}")
        if self.rng.random() < self.loss_rate and not self.calm:
            raise TimeoutError(f"the answer of node {number} is lost")
        self._still(source, life)
        return said, answer, connection

    def _still(self, node: SimNode, life: int) -> None:
        if not node.up or node.life != life:
            raise Crash(node.number)

    def _next_link(self) -> int:
        self.links += 1
        return self.links

    def ask_all(
        self, member: Member, purpose: Purpose, *, skip: frozenset[int] = frozenset(),
        timeout_ms: float = 0.0, **extra: Any,
    ) -> list[SurveyReply]:  # fmt: skip
        """Ask the other nodes one after the other; anything may happen in between."""
        del timeout_ms
        source: SimNode = member.sim_node  # type: ignore[attr-defined]
        replies = []
        peers = [(n, a) for n, a in member.peers if n not in skip]
        self.rng.shuffle(peers)
        for number, address in peers:
            self.nested(source)
            try:
                said, answer, connection = self.call(source, number, member.hello(purpose, **extra))
                opened = Call(SlaveSocket(connection), said, answer)  # type: ignore[arg-type]
                check_peer(member, opened, number, address)
            except (HastoreError, OSError) as error:
                replies.append(SurveyReply(number, address, problem=str(error)))
            else:
                replies.append(SurveyReply(number, address, said, answer))
        self.nested(source)
        return replies

    def follow_call(
        self, address: str, hello: Hello, secret: bytes | None, clock: Any, timeout_ms: float,
        tls: None, *, may_be_old: bool = False,
    ) -> Call:  # fmt: skip
        del secret, clock, timeout_ms, tls, may_be_old
        source = self.nodes[hello.node]
        self.nested(source)
        said, answer, connection = self.call(source, int(address[4:]), hello)
        return Call(SlaveSocket(connection), said, answer)  # type: ignore[arg-type]

    def copy(self, catch_up: CatchUp, receiver: Any) -> None:
        """Replace the catch-up's socket; both ends are the product's code."""
        member, node, end = catch_up.member, catch_up.node, catch_up.end
        source: SimNode = member.sim_node  # type: ignore[attr-defined]
        target = self.nodes[node]
        hello = member.hello(
            Purpose.COPY, copy_from=member.store.max_offset, copy_to=end,
            expect_epoch=last_epoch(catch_up.history), expect_end=end,
            **digest_fields(member, catch_up.history, catch_up.source_min, end),
        )  # fmt: skip
        _, answer, connection = self.call(source, node, hello)
        if isinstance(answer, Refused):
            raise PromotionRefused(answer.reason)
        decoder, life, source_life = StreamDecoder(control_frames=False), target.life, source.life

        def sendall(data: bytes) -> None:
            for event in decoder.feed(memoryview(data)):
                if isinstance(event, DataEvent):
                    receiver.append(event.offset, event.data, lambda: None)
            self.nested(source)
            self._still(source, source_life)
            if target.life != life or not target.up or self.rng.random() < self.loss_rate:
                raise ConnectionResetError("the copy's link broke")

        connection.sendall = sendall  # type: ignore[attr-defined]
        try:
            answering._copy(connection, hello)  # type: ignore[arg-type]
        except ProtocolError as error:  # the source closes the link
            raise ConnectionResetError(str(error)) from error

    # ---- what was observed

    def note_confirmed(self, node: SimNode, confirmed: int, epoch: int) -> None:
        store = node.store
        for value, (of, at) in self.written.items():
            known = epoch_at(node.state.history, at)
            if known == FLOOR_EPOCH and at + size_of(value) <= confirmed:
                if not store.data[at]:
                    self.untold.add(value)  # forgotten and deleted: unknown
                elif store.data[at] == value:
                    known = of  # forgotten, but the bytes are here
            if at + size_of(value) <= confirmed and known == of:
                # Bytes that retention has deleted count as having been in this log.
                if at < store.min_offset and self.stranger and of == CLASSIC_EPOCH:
                    continue
                if store.data[at] in (0, value):  # 0: from before a resync
                    self.confirmed_in.setdefault(value, epoch)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # ---- steps

    def nested(self, busy: SimNode) -> None:
        """Let other steps happen while `busy` waits for an answer."""
        if self.depth >= NESTED_MAX or self.rng.random() < 0.5:
            return
        life = busy.life
        self.depth += 1
        self.busy.append(busy)
        try:
            for _ in range(self.rng.randint(1, 3)):
                self.step(busy)
        finally:
            self.busy.pop()
            self.depth -= 1
        self._still(busy, life)

    def step(self, busy: SimNode | None = None) -> None:
        """Do one random step; of a busy node only what its other threads do."""
        if self.calm:
            self.calm -= 1
        elif busy is None and self.rng.random() < 0.05:
            self.calm = self.rng.randint(5, 40)
        choices = _STEPS if busy is None else _NESTED_STEPS
        name = self.rng.choice([*(_CALM_STEPS if self.calm else choices), *self.more_steps])
        node = self._pick(name)
        if node in self.busy and (
            name in _OWN_THREAD or (name == "receive" and not node.promoting)
        ):
            return
        self.trace.append(f"{'  ' * self.depth}{name} {node.number}")
        if self.replay and self.replay_rng.random() < 0.1:
            self._change_replay()
        self.crashes = self.crash_rate > 0 and not self.calm
        try:
            getattr(self, f"do_{name}")(node)
        except Crash as crash:
            self._bury(crash)
            if busy is not None and crash.node == busy.number:
                raise
        except GroupDisagrees as error:
            raise Violation(
                f"node {node.number} is told to cut confirmed records: {error}"
            ) from error
        except (HastoreError, OSError) as error:
            self.trace.append(f"{'  ' * self.depth}  ! {error}")
        self.check()

    def _pick(self, name: str) -> SimNode:
        """Choose a node, mostly one that has something to do."""
        nodes = list(self.nodes.values())
        if self.rng.random() < 0.9:
            if name in ("put", "send", "report", "break"):
                nodes = [node for node in nodes if node.open] or nodes
            elif name in ("receive", "flush"):
                nodes = [node for node in nodes if node.stream is not None] or nodes
            elif name == "follow":
                nodes = [node for node in nodes if node.up and node.stream is None] or nodes
            elif name == "restart":
                nodes = [node for node in nodes if not node.up] or nodes
        return self.rng.choice(nodes)

    def _change_replay(self) -> None:
        """Let one node's replay stop, or go on."""
        node = self.nodes[self.replay_rng.choice(self.numbers)]
        store = node.store
        store.replay_problem = None if store.replay_problem else "replay stopped: no room"
        self.trace.append(f"{'  ' * self.depth}replay of {node.number}: {store.replay_problem}")

    def _bury(self, crash: Crash) -> None:
        node = self.nodes[crash.node]
        if node.up:
            self.count("crash")
            node.die()

    def do_put(self, node: SimNode) -> None:
        if not node.open or self.values >= VALUES_MAX or node.store.replay_problem is not None:
            return
        assert node.ha is not None
        refused = node.ha.can_confirm(flushed=False)
        if refused is not None and self.rng.random() < 0.5:
            return  # SLAVE_NOT_AVAILABLE, before the append; else an asynchronous put
        member, store = node.member, node.store
        self.values += 1
        value, start = self.values, store.max_offset
        self.history.began(value)
        with member.gate.lock:
            epoch = member.open_epoch
            if not epoch or member.gate.epoch != epoch:
                return
            self.written[value] = (epoch, start)
            self.note_put(node, value)
            store.append_replica(start, bytes([value]) * size_of(value))
            end = store.max_offset
            node.ha.on_append(start, end)

        def done(outcome: Outcome, level: str) -> None:
            del level
            if outcome is Outcome.CONFIRMED:
                if value not in self.confirmed_in:
                    raise Violation(f"value {value} is acknowledged and was never confirmed")
                self.acked.add(value)
                self.history.acked(value, f"SYNC_MEM({node.acks})", start, epoch)

        if refused is None:
            self.nested(node)  # the API's thread is slow
            node.transfer.add(end, float("inf"), Need.SLAVES, done)
        else:
            self.history.acked(value, "MASTER_MEM", start, epoch)
        self.count("put")

    def note_put(self, node: SimNode, value: int) -> None:
        """Note that a master is about to append a value."""

    def do_flush(self, node: SimNode) -> None:
        if node.up:
            node.flush()

    def do_follow(self, node: SimNode) -> None:
        if not node.up or node.open or node.promoting:
            return
        if node.stream is not None and not node.stream.closed and self.rng.random() < 0.7:
            return
        node.end_stream()
        aside = node.state.data.aside
        node.client._follow_once()
        self.resyncs += node.state.data.aside > aside
        self.count("follow")

    def do_send(self, node: SimNode) -> None:
        """A master's WriteSocketService sends a little on one link."""
        links = [c for c in self.connections if c.host is node and c.life == node.life]
        links = [c for c in links if not c.closed]
        if not node.up or not links:
            return
        link = self.rng.choice(links)
        size, limits = self.rng.choice((0, 1, 2, 3, 8)), self.rng.random() < 0.5
        link.to_slave.append(link.next_frame(size, limits=limits))

    def do_receive(self, node: SimNode) -> None:
        """A slave's HAClient takes a frame, or ends a link that broke."""
        stream = node.stream
        if not node.up or stream is None:
            return
        queue = stream.connection.to_slave
        try:
            if queue and (not stream.closed or self.rng.random() < 0.3):
                stream._receive_bytes(memoryview(queue.popleft()))
            elif stream.closed or stream.connection.closed:
                node.end_stream()
        except ProtocolError:
            node.end_stream()
            raise

    def do_report(self, node: SimNode) -> None:
        """A master's ReadSocketService takes what is in flight on a link, perhaps a closed one."""
        links = [c for c in self.connections if c.host is node and c.to_master]
        links = [c for c in links if c.life == node.life]
        if not node.up or not links:
            return
        link = self.rng.choice(links)
        data = link.to_master.popleft()
        if link.closed and self.rng.random() < 0.7:
            return
        link.take_report(data)

    def do_promote(self, node: SimNode, flags: Flags = PLAIN) -> None:
        if not node.up or node.promoting:
            return
        # Without `replay` it is always demoted first, so that the seeds of old walks still count.
        if not self.replay or self.replay_rng.random() < 0.3:
            node.leave_office()
        if self.reacks and self.rng.random() < 0.3:
            node.acks = self.rng.randint(1, len(self.numbers) - 1)
        life = node.life
        node.promoting, node.replay_waits, node.waited_blocked = True, [], False
        if self.rng.random() < 0.5:
            node.promoter.begin()
        try:
            node.promoter.attempt(node.config, flags, before_promise=node.ask_for_promises)
            self.count("open")
        except PromotionRefused as refused:
            if isinstance(refused.__cause__, GroupDisagrees):
                raise refused.__cause__ from refused
            raise
        finally:
            self.history.begun(node.state.last_epoch)
            if node.life == life:
                node.promoting = False

    def do_demote(self, node: SimNode) -> None:
        if node.open and self.rng.random() < 0.3:
            node.member.step_down()
            assert node.ha is not None
            node.ha.close_epoch("demoted")

    def do_watch(self, node: SimNode) -> None:
        """A master surveys the nodes that do not follow it."""
        if not node.open:
            return
        for number in self.numbers:
            if number != node.number and node.open:
                hello = node.member.hello(Purpose.SURVEY)
                with contextlib.suppress(OSError):
                    said, _, _ = self.call(node, number, hello)
                    node.member.observe_epoch(
                        max(said.promised_epoch, said.open_epoch, last_epoch(said.history)), "x"
                    )

    def do_break(self, node: SimNode) -> None:
        links = [c for c in self.connections if c.host is node and not c.closed]
        if links:
            self.rng.choice(links).close("the network breaks")

    def do_part(self, node: SimNode) -> None:
        """Cut one node off from the others, or connect all again."""
        if self.cut_off or self.rng.random() < 0.2:
            self.cut_off.clear()
            return
        self.cut_off = {node.number}
        for link in self.connections:
            if node.number in (link.node, link.host.number):
                link.close("the network parts")
                stream = self.nodes[link.node].stream
                if stream is not None and stream.connection is link:
                    stream._closed = True

    def do_kill(self, node: SimNode) -> None:
        if node.up and self.rng.random() < 0.5:
            self.count("kill")
            raise Crash(node.number)

    def do_cut_power(self, node: SimNode) -> None:
        if self.power and self.rng.random() < 0.5:
            self.powers += 1
            self.count("power")
            self.history.fault("power", node.number)
            node.die()
            self.crashes = False
            node.store.lose_power()
            if self.mount_rng.random() < 0.3:  # its file system was shut down, and mounted again
                node.files.mount += 1
                self.count("mount")
            else:
                node.files.boot += 1

    def do_retain(self, node: SimNode) -> None:
        if not self.retention or not node.up:
            return
        starts = [at for at, _ in node.store.records() if at <= node.store.flushed_offset]
        sent = [c.writer.sent_offset for c in self.connections if c.host is node and not c.closed]
        hold = min([node.store.whole_offset, *(s for s in sent if s is not None)])
        starts = [at for at in starts if at <= hold and at not in self.inside]
        starts = self.retained_from(node, starts)
        if starts:
            node.store.min_offset = self.rng.choice(starts)

    def retained_from(self, node: SimNode, starts: list[int]) -> list[int]:
        """Return those of `starts` at which retention may let a node's log begin."""
        del node
        return starts

    def do_restart(self, node: SimNode) -> None:
        """Start a node that is down; a master continues in its epoch if it may."""
        if node.up:
            return
        self.crashes = False  # no crash before it is up
        node.start()
        self.crashes = self.crash_rate > 0
        if self.rng.random() < 0.5 and node.resume():
            self.count("resume")

    # ---- what must hold (the numbers are docs/failover.md's)

    def check(self) -> None:
        nodes = [node for node in self.nodes.values() if node.up]
        opened = [node.member.open_epoch for node in nodes if node.member.open_epoch]
        if len(set(opened)) < len(opened):
            raise Violation("1: two masters are open in one epoch")
        seen: dict[tuple[int, int], tuple[int, int]] = {}
        for node in nodes:
            self._check_log(node, seen)
            store = node.store
            if store.confirmed_offset > store.max_offset:
                raise Violation(f"4: node {node.number}: confirmed beyond its log's end")
            last = node.state.last_epoch
            held = {value: at for at, value in store.records()}
            for value, epoch in self.confirmed_in.items():
                at = self.written[value][1]
                if last > epoch and at >= store.min_offset and held.get(value) != at:
                    raise Violation(
                        f"2: value {value}, confirmed in {epoch}, is missing on node "
                        f"{node.number} of epoch {last}"
                    )

    def _check_log(self, node: SimNode, seen: dict[tuple[int, int], tuple[int, int]]) -> None:
        store, history = node.store, node.state.history
        if history and history[-1].start > store.max_offset:
            raise Violation(f"node {node.number}: an entry beyond the log's end")
        limit = max(store.confirmed_offset, store.readable_offset)
        foreign = {value in self.stranger for _, value in store.records() if self._classic(value)}
        if len(foreign) > 1:
            raise Violation(f"node {node.number} holds bytes of two RocketMQ masters")
        for at, value in store.records():
            epoch = epoch_at(history, at)
            if epoch == FLOOR_EPOCH:
                epoch = self.written[value][0]  # forgotten; the bytes are compared below
            if (epoch, at) != self.written[value]:
                raise Violation(
                    f"3: node {node.number} has value {value} of {self.written[value]} at "
                    f"{at} in epoch {epoch}"
                )
            assert epoch is not None
            other, place = seen.setdefault((epoch, at), (value, node.number))
            if other != value and not (epoch == CLASSIC_EPOCH and self.stranger):
                raise Violation(f"3: nodes {place} and {node.number} differ at {at} of {epoch}")
            # Retention may have removed unconfirmed bytes of RocketMQ; a resync then starts there.
            taken = (self.retention and self._classic(value)) or value in self.untold
            if at + size_of(value) <= limit and value not in self.confirmed_in and not taken:
                raise Violation(
                    f"4: node {node.number} shows value {value} as confirmed, which it never was"
                )

    def _classic(self, value: int) -> bool:
        return self.written[value][0] == CLASSIC_EPOCH

    # ---- the end of a walk

    @property
    def candidates(self) -> list[int]:
        """The nodes of which any can be promoted once all answer."""
        return self.numbers

    def heal(self) -> None:
        """End all faults, promote any node: logs become equal, no acknowledged value is lost."""
        self.crashes, self.crash_rate, self.loss_rate = False, 0.0, 0.0
        self.cut_off.clear()
        self.depth = NESTED_MAX  # no nested steps
        for node in self.nodes.values():
            node.store.replay_problem = None
            if not node.up:
                node.start()
            node.end_stream()
        chosen = self.nodes[self.rng.choice(self.candidates)]
        chosen.acks = chosen.state.data.acks_min or self.acks
        try:
            for attempt in range(5):
                try:
                    chosen.promoter.begin()
                    self.do_promote(chosen)
                    break
                except PromotionRefused as refused:
                    named = re.findall(r"promote node (\d+)", str(refused))
                    if named:  # the named remedy must work
                        chosen = self.nodes[int(named[0])]
                        chosen.acks = chosen.state.data.acks_min or self.acks
                        self.count("named")
                        continue
                    if not self.powers and not self.resyncs and attempt:
                        raise Violation(f"7: refused although all answer: {refused}") from refused
            else:
                self.count("refused")
                return
            self._stream_all(chosen)
        except GroupDisagrees as error:
            raise Violation(f"6: {error}") from error
        except HastoreError as error:
            raise Violation(f"7: healed, yet {error}") from error
        self._check_healed(chosen)

    def _stream_all(self, master: SimNode) -> None:
        for _ in range(3000):
            for node in self.nodes.values():
                if node is not master and (node.stream is None or node.stream.closed):
                    node.end_stream()
                    node.client._follow_once()
            self.do_send(master)
            for node in self.nodes.values():
                self.do_receive(node)
                self.do_flush(node)
            self.do_report(master)
            self.check()
            ends = {node.store.max_offset for node in self.nodes.values()}
            told = {node.store.confirmed_offset for node in self.nodes.values()}
            linked = [
                n for n in self.nodes.values() if n.stream is not None and not n.stream.closed
            ]
            if ends == told == {master.store.max_offset} and len(linked) == len(self.nodes) - 1:
                return
        raise Violation("7: the healed group does not come together")

    def _check_healed(self, master: SimNode) -> None:
        log, history = master.store.data, master.state.history
        for node in self.nodes.values():
            low = max(node.store.min_offset, master.store.min_offset)
            if node.store.data[low:] != log[low:]:
                raise Violation(f"7: healed, yet the log of node {node.number} differs")
            if ranges(node.state.history, low) != ranges(history, low):
                raise Violation(f"7: healed, yet the history of node {node.number} differs")
            if node.state.data.unclean and node is not master:
                raise Violation(f"healed, yet node {node.number} is unclean")
        held = {value: at for at, value in master.store.records()}
        for value in self.acked:
            at = self.written[value][1]
            if at >= master.store.min_offset and held.get(value) != at:
                raise Violation(f"I1: value {value} was acknowledged and is lost")
        store = master.store
        records = ((at, size_of(value), value) for at, value in store.records())
        wrong = self.history.judge(store.min_offset, store.max_offset, records, history)
        if wrong:
            raise Violation("; ".join(wrong[:5]))
        self.count("healed")


def ranges(history: epochs.History, low: int) -> list[EpochEntry]:
    """Return the entries of a history from offset `low` on, without forgotten ranges and without
    epochs that wrote nothing.
    """
    following = [*history[1:], None]
    return [
        entry
        for entry, after in zip(history, following, strict=True)
        if entry.epoch != FLOOR_EPOCH and entry.start >= low
        if after is None or after.start > entry.start
    ]


_CALM_STEPS = (
    ["put"] * 4 + ["send"] * 9 + ["receive"] * 10 + ["report"] * 7 + ["flush"] * 2
    + ["follow"] * 3 + ["restart"]
)  # fmt: skip
_STEPS = (
    ["put"] * 6 + ["send"] * 9 + ["receive"] * 10 + ["report"] * 6 + ["flush"] * 3
    + ["follow"] * 4 + ["promote"] * 2 + ["restart"] * 3 + ["demote", "watch", "break"]
    + ["kill", "cut_power", "retain", "part"]
)  # fmt: skip
_NESTED_STEPS = [*_STEPS, "restart", "receive", "report", "send", "put"]
# Steps of a node's RoleService and HAClient: one at a time.
_OWN_THREAD = {"follow", "promote", "demote", "watch", "restart"}


@contextlib.contextmanager
def installed(world: World) -> Iterator[World]:
    """Replace the product's network calls by the World's."""
    places: list[tuple[Any, str, Any]] = [
        (promoter, "ask_all", world.ask_all),
        (ha_client, "ask_all", world.ask_all),
        (ha_client, "call", world.follow_call),
        (ha_client, "SlaveStream", SimStream),
        (CatchUp, "_copy", lambda catch_up, receiver: world.copy(catch_up, receiver)),
        (promoter, "call", world.follow_call),
        (answering, "COPY_FRAME_BYTES", 2),
        (epochs, "ENTRIES_MAX", world.entries),
        (epochs, "RECENT_ENTRIES", max(1, world.entries // 8)),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    for place, name, value in places:
        setattr(place, name, value)
    try:
        yield world
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def settings_of(seed: int) -> dict[str, Any]:
    """Return the settings of a seed's walk."""
    rng = random.Random(seed ^ 0x5EED)
    nodes = rng.choice((2, 3, 3, 3, 4))
    return {
        "nodes": nodes,
        "acks": rng.randint(1, nodes - 1) if rng.random() < 0.4 else 1,
        "flushed": rng.random() < 0.3,
        "power": rng.random() < 0.5,
        "retention": rng.random() < 0.15,
        "reacks": rng.random() < 0.25,
        "crash_rate": rng.choice((0.0, 0.005, 0.02)),
        "entries": rng.choice((epochs.ENTRIES_MAX, 8, 4, 2)),
    }


def walk(seed: int, steps: int = 200, classic: str = "", *, replay: bool = False) -> World:
    """Take one walk; a Violation has the seed and the last steps. With `replay` that may stop.

    Logs of two RocketMQ masters do not become equal: the operator must decide.
    """
    world = World(seed, **settings_of(seed), classic=classic, replay=replay)
    name = f"seed {seed}{', replay=True' if replay else ''} ({settings_of(seed)})"
    take_steps(world, steps, name, heals=classic != "two")
    return world


def take_steps(
    world: World, steps: int, name: str, *, heals: bool = True, shown: int = 40
) -> None:
    """Take a walk of so many steps, and heal; a Violation has its name and the last steps."""
    with installed(world):
        try:
            for _ in range(steps):
                world.step()
            if heals:
                world.heal()
        except Violation as violation:
            tail = "\n".join(world.trace[-shown:])
            raise Violation(f"{name}: {violation}\n{tail}") from violation


__all__ = ["World", "Violation", "epoch_node", "installed", "settings_of", "take_steps", "walk"]
