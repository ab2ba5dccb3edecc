"""The interface between the client API and its node: store, confirmations, role and group.

ApiBackend is what the API calls; the backends of server/backend.py implement it, tests use fakes.
Any thread may call its methods. The API calls them with its own lock held, so they must not call
back into the API. ApiWaker is what the node calls; ApiServer implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from hastore.ha.master.group_transfer import Need, Outcome
from hastore.ha.rules.epochs import EpochStarts, Standing
from hastore.protocol.api import MapInfo
from hastore.protocol.committed_positions import Place
from hastore.server.api.commit_records import PullSource

if TYPE_CHECKING:
    from hastore.record.codec import Host, Record
    from hastore.record.topic_records import TopicConfig
    from hastore.record.transactions import Ended, Half
    from hastore.store.append.results import Guards, Payload, ProducerProgress, PutResults

Done = Callable[[Outcome, str], None]


class Transfer(Protocol):
    """Hold puts until they are confirmed; implemented by GroupTransferService."""

    def add(
        self, end_offset: int, deadline_ms: float, need: Need, done: Done, *, epoch: int | None
    ) -> None:
        """Call `done(outcome, level)` exactly once, from any thread, perhaps before `add` ends."""
        ...


class Search(Protocol):
    """A search by key under way; see KeySearch in store/message_reader.py."""

    found: dict[int, bytes]
    cut_ms: int | None
    cut_offset: int | None
    unreadable: list[int]
    ended: bool

    def step(self) -> None:
        """Do a small part of the search."""
        ...

    def cut_short(self) -> None:
        """End the search before its end."""
        ...


class ApiReader(PullSource, Protocol):
    """A store's MessageReader, as the API uses it."""

    def without_waiting(self) -> AbstractContextManager[None]:
        """Let the reads of this thread take only what is in memory; else NotCachedError."""
        ...

    def search_key(
        self, topic: str, key: str, *, max_messages: int, begin_ms: int = 0, end_ms: int = ...,
        limit_offset: int | None = None, max_bytes: int = ...,
    ) -> Search:  # fmt: skip
        """Begin a search for the latest records with a key."""
        ...

    def record_bytes(self, offset: int) -> bytes | None:
        """Return the record that begins at an offset; None if there is none."""
        ...

    def is_damaged(self, offset: int) -> bool:
        """Whether a record that cannot be read is known to be at an offset."""
        ...

    def note_damage(self, offset: int) -> None:
        """Let the record that begins at an offset be repaired: it could not be read."""
        ...

    def note_wrong(self, offset: int) -> None:
        """Let the record that begins at an offset be repaired, though its CRC is right."""
        ...

    def record_at(self, offset: int) -> Record | None:
        """Return the record that begins at an offset; None if there is none."""
        ...

    def first_record(self) -> Record | None:
        """Return the first record of the log; None if it begins with none."""
        ...

    def readable_range(
        self, topic: str, queue_id: int, limit_offset: int
    ) -> tuple[int, int] | None:
        """Return a queue's first and next queue offset, of records that end by `limit_offset`."""
        ...

    @property
    def last_keyed(self) -> tuple[int, int]:
        """When the last record with a key was stored, and its offset; zeros without one."""
        ...

    def queue_offset_by_time(
        self, topic: str, queue_id: int, timestamp_ms: int, is_spent: Callable[[], bool] = ...
    ) -> int:
        """Return the first queue offset stored at or after a time; or one before, once spent."""
        ...


class GrownQueues(Protocol):
    """Which queues got records, of those that parked pulls wait for. A queue: topic, queue id."""

    @property
    def has_any(self) -> bool:
        """Whether `take` has something."""
        ...

    @property
    def since(self) -> int:
        """The least offset of the log at which the records may lie that made them grow."""
        ...

    @property
    def cuts(self) -> int:
        """How often queues were cut, or began again."""
        ...

    def watch(self, key: tuple[str, int]) -> None:
        """Note growth of a queue from now on, whether or not it exists."""
        ...

    def unwatch(self, key: tuple[str, int]) -> None:
        """Note growth of a queue no more."""
        ...

    def take(self) -> Iterator[tuple[str, int]]:
        """Yield the queues that have grown, each after its note is taken away."""
        ...


class QueueUnit(Protocol):
    """An entry of a consume queue."""

    @property
    def offset(self) -> int:
        """Where its record begins in the log."""
        ...


