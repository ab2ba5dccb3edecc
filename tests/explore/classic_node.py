"""What one node of mode classic does with its inputs: the product's own objects, run again.

The code of mode classic is made of calls that wait for answers, so a state of a node cannot be
copied. It is its history instead: what its disk had when its process began, and all inputs since.
`run` begins with that disk and gives the product's objects the inputs in order. A call to another
node takes its answer from the inputs; inputs before the answer are what the node's other threads
do meanwhile. If there is no answer yet, the node is left there: it waits, which is a state too.

Nothing of time, chance or threads is left in it: the same inputs do the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hastore.config.model import AckPoint
from hastore.errors import HastoreError, PromotionRefused
from hastore.ha import promoter
from hastore.ha.hello.peer import Call, SurveyReply, check_peer
from hastore.ha.node import member as member_module
from hastore.ha.node import node_state
from hastore.ha.promoter import CatchUp
from hastore.ha.replica.digests import digest_fields
from hastore.ha.rules.epochs import last_epoch
from hastore.ha.slave import ha_client
from hastore.protocol.ha_link import Data, StreamDecoder
from hastore.protocol.hello import (
    Hello,
    Purpose,
    Refused,
    encode_answer,
    encode_hello,
)
from tests.explore.classic_inputs import Input, take
from tests.ha.sim_history import SimHistory
from tests.ha.simulation import (
    Clock,
    Crash,
    SimConnection,
    SimNode,
    SimStream,
    Violation,
)

NONCE = b"\0" * 16
LOST, ANSWER_LOST = -1, -2  # instead of the number of a reply


class Waits(BaseException):
    """A node's call has no answer yet. Not an Exception: the node's own code must not catch it."""


class Disk(NamedTuple):
    """What survives a node's process."""

    files: tuple[tuple[str, bytes], ...] = ()
    boot: int = 1
    data: bytes = b""
    min_offset: int = 0
    flushed: int = 0
    confirmed: int = 0
    readable: int = 0
    store: int = 0  # how often the disk was replaced

    @classmethod
    def of(cls, node: SimNode, store: int) -> Disk:
        """Return what a node has on its disk."""
        log, files = node.store, node.files
        return cls(
            tuple(sorted(files.files.items())), files.boot, bytes(log.data), log.min_offset,
            log.flushed_offset, log.confirmed_offset, log.readable_offset, store,
        )  # fmt: skip

    def put_into(self, node: SimNode) -> None:
        """Give a node this disk."""
        log = node.store
        node.files.files, node.files.boot = dict(self.files), self.boot
        log.data, log.min_offset = bytearray(self.data), self.min_offset
        log.flushed_offset, log.confirmed_offset = self.flushed, self.confirmed
        log.readable_offset = self.readable


class LinkEnd:
    """The slave's end of a link: what it sends is on its way to the master."""

    def __init__(self, bench: Bench, link: int) -> None:
        self._bench, self.link = bench, link

    def sendall(self, data: bytes) -> None:
        self._bench.out.append(("to master", self.link, bytes(data)))

    def shutdown(self, how: int) -> None:
        return

    def close(self) -> None:
        return


