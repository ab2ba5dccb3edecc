"""How the driver carries out an update of the core, part by part.

    Outbox         the messages of updates that are carried out together, until all is durable
    Syncs          which thread syncs the entries that an update has appended
    TermWaits      who waits for the core on a leader: puts, by offset, and those who asked
    OrderedCalls   calls in the order in which they were added, without a lock held
    Pace           how long the driver's thread sleeps between two ticks
    DiskRoom       whether the node's disk counts as full, and why

The driver's lock guards them all, except where a method says otherwise.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from hastore.clock import Clock
from hastore.dledger.core.dispatcher import split_append
from hastore.dledger.core.events import OnSettled, Settled
from hastore.dledger.links.peer_links import PeerLinks
from hastore.dledger.store.mmap_file_store import EntryStore
from hastore.errors import (
    HastoreError,
    NoLogFileError,
    StoreBrokenError,
    StoreError,
    StoreFullError,
)
from hastore.fs.filesystem import NO_ROOM
from hastore.ha.master.group_transfer import GroupTransferService, Need, PutProgress
from hastore.protocol.dledger import (
    NO_TERM,
    AppendRequest,
    Code,
    CompareRequest,
    InstallRequest,
    Message,
    PushResponse,
    PushType,
    TruncateRequest,
)
from hastore.protocol.dledger_link import DATA_BYTES_MAX

log = logging.getLogger(__name__)

HERE_BYTES_MAX = 128 * 1024  # what a link's thread syncs itself
SLOW_MS = 50.0  # a sync
SLOW_FOR_MS = 1_000.0
COARSE_MS = 10.0  # while puts come, the thread ticks this often and is not woken for each put
ACTIVE_MS = 100.0
LEAST_MS = 1.0  # also if the core is late with a deadline
ROOM_BYTES = 64 * 1024  # at least, for term, vote and member lists


def log_bytes(store: EntryStore, first: int, last: int) -> int:
    """Return the bytes that the entries from `first` to `last` take, as far as they are here."""
    first = max(first, store.begin_index)
    last = min(last, store.end_index)
    return 0 if last < first else store.end_position(last) - store.position(first)


def filled(message: Message, store: EntryStore) -> Iterator[Message]:
    """Yield the message as it is sent: only the store knows where the entries of a push lie.

    And only it knows whether readers wait. The core leaves `pos` and `size` 0. A data frame holds
    whole entries of one file, at most DATA_BYTES_MAX unless a single entry is larger, so a push may
    become several.

    Raises UsageError or StoreError if the store does not have the entries any more.
    """
    if isinstance(message, AppendRequest):
        yield from _filled_append(message, store)
    elif isinstance(message, CompareRequest):
        yield msgspec.structs.replace(message, crc=store.crc_of(message.index))
    elif isinstance(message, InstallRequest):
        yield msgspec.structs.replace(message, pos=store.position(message.index))
    elif isinstance(message, PushResponse) and store.messages.readers_wait():
        yield msgspec.structs.replace(message, readers=True)
    else:
        yield message


def contradiction(request: CompareRequest, store: EntryStore) -> str | None:
    """Return how this node's entry contradicts the leader's; None if it does not, or differs in
    its term. A damaged entry contradicts nothing.
    """
    index = request.index
    if request.crc is None or not store.begin_index <= index <= store.end_index:
        return None
    if store.term_of(index) != request.index_term or store.crc_of(index) in (None, request.crc):
        return None
    return f"entry {index} of term {request.index_term} is another one here than on the leader"


def lost_commit(request: TruncateRequest, store: EntryStore) -> str | None:
    """Return which entry the leader wants removed that is committed here; None if there is none.

    A request that came late names an entry of the leader's that this node has got meanwhile.
    """
    index = request.index
    if not store.begin_index <= index <= store.committed_index:
        return None
    if index > store.begin_index and store.term_of(index - 1) != request.prev_term:
        return None
    if store.term_of(index) == request.index_term or store.end_term == request.term:
        return None
    has = "lacks it" if request.index_term == NO_TERM else "has another one"
    return (
        f"entry {index} of term {store.term_of(index)} is committed here, and the leader of term "
        f"{request.term} {has}"
    )


def _filled_append(request: AppendRequest, store: EntryStore) -> Iterator[AppendRequest]:
    file_size = store.messages.file_size
    rest: AppendRequest | None = request
    while rest is not None:
        first = rest.prev_index + 1
        count = sum([one[1] for one in rest.runs])
        pos = store.position(first)
        size = store.end_position(first + count - 1) - pos
        part, rest = rest, None
        if size > DATA_BYTES_MAX or pos // file_size != (pos + size - 1) // file_size:
            found = store.read(first, min(size, DATA_BYTES_MAX))
            size = found.size
            fits = found.last_index - first + 1
            if fits < count:
                part, rest = split_append(part, fits)
        yield AppendRequest(
            part.term, part.prev_index, part.prev_term, pos, size,
            part.runs, part.committed_index, part.members, part.learners,
        )  # fmt: skip


class OrderedCalls:
    """A queue of calls. `add` is called under the owner's lock, `run` without it; thread-safe.

    One thread at a time makes calls. If another thread makes them already, `run` leaves its calls
    to that thread, also if a call leads to `run` again.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._running = threading.Lock()

    def add(self, call: Callable[[], None]) -> None:
        """Add a call."""
        self._calls.append(call)

    def run(self) -> None:
        """Make the calls that were added, unless another thread does."""
        calls = self._calls
        # After a release the queue is looked at again: a call may have been added by a thread that
        # found the lock taken.
        while calls and self._running.acquire(blocking=False):
            try:
                while calls:
                    calls.popleft()()
            finally:
                self._running.release()