class QueueRanges(Protocol):
    """A store's consume queues, as the API uses them."""

    @property
    def grown(self) -> GrownQueues:
        """Which queues got records, of those that parked pulls wait for."""
        ...

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """Return the first and the next queue offset of a queue; None if it does not exist."""
        ...

    def begin_of(self, topic: str) -> int:
        """Return the offset of the log below which the records of a topic are hidden, or 0."""
        ...

    @property
    def topic_count(self) -> int:
        """The number of topics with queues."""
        ...

    def topics(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Return the range of each queue of each topic."""
        ...

    def read(
        self, topic: str, queue_id: int, queue_offset: int, max_units: int
    ) -> Sequence[QueueUnit]:
        """Return entries of a queue from a queue offset on; none if it is not there."""
        ...

    def queues_of(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return the range of each queue of one topic; empty without such a topic."""
        ...

    def emptied_of(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return the queues that `queues_of` leaves out: a deletion hides all their records."""
        ...

    def ended(self, topic: str, log_start: int) -> dict[int, int]:
        """Return at which queue offsets the last deletion of a topic ended its queues."""
        ...


class ApiTopics(Protocol):
    """A store's TopicTable, as the API uses it."""

    version: int

    def no_room_for(self, name: str) -> str | None:
        """Return why a topic gets no configuration; None if it may get one."""
        ...

    def no_room_to_delete(self, name: str) -> str | None:
        """Return why a topic is not deleted; None if it may be."""
        ...

    def find(self, name: str) -> TopicConfig | None:
        """Return a topic; None if there is none of that name."""
        ...

    def recorded(self, name: str) -> TopicConfig | None:
        """Return what a record says of a topic; None if none does, or it was deleted."""
        ...

    def offset_of(self, name: str) -> int:
        """Return the offset of the newest record that says what is in force; -1 without one."""
        ...

    def deleted(self) -> list[str]:
        """Return the names of the topics that were deleted, and are not forgotten."""
        ...

    def gone(self) -> set[str]:
        """Return the names of the deleted topics that no put has begun anew."""
        ...

    def all(self) -> list[TopicConfig]:
        """Return all topics but the group's own, by name."""
        ...

    def may_read(self, name: str) -> bool:
        """Whether consumers may read a topic; also if there is none of that name."""
        ...


class ApiTransactions(Protocol):
    """The open transactions of the log: OpenTransactions."""

    def why_full(self, topic: bytes) -> str | None:
        """Return why a topic gets no more transactions now; None if it does."""
        ...

    def __len__(self) -> int: ...

    def halves(self) -> list[Half]:
        """Return the open transactions, in the log's order."""
        ...

    def find(self, offset: int) -> Half | None:
        """Return the open transaction with a half message at this offset."""
        ...

    def ended(self, offset: int) -> tuple[Half, Ended] | None:
        """Return the transaction of a half message, and how it ended; None if it is not known."""
        ...

    def unsaid(self) -> list[int]:
        """Return the queue offsets of half messages that have ended, but are not listed so."""
        ...


class ApiStore(Protocol):
    """The reading side of LogStore."""

    @property
    def store_host(self) -> Host:
        """The host that this node writes into its records."""
        ...

    @property
    def min_offset(self) -> int:
        """The offset of the first byte that the log still has."""
        ...

    @property
    def max_offset(self) -> int:
        """The end of the log."""
        ...

    @property
    def flushed_offset(self) -> int:
        """The offset up to which the log is on the disk."""
        ...

    @property
    def readable_offset(self) -> int:
        """The offset at which readers stop."""
        ...

    @property
    def dispatched_offset(self) -> int:
        """How far replay has come: the queues know all records below it."""
        ...

    @property
    def whole_offset(self) -> int:
        """The end of the last whole record."""
        ...

    @property
    def replay_problem(self) -> str | None:
        """Why replay has stopped, None if it has not."""
        ...

    def wait_dispatched(self, offset: int, timeout_s: float) -> bool:
        """Wait until replay has reached `offset`."""
        ...

    @property
    def replayed_records(self) -> int:
        """How many records have become known to the queues since the node's start."""
        ...

    def producer_progress(self, producer: bytes) -> ProducerProgress | None:
        """Return how far a producer came; None while the window lacks a part of the log."""
        ...

    @property
    def view(self) -> Callable[[int, int], AbstractContextManager[memoryview]]:
        """Lend at most so many bytes from an offset of the log; see CommitLog.view."""
        ...

    @property
    def reader(self) -> ApiReader:
        """Pulls, and records by offset, key and time."""
        ...

    @property
    def topic_table(self) -> ApiTopics:
        """The configurations of the topics."""
        ...

    @property
    def queues(self) -> QueueRanges:
        """The topics, and the range of each of their queues."""
        ...

    @property
    def transactions(self) -> ApiTransactions:
        """The open transactions."""
        ...

    def why_too_large(self, body_size: int, size: int) -> str | None:
        """Return why a client's record of these sizes cannot be put; None if it can."""
        ...

    def find_topic(self, name: str) -> TopicConfig | None:
        """Return a topic as the log's end has it, before replay; None if there is none."""
        ...

    def delivery_queue(self, topic: str, queue_id: int) -> int:
        """Return the queue that gets a message which was put earlier; see LogStore."""
        ...


class ApiWaker(Protocol):
    """The client API as its node wakes it. All methods are cheap, and take no lock of the node."""

    def puts_done(self) -> None:
        """Answer the puts whose `done` was called; called once after each batch of them.

        The thread that learned of the outcome calls it, without the lock of the Transfer.
        """
        ...

    def wake_readers(self) -> None:
        """Let parked pulls look again: readable_offset or dispatched_offset has moved.

        Any thread calls it, perhaps with locks of replication.
        """
        ...

    def answer_readers(self) -> None:
        """Answer parked pulls at once in the calling thread, or let them look again.

        The thread has learned that readable_offset or dispatched_offset has moved. It holds no
        lock, and can do without a fraction of a millisecond.
        """
        ...

    def readers_wait(self) -> bool:
        """Whether a reader waits for new records; replay's thread and those of links call it.

        If so, replay dispatches new records sooner, and the master or leader tells this node sooner
        what is confirmed, which costs puts some time.
        """
        ...


class ApiBackend(Protocol):
    """A node as its client API sees it. All methods but put_encoded are cheap."""

    @property
    def store(self) -> ApiStore:
        """The node's store."""
        ...

    @property
    def transfer(self) -> Transfer:
        """The object that holds the puts that wait for a confirmation."""
        ...

    def put_encoded(self, payloads: Sequence[Payload], guards: Guards | None = None) -> PutResults:
        """Append all valid records of all payloads at once, through the write gate.

        A payload's guard, if it has one, may forbid its records by their topic and HS_PID.

        Raises NotStoredError if the node is not writable (any more), and StoreError if the store
        refuses. In both cases nothing was appended.
        """
        ...

    def outdated(self) -> str | None:
        """Return why this node serves no reads: it is out of its group for good; else None."""
        ...

    @property
    def ends(self) -> bool:
        """Whether this process takes no puts any more: the node stops, or a thread has failed."""
        ...

    def writable_reason(self) -> str | None:
        """Return why puts are refused; None while the node is writable."""
        ...

    def master_node(self) -> int | None:
        """Return the node that takes puts, as far as this one knows; its own number if it does.

        None: there is none now, or it is not known. A put decides it for certain.
        """
        ...

    def can_confirm(self, sync_flush: bool) -> str | None:
        """Return why a put with `acks` all cannot be confirmed now; None if it can."""
        ...

    def never_flushed(self) -> str | None:
        """Return why the slaves can never confirm a put with sync_flush; None if they can."""
        ...

    def default_acks_all(self) -> bool:
        """Whether a put without `acks` waits for the slaves, as under a SYNC_MASTER."""
        ...

    def flush_each_put(self) -> bool:
        """Whether every put waits for this node's disk (`store.flush: sync`)."""
        ...

    def wait_limit_ms(self, need: Need) -> float:
        """Return the maximum wait of a put for `need`; the client may ask for less."""
        ...

    def epoch(self) -> int:
        """Return the last epoch of the node's history."""
        ...

    def history(self) -> Sequence[tuple[int, int]]:
        """Return the (epoch, start offset) entries, both rising. Empty: all is epoch 0."""
        ...

    def standing(self, history: EpochStarts, epoch: int, offset: int) -> tuple[Standing, int]:
        """Say how a position relates to this log with this history; see `check_position`."""
        ...

    def positions_wait(self) -> bool:
        """Whether this node is the master and does not know its groups' positions yet."""
        ...

    def topics_wait(self) -> bool:
        """Whether this node is the master and does not know a broker's topics yet."""
        ...

    def routes_wait(self) -> bool:
        """Whether this node, master or not, will know a broker's topics in a moment."""
        ...

    def copies_broker(self) -> bool:
        """Whether this node has a broker's files, and its group has had no master of its own."""
        ...

    def positions_elsewhere(self) -> str | None:
        """Return who knows the groups' positions while this node does not; None: it does."""
        ...

    def ha_address(self, node: int) -> str | None:
        """Return where a node's HA port is now; None for a node that is not known."""
        ...

    def note_classic_slave(self, address: str) -> None:
        """Keep where a RocketMQ slave's broker answers."""
        ...

    def kept_positions(self, group: str, topic: str) -> Mapping[int, Place]:
        """Return the positions that retention has saved for a group in a topic, by queue."""
        ...

    def master_map(self) -> MapInfo:
        """Return the node's view of the group."""
        ...

    def without_remoting(self) -> set[int]:
        """Return the linked nodes whose version knows no clients of RocketMQ."""
        ...

    def reading_nodes(self) -> Sequence[int]:
        """Return who serves reads with hardly a delay: a master's slaves that are near its log.

        A slave that follows a master names itself; any other node nobody.
        """
        ...

    def status(self) -> dict[str, Any]:
        """Return the object that `hastore status --json` prints."""
        ...

    def attach_api(self, api: ApiWaker) -> None:
        """Call these methods of the API from now on."""
        ...