class Bench:
    """The world of one node while its inputs are run; the parts of World that a node uses."""

    def __init__(self, steps: Steps, inputs: tuple[Input, ...], dies_at: int | None) -> None:
        self.steps, self.inputs, self.taken = steps, inputs, 0
        self.numbers, self.acks = list(steps.numbers), steps.acks
        self.ack_point = AckPoint.FLUSHED if steps.flushed else AckPoint.WRITTEN
        self.clock, self.nodes = Clock(), {}
        self.replay, self.crashes, self.crash_rate = False, True, 0.5
        self.rng = self.replay_rng = self
        self.history = SimHistory()  # which a search does not judge
        self.effects, self.dies_at = 0, dies_at
        self.out: list[Input] = []
        self.notes: list[Input] = []
        self.reply: int | None = None  # to the HELLO that was the last input
        self.request: tuple[int, int] | None = None  # (whom the node waits for, its HELLO)
        self.links: dict[int, SimConnection] = {}
        self.event: Input = ()  # that the node's own thread is at
        self.waiting: Callable[[SimNode], None] = lambda _node: None  # called when it waits

    # of random.Random

    def random(self) -> float:
        """Count a place where the node may die, in its last input; let it die if it shall."""
        if self.taken < len(self.inputs):
            return 1.0
        self.effects += 1
        return 0.0 if self.effects == self.dies_at else 1.0

    def randint(self, a: int, b: int) -> int:
        return a

    def choice(self, of: Any) -> Any:
        return of[0]

    # of World

    def count(self, what: str) -> None:
        return

    def note_confirmed(self, node: SimNode, confirmed: int, epoch: int) -> None:
        """Note that a node takes all below an offset for confirmed, by an epoch."""
        self.notes.append(
            ("confirmed", confirmed, epoch, node.state.history, bytes(node.store.data))
        )

    # the calls that the product makes

    def ask(self, node: SimNode, number: int, hello: Hello) -> tuple[Hello, Any, Any, int]:
        """Return another node's HELLO and answer, what follows them, and the link's number."""
        while self.taken < len(self.inputs):
            what, *rest = self.inputs[self.taken]
            self.taken += 1
            self.begin_last()
            if what == "reply":
                reply, link = rest
                if reply == LOST:
                    raise ConnectionRefusedError(f"node {number} does not answer")
                if reply == ANSWER_LOST:
                    raise TimeoutError(f"the answer of node {number} is lost")
                return (*self.steps.replies[reply], link)
            take(self, node, (what, *rest))
        self.request = number, self.steps.request_of(number, hello)
        # Now, since what ends the call below also ends what the node does in it.
        self.waiting(node)
        raise Waits

    def begin_last(self) -> None:
        """Forget what earlier inputs have done, when the last one is taken."""
        if self.taken == len(self.inputs):
            self.out, self.notes, self.reply, self.effects = [], [], None, 0

    def ask_all(
        self, member: Any, purpose: Purpose, *, skip: frozenset[int] = frozenset(),
        timeout_ms: float = 0.0, **extra: Any,
    ) -> list[SurveyReply]:  # fmt: skip
        replies = []
        for number, address in member.peers:
            if number in skip:
                continue
            try:
                hello = member.hello(purpose, **extra)
                said, answer, _, link = self.ask(member.sim_node, number, hello)
                opened = Call(LinkEnd(self, link), said, answer)  # type: ignore[arg-type]
                check_peer(member, opened, number, address)
            except (HastoreError, OSError) as error:
                replies.append(SurveyReply(number, address, problem=str(error)))
            else:
                replies.append(SurveyReply(number, address, said, answer))
        return replies

    def call(self, address: str, hello: Hello, *rest: Any, may_be_old: bool = False) -> Call:
        node = self.steps.running
        said, answer, _, link = self.ask(node, int(address[4:]), hello)
        return Call(LinkEnd(self, link), said, answer)  # type: ignore[arg-type]

    def copy(self, catch_up: CatchUp, receiver: Any) -> None:
        """Replace the catch-up's socket."""
        member, end = catch_up.member, catch_up.end
        hello = member.hello(
            Purpose.COPY, copy_from=member.store.max_offset, copy_to=end,
            expect_epoch=last_epoch(catch_up.history), expect_end=end,
            **digest_fields(member, catch_up.history, catch_up.source_min, end),
        )  # fmt: skip
        node: SimNode = member.sim_node  # type: ignore[attr-defined]
        _, answer, pieces, _ = self.ask(node, catch_up.node, hello)
        if isinstance(answer, Refused):
            raise PromotionRefused(answer.reason)
        decoder = StreamDecoder(control_frames=False)
        for piece in pieces:
            for event in decoder.feed(memoryview(piece)):
                if isinstance(event, Data):
                    receiver.append(event.offset, event.data, lambda: None)
        if sum(len(piece) for piece in pieces) == 0 and hello.copy_to > hello.copy_from:
            raise ConnectionResetError("the copy's source closes the link")


class Quiet:
    """In the place of `secrets`: names that are the same in each run."""

    def __init__(self, store_id: str) -> None:
        self._store_id = store_id

    def token_hex(self, count: int) -> str:
        return self._store_id

    def token_bytes(self, count: int) -> bytes:
        return NONCE