class Outbox:
    """Messages in the order in which they are sent; the caller holds the driver's lock."""

    def __init__(self, links: PeerLinks, store: EntryStore) -> None:
        self._links = links
        self._store = store
        self._messages: list[tuple[int, Message]] = []

    def post(self, messages: list[tuple[int, Message]]) -> None:
        """Add messages. Of two APPEND answers to one node in a row the later says all."""
        posted = self._messages
        for peer, message in messages:
            if _is_append_answer(message) and posted and posted[-1][0] == peer:
                last = posted[-1][1]
                if _is_append_answer(last) and _covers(message, last):
                    posted[-1] = (peer, message)
                    continue
            posted.append((peer, message))

    def clear(self) -> None:
        """Drop all messages."""
        self._messages.clear()

    def drop_appends(self) -> None:
        """Drop the pushes of entries: the log is cut next, and others may follow in their place."""
        self._messages = [one for one in self._messages if not isinstance(one[1], AppendRequest)]

    def send(self) -> None:
        """Hand all messages to the links. Raises StoreBrokenError if the index is damaged."""
        if not self._messages:
            return
        messages, self._messages = self._messages, []
        for peer, message in messages:
            try:
                for one in filled(message, self._store):
                    self._links.send(peer, one)
            except StoreBrokenError:  # it is so each time, and the peer would never get anything
                raise
            except HastoreError as error:
                # A later step of this batch has cut the entries, or retention has removed them: the
                # core sends what is right after its next answer.
                log.debug("a message to node %d is left out: %s", peer, error)
            except OSError as error:  # the core sends it again
                log.error("the log cannot be read for node %d: %s", peer, error)


def _is_append_answer(message: Message) -> bool:
    return (
        isinstance(message, PushResponse)
        and message.push is PushType.APPEND
        and message.code is Code.SUCCESS
    )


def _covers(later: Message, earlier: Message) -> bool:
    assert isinstance(later, PushResponse) and isinstance(earlier, PushResponse)
    return later.term == earlier.term and later.index >= earlier.index