@contextlib.contextmanager
def installed(bench: Bench, store_id: str) -> Iterator[None]:
    """Replace the product's network calls and random names while a node runs."""
    quiet = Quiet(store_id)
    places: list[tuple[Any, str, Any]] = [
        (promoter, "ask_all", bench.ask_all),
        (ha_client, "ask_all", bench.ask_all),
        (ha_client, "call", bench.call),
        (promoter, "call", bench.call),
        (ha_client, "SlaveStream", SimStream),
        (CatchUp, "_copy", lambda catch_up, receiver: bench.copy(catch_up, receiver)),
        (node_state, "secrets", quiet),
        (member_module, "secrets", quiet),
    ]
    before = [(place, name, place.__dict__[name]) for place, name, _ in places]
    for place, name, value in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


class Steps:
    """What all nodes ask each other: numbered, so that it can be an input."""

    def __init__(self, numbers: list[int], acks: int, *, flushed: bool) -> None:
        self.numbers, self.acks, self.flushed = numbers, acks, flushed
        self.requests: list[tuple[int, Hello]] = []
        self.replies: list[tuple[Hello, Any, tuple[bytes, ...]]] = []
        self._request_ids: dict[tuple[int, bytes], int] = {}
        self._reply_ids: dict[Any, int] = {}
        self.running: Any = None  # the node that runs

    def request_of(self, number: int, hello: Hello) -> int:
        """Return the number of a HELLO to a node."""
        found = self._request_ids.setdefault((number, encode_hello(hello)), len(self.requests))
        if found == len(self.requests):
            self.requests.append((number, hello))
        return found

    def reply_of(self, said: Hello, answer: Any, pieces: tuple[bytes, ...]) -> int:
        """Return the number of an answer."""
        key = encode_hello(said), encode_answer(answer), pieces
        found = self._reply_ids.setdefault(key, len(self.replies))
        if found == len(self.replies):
            self.replies.append((said, answer, pieces))
        return found

    def run(
        self, number: int, disk: Disk, inputs: tuple[Input, ...], dies_at: int | None,
        waiting: Callable[[Bench, SimNode], None],
    ) -> tuple[Bench, SimNode, str]:  # fmt: skip
        """Run a node's inputs; return its world, the node, and what is broken.

        `waiting` is called when it waits for an answer, before its call is ended.
        """
        bench = Bench(self, inputs, dies_at)
        bench.waiting = functools.partial(waiting, bench)
        node = SimNode(bench, number)  # type: ignore[arg-type]
        disk.put_into(node)
        self.running, broken = node, ""
        with installed(bench, f"store {number} {disk.store}"):
            try:
                while bench.taken < len(inputs):
                    event = inputs[bench.taken]
                    bench.taken += 1
                    bench.event = event
                    bench.begin_last()
                    take(bench, node, event)
            except Waits:
                pass
            except Crash:
                node.up = False
            except (Violation, AssertionError) as violation:
                broken = str(violation) or repr(violation)
        return bench, node, broken


def value_of(bench: Bench, node: SimNode, disk: Disk) -> Any:
    """Return what tells a node that waits for nothing from others, besides its disk."""
    member, ha, transfer, stream = node.member, node.ha, node.transfer, node.stream
    assert ha is not None
    table = ha._table
    counted = None
    if table is not None:
        counted = (
            table.epoch, table.acks, table.epoch_start, table.confirmed_offset,
            tuple(sorted(table.nodes)),
            tuple(sorted((n, r.connection_id, r.offset) for n, r in table.reporters.items())),
        )  # fmt: skip
    waiting = tuple(
        (need.value, tuple(one.end_offset for one in queue))
        for need, queue in transfer._queues.items()
    )
    progress = transfer._progress
    reached = None if progress is None else (tuple(progress.limits.items()), progress.epoch)
    links = tuple(
        (link, one.node, one.writer.sent_offset if one.writer else None, one.ack_offset)
        for link, one in sorted(bench.links.items())
        if not one.closed
    )
    streams = tuple(one.connection_id for one in ha._streams)
    return (
        disk, member.open_epoch, member.gate.epoch, counted, waiting, reached, links, streams,
        None if stream is None else _stream_value(stream),
        node.client._told_shared, node.promoter._known_epoch,
    )  # fmt: skip


def _stream_value(stream: SimStream) -> tuple[Any, ...]:
    told, receiver = stream._told, stream._receiver
    return (
        stream._sock.link,  # type: ignore[attr-defined]
        stream.epoch, stream._master_end, told, stream._confirms_from,
        stream._reported, stream._closed, stream._checked, receiver._history, receiver._bound,
    )  # fmt: skip