class Syncs:
    """Which thread syncs; `sync_here` is called without the driver's lock.

    A link's thread syncs a little that it has just appended itself: no other thread has to wake up,
    and what arrives meanwhile waits in the socket and shares the next sync. The store's flush
    thread does the rest: much at a time, so that the link's thread goes on receiving; and for a
    while after a slow sync, because the leader's heart beats on the link wait during a sync.
    """

    def __init__(self, store: EntryStore, clock: Clock, *, enabled: bool) -> None:
        self.due = False  # an update has asked for a sync
        self.enabled = enabled  # False with `store.flush: async`
        self._store = store
        self._clock = clock
        self._slow_until_ms = 0.0

    def claim(self, now_ms: float, received_bytes: int) -> bool:
        """Whether the calling thread must sync, by `sync_here`, once it has released the lock."""
        if not self.due or not self.enabled:
            return False
        if received_bytes > HERE_BYTES_MAX or now_ms < self._slow_until_ms:
            return False
        self.due = False
        return True

    def request(self) -> None:
        """Let the flush thread do what is due."""
        if self.due and self.enabled:
            self.due = False
            self._store.messages.flush_service.request()

    def sync_here(self, now_ms: float) -> None:
        """Sync in this thread; the store then tells the driver. Raises StoreBrokenError."""
        try:
            self._store.flush()
        except StoreBrokenError:
            raise
        except StoreError as failure:  # no sync was begun; the flush thread tries again
            log.error("%s", failure)
            self._store.messages.flush_service.request()
        took_ms = self._clock.monotonic_ms() - now_ms
        if took_ms > SLOW_MS:
            self._slow_until_ms = now_ms + took_ms + SLOW_FOR_MS


class Asked:
    """Who asked for something that takes a while; `done` is called once."""

    def __init__(self, done: OnSettled) -> None:
        self.done = done


class TermWaits:
    """The puts and other questions that wait; what is called in turn goes through `calls`.

    GroupTransferService holds the puts. It is told of each term before a put of the term is taken,
    and of the term's end before the next one: an entry of a later term may lie at the same offset.
    The calls are made without the driver's lock, so a term may end while it opens: `_guard` is held
    to compare and to change `_term` and `open_term` together. No other lock is taken with it.
    """

    def __init__(
        self, transfer: GroupTransferService, calls: OrderedCalls, on_disks: Callable[[], bool]
    ) -> None:
        """Prepare; `on_disks()` returns whether what is committed now is on a majority's disks."""
        # The term in which this node takes puts; 0: none. GroupTransferService knows this term.
        self.open_term = 0
        self._transfer = transfer
        self._calls = calls
        self._on_disks = on_disks
        self._guard = threading.Lock()
        self._term = 0
        self._serial = 0
        self._asked: list[Asked] = []

    def lead(self, term: int, committed_end: int) -> None:
        """Begin a term as leader; it is open once GroupTransferService knows of it."""
        if self._term == term:
            return
        self.end()
        with self._guard:
            self._term = term
        self._calls.add(partial(self._open, self._progress(committed_end)))

    def _open(self, progress: PutProgress) -> None:
        self._transfer.advance(progress)
        with self._guard:
            if self._term == progress.epoch:
                self.open_term = self._term

    def commit(self, committed_end: int) -> None:
        """Complete the puts that end at or before an offset; nothing on a follower."""
        if self._term:
            self._calls.add(partial(self._transfer.advance, self._progress(committed_end)))

    def end(self) -> None:
        """End the puts that wait, and the term: whether they are committed is not known."""
        if not self._term:
            return
        with self._guard:
            self._term = self.open_term = 0
        self._serial += 1
        self._calls.add(partial(self._abandon, self._serial))

    def ask(self, asked: Asked) -> None:
        """Remember who asked, until `settle` or `end_all`."""
        self._asked.append(asked)

    def settle(self, settled: Settled) -> None:
        """Tell who asked; the token of a put is no Asked."""
        if isinstance(settled.token, Asked):
            self._asked.remove(settled.token)
            self._calls.add(partial(settled.token.done, settled))

    def end_all(self, reason: str) -> None:
        """End everything: the core is not asked any more."""
        self.end()
        asked, self._asked = self._asked, []
        for one in asked:
            self._calls.add(partial(one.done, Settled(one, "TERM_CHANGED", reason=reason)))

    def _progress(self, end: int) -> PutProgress:
        self._serial += 1
        limits = dict.fromkeys(Need, end)
        if not self._on_disks():
            limits[Need.SLAVE_DISKS] = 0  # a put that asks for disks waits
        return PutProgress(self._serial, limits, self._level_of, None, self._term)

    def _level_of(self, _need: Need, _end_offset: int) -> str:
        return "QUORUM_DISK" if self._on_disks() else "QUORUM_MEM"

    def _abandon(self, serial: int) -> None:
        ended = self._transfer.abandon(serial)
        if ended:
            log.warning("%d waiting puts ended: whether they are committed is not known", ended)


class Pace:
    """How long the driver's thread sleeps between ticks; other threads move that, and wake it."""

    def __init__(self, clock: Clock) -> None:
        self.deadline_ms = 0.0  # when the core wants its next tick
        self.last_put_ms = float("-inf")
        self._clock = clock
        self._wakeup = threading.Condition()
        # When the thread wakes up; 0: it does not sleep; inf: it falls asleep.
        self._until_ms = 0.0

    def sleep(self, until_ms: float, stopping: threading.Event) -> None:
        """Sleep until a time or the deadline, whichever is sooner, or until `wake`."""
        with self._wakeup:
            self._until_ms = float("inf")  # a deadline that moves from here on wakes the thread
            now = self._clock.monotonic_ms()
            until = min(self.deadline_ms, until_ms)
            if now - self.last_put_ms < ACTIVE_MS:
                until = min(until, now + COARSE_MS)
            until = max(until, now + LEAST_MS)
            self._until_ms = until
            if not stopping.is_set():
                self._wakeup.wait((until - now) / 1000)
            self._until_ms = 0.0

    def wake_if_sooner(self) -> None:
        """Wake the thread if it would sleep well beyond the deadline."""
        if self.deadline_ms < self._until_ms - COARSE_MS:
            self.wake()

    def wake(self) -> None:
        """Wake the thread."""
        with self._wakeup:
            self._wakeup.notify()


class DiskRoom:
    """Whether the disk is full: the driver notes failures, and asks whether there is room again."""

    def __init__(self, store: EntryStore) -> None:
        self._messages = store.messages
        self._failure: str | None = None
        self._is_room = True  # it is a lack of room
        self._needed_bytes = ROOM_BYTES

    @property
    def full(self) -> bool:
        """Whether the disk counts as full."""
        return self._failure is not None

    @property
    def failure(self) -> str | None:
        """What found no room, and where; None while the disk does not count as full."""
        return self._failure

    def note(self, failure: Exception) -> bool:
        """Note a failure; return whether the disk counts as full only since then."""
        is_new = not self.full and (
            isinstance(failure, StoreFullError) or getattr(failure, "errno", None) in NO_ROOM
        )
        if is_new:
            self._failure = str(failure)
            self._is_room = not isinstance(failure, NoLogFileError)
            self._needed_bytes = max(ROOM_BYTES, getattr(failure, "needed_bytes", 0))
        return is_new

    def recovered(self) -> bool:
        """Return whether the disk was full until now, and has room again."""
        messages = self._messages
        if not self.full or messages.lacks_room or messages.free_bytes() < self._needed_bytes:
            return False
        self._failure = None
        return True

    @property
    def problem(self) -> str | None:
        """What an operator must look at; None if the store says it already."""
        failure = self._failure  # any thread may ask
        if failure is None or failure in self._messages.problems:
            return None
        if self._is_room:
            return f"the disk is full: {failure}"
        return f"the next log file cannot be made: {failure}"
