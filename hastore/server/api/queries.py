"""Requests that only read: what the node knows at once, and queries, which a thread answers.

    at once      one topic, a producer's progress, the cluster map, the status
    queries      by key, by time, by offset: they read the index, the queues and the log
                 all topics, with the queues of each

A query may look at a million entries of the index, and the disk may be slow. So QueryService
answers it in a thread of its own: no put and no other client waits for it. The thread takes turns:
of each connection that has queries it serves the first one for a slice of about SLICE_MS, then the
next connection's. While the log grows it rests between the slices (`Pace`).

Between two slices a failover may cut the log. What was read before may then be cut away, and what
lies below the readable offset of before may not be confirmed. So a query by key or offset begins
anew if the epoch history has changed; ranges.py explains why that is enough.

Each query is bounded, by the bounds of KeySearch, by TIME_STEPS, and by LIMIT_MS from its arrival
on. One that meets a bound is answered with what was found, and the answer says so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from hastore.clock import Clock
from hastore.errors import CorruptRecordError, UsageError
from hastore.protocol.api import (
    MAX_KEY_MESSAGES,
    AskConfigs,
    AskMap,
    AskProducer,
    AskStatus,
    AskTopics,
    Configs,
    Failed,
    FindKey,
    FindOffset,
    FindTime,
    Found,
    Map,
    NodeStatus,
    ProducerKnown,
    Query,
    Reading,
    Reply,
    TimeFound,
    TopicInfo,
    Topics,
)
from hastore.record.topic_records import OWN_PREFIX, TopicConfig
from hastore.server.api.backend import ApiBackend, ApiStore, Search
from hastore.server.api.connections import Connection
from hastore.server.api.ranges import AnsweringService, Done
from hastore.service import OnFailure

Answer = tuple[Any, bytes | None]  # a Reply and its records; of an OwnQuery whatever it found
MAX_FOUND_BYTES = 8 * 1024 * 1024
MAX_QUERIES_OF_ONE = 64  # queries of a connection that wait
MAX_QUERIES = 1_000  # the same, of all connections, but one of each
TIME_STEPS = 256  # messages that a query by time looks at; without falls of the clock 40 are enough
LISTED_QUEUES_MAX = 500_000  # of all topics together, in one answer
_EMPTY = (0, 0)
_NAMES_OF_A_STEP = 64
REPLAY_S = 0.1  # replay lags by milliseconds, unless it has stopped
LIMIT_MS = 3_000.0  # from a query's arrival on; clients wait a little longer


def answer_at_once(backend: ApiBackend, request: Reading) -> Reply:
    """Return the reply to a request for what the node knows."""
    if isinstance(request, AskMap):
        return Map(request.rid, backend.master_map())
    if isinstance(request, AskStatus):
        return NodeStatus(request.rid, backend.status())
    if isinstance(request, AskTopics):
        return _topics(backend, request)
    if isinstance(request, AskConfigs):
        return _configs(backend, request)
    return _producer(backend, request)


def _topics(backend: ApiBackend, request: AskTopics) -> Reply:
    """Return the queues of one topic."""
    table, name = backend.store.topic_table, request.topic
    assert name is not None, "QueryService lists all topics"
    one, config = _shown(backend, name), table.recorded(name)
    topics = {name: one} if one else {}
    count = backend.master_map().default_queues
    if config is not None:  # which says what queues there are
        topics[name] = _ranges(backend, config)
        count = len(topics[name])
    return Topics(request.rid, topics, count, _ended(backend, topics))


def _shown(backend: ApiBackend, name: str) -> dict[int, tuple[int, int]]:
    """Return the range of each queue of a topic that nobody configured.

    Of a topic that was deleted and made again also those without a message: they go on where they
    ended, and a reader that begins now must not take the first message there for a later one.
    """
    queues, table = backend.store.queues, backend.store.topic_table
    one, emptied = queues.queues_of(name), queues.emptied_of(name)
    config = table.find(name) if one and emptied else None
    count = 0 if config is None else config.read_queues
    found = one | {queue: limits for queue, limits in emptied.items() if queue < count}
    return {queue: found[queue] for queue in sorted(found)}


def _ended(backend: ApiBackend, topics: Iterable[str]) -> dict[str, dict[int, int]]:
    """Return where the last deletion of each of these topics ended its queues."""
    store = backend.store
    found = ((name, store.queues.ended(name, store.min_offset)) for name in topics)
    return {name: ended for name, ended in found if ended}


def _ranges(backend: ApiBackend, config: TopicConfig) -> dict[int, tuple[int, int]]:
    """Return the range of each queue that consumers of a recorded topic read."""
    queue_range, name = backend.store.queues.queue_range, config.name
    return {queue: queue_range(name, queue) or _EMPTY for queue in range(config.read_queues)}


def _configs(backend: ApiBackend, request: AskConfigs) -> Reply:
    """Return the configuration of one topic."""
    name = request.topic
    assert name is not None, "QueryService lists all topics"
    one = None if name.startswith(OWN_PREFIX) else backend.store.find_topic(name)
    return Configs(request.rid, [] if one is None else [_info(backend, one)])


def _info(backend: ApiBackend, one: TopicConfig) -> TopicInfo:
    return TopicInfo(
        one.name, one.read_queues, one.write_queues, one.perm, one.order, one.sys_flag,
        one.attributes, backend.store.topic_table.recorded(one.name) is not None,
    )  # fmt: skip


def _lacking(rid: int, store: ApiStore, end: int) -> Failed | None:
    """Refuse, if the queues and the index lack records below `end`; None if they have them all."""
    come = store.dispatched_offset
    if come >= end or (store.replay_problem is None and come >= store.whole_offset):
        return None
    why = store.replay_problem or "it is late: try again"
    return Failed(
        rid,
        "BUSY",
        f"replay has come to offset {come:,}, and has not read what is stored after it: {why}",
    )


def _producer(backend: ApiBackend, request: AskProducer) -> Reply:
    """Return how far a producer came. Only a master whose window has the whole log answers."""
    reason = backend.writable_reason()
    if reason is not None:
        master = backend.master_map().master_api
        return Failed(request.rid, "SERVICE_NOT_AVAILABLE", reason, master)
    epoch = backend.epoch()
    progress = backend.store.producer_progress(request.producer.encode())
    if progress is None:
        return Failed(request.rid, "BUSY", "replay has not reached the log's end yet")
    return ProducerKnown(request.rid, epoch, progress.last, progress.forgotten)


Listing = AskTopics | AskConfigs  # of all topics
Sees = Callable[[str], bool]  # which topics a list may name


def everything(_topic: str) -> bool:
    """Let a list name every topic."""
    return True


Steps = Callable[[Callable[[], bool]], Iterator[Answer | None]]


class OwnQuery(NamedTuple):
    """A query that the node makes for a client of another protocol.

    `steps(is_late)` answers it step by step, in the thread of QueryService: None, while there is
    more to do, then the answer. `respond` gets that, or Failed, in the API's thread.
    """

    steps: Steps
    respond: Callable[[Any, bytes | None], None]
    rid: int = 0


class _Waiting(NamedTuple):
    connection: Connection
    request: Query | Listing | OwnQuery
    deadline_ms: float
    steps: Iterator[Answer | None]  # None: there is more to do


class QueryService(AnsweringService):
    """Answer queries and lists of all topics, a slice of each connection's in turn."""

    def __init__(
        self,
        backend: ApiBackend,
        clock: Clock,
        on_done: Callable[[], None],
        *,
        on_failure: OnFailure,
    ) -> None:
        """Prepare; `on_done` is called from the thread after each query that has an answer."""
        super().__init__("QueryService", backend, clock, on_done, on_failure=on_failure)
        self._clock = clock
        self._changed = threading.Condition()  # protects the next two
        self._waiting: dict[Connection, deque[_Waiting]] = {}
        self._turns: deque[Connection] = deque()  # each of `_waiting` once

    # -- called by the API's thread ----------------------------------------------------------------

    def accept_query(
        self, connection: Connection, request: Query | Listing | OwnQuery,
        sees: Sees = everything,
    ) -> str | None:  # fmt: skip
        """Take a query; return why not if too many wait. `sees` is asked by the thread.

        One of each connection is taken: a few others, who ask again at once, cannot keep it out.
        """
        own = self._of_one.get(connection, 0)
        if own and (own >= MAX_QUERIES_OF_ONE or self.pending >= MAX_QUERIES):
            return "too many queries wait"
        self._count(connection)
        deadline_ms = self._clock.monotonic_ms() + LIMIT_MS
        steps = self._steps(request, deadline_ms, sees)
        with self._changed:
            if connection not in self._waiting:
                self._waiting[connection] = deque()
                self._turns.append(connection)
            self._waiting[connection].append(_Waiting(connection, request, deadline_ms, steps))
            self._changed.notify()
        return None

    # -- the thread --------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the thread, so that it sees `stopping`."""
        with self._changed:
            self._changed.notify()

    def run(self) -> None:
        """Work until stopped; queries that still wait then get no answer."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turns or self.stopping.is_set())
                if self.stopping.is_set():
                    return
                connection = self._turns.popleft()
                query = self._waiting[connection][0]
            answer = self._slice(query)
            with self._changed:
                of_one = self._waiting[connection]
                if answer is not None:
                    of_one.popleft()
                if of_one:
                    self._turns.append(connection)
                else:
                    del self._waiting[connection]
            if answer is not None:
                self._done.append(Done(connection, query.request, answer))
                self._on_done()
                self._pace.rests()

    def _slice(self, query: _Waiting) -> Answer | Exception | None:
        """Work on a query for a slice; return its answer, or None if it is not done."""
        self._pace.begin()
        try:
            while True:
                if query.connection.ended:
                    return Failed(query.request.rid, "BUSY", "the connection has ended"), None
                answer = next(query.steps)
                if answer is not None or self._pace.rests() or self.stopping.is_set():
                    return answer
        except Exception as failure:  # this query's failure; the API answers with it
            return failure

    def _steps(
        self, request: Query | Listing | OwnQuery, deadline_ms: float, sees: Sees
    ) -> Iterator[Answer | None]:
        """Answer a query step by step; nothing is read before the first step."""

        def is_late() -> bool:
            return self._clock.monotonic_ms() >= deadline_ms

        if is_late():
            yield Failed(request.rid, "BUSY", "too many queries wait; ask again later"), None
        elif isinstance(request, OwnQuery):
            yield from request.steps(is_late)
        elif isinstance(request, AskTopics):
            yield from self.all_topics(request, sees)
        elif isinstance(request, AskConfigs):
            yield from self.all_configs(request, sees)
        elif isinstance(request, FindKey):
            yield from self.by_key(request, is_late)
        elif isinstance(request, FindTime):
            yield self.by_time(request, is_late), None
        else:
            yield self.by_offset(request)

    def all_topics(self, request: AskTopics, sees: Sees) -> Iterator[Answer | None]:
        """List the queues of all topics that `sees` allows."""
        backend, topics = self._backend, dict[str, dict[int, tuple[int, int]]]()
        for number, (name, queues) in enumerate(backend.store.queues.topics().items()):
            if sees(name):
                topics[name] = queues
            if number % _NAMES_OF_A_STEP == 0:
                yield None
        ended: dict[str, dict[int, int]] = {}
        count = sum(map(len, topics.values()))
        for number, config in enumerate(backend.store.topic_table.all()):
            if number % _NAMES_OF_A_STEP == 0:
                yield None
            name = config.name
            if name not in topics and not sees(name):
                continue
            if backend.store.topic_table.recorded(name) is not None:
                count += config.read_queues - len(topics.get(name, ()))
                if count > LISTED_QUEUES_MAX:
                    break
                topics[name] = _ranges(backend, config)
            elif name in topics and backend.store.queues.emptied_of(name):
                topics[name] = _shown(backend, name) or topics[name]
            if name in topics:
                ended |= _ended(backend, (name,))
        if count > LISTED_QUEUES_MAX:
            reason = (
                f"the topics have more than {LISTED_QUEUES_MAX:,} queues: ask for each topic by its"
                " name, or give topics fewer queues (`hastore topics set`)"
            )
            yield Failed(request.rid, UsageError.__name__, reason), None
            return
        yield Topics(request.rid, topics, backend.master_map().default_queues, ended), None

    def all_configs(self, request: AskConfigs, sees: Sees) -> Iterator[Answer | None]:
        """List the configurations of all topics that `sees` allows."""
        found = []
        for number, config in enumerate(self._backend.store.topic_table.all()):
            if sees(config.name):
                found.append(_info(self._backend, config))
            if number % _NAMES_OF_A_STEP == 0:
                yield None
        yield Configs(request.rid, found), None

    def by_key(self, request: FindKey, is_late: Callable[[], bool]) -> Iterator[Answer | None]:
        """Find records by a key, the latest first.

        A node whose replay has not come to what was readable at first does not say that there are
        none: the index may lack them.
        """
        before, store = None, self._backend.store
        end = store.readable_offset
        if store.dispatched_offset < end and store.replay_problem is None:
            store.wait_dispatched(end, REPLAY_S)
        while before != (history := tuple(self._backend.history())):
            before = history
            search = self._search(request)
            while not search.ended:
                if is_late():
                    search.cut_short()
                else:
                    search.step()
                    yield None
        records = list(search.found.values())
        unreadable = search.unreadable[:MAX_KEY_MESSAGES]
        lacking = None if records or unreadable else _lacking(request.rid, store, end)
        if lacking is not None:
            yield lacking, None
            return
        found = Found(request.rid, len(records), search.cut_ms, unreadable, search.cut_offset)
        yield found, b"".join(records)

    def _search(self, request: FindKey) -> Search:
        store = self._backend.store
        return store.reader.search_key(
            request.topic,
            request.key,
            max_messages=request.max_messages,
            begin_ms=request.begin_ms,
            end_ms=request.end_ms,
            limit_offset=min(store.readable_offset, request.before),
            max_bytes=MAX_FOUND_BYTES,
        )

    def by_offset(self, request: FindOffset) -> Answer:
        """Find the record at an offset, if readers may see it."""
        store = self._backend.store
        raw, damaged, before = None, False, None
        while before != (history := tuple(self._backend.history())):
            before, raw, damaged = history, None, False
            if store.min_offset <= request.offset < store.readable_offset:
                raw = store.reader.record_bytes(request.offset)
                damaged = raw is None and store.reader.is_damaged(request.offset)
        if raw is None and damaged:
            store.reader.note_damage(request.offset)
            reason = f"the record at offset {request.offset} is damaged; see `hastore log verify`"
            return Failed(request.rid, CorruptRecordError.__name__, reason), None
        if raw is None or request.offset + len(raw) > store.readable_offset:
            return Found(request.rid, 0), b""
        return Found(request.rid, 1), raw

    def by_time(self, request: FindTime, is_late: Callable[[], bool]) -> Reply:
        """Find the first record of a queue stored at or after a time."""
        store, topic, queue_id = self._backend.store, request.topic, request.queue_id
        if store.queues.queue_range(topic, queue_id) is None:
            return Failed(request.rid, "NO_SUCH_QUEUE", f"that topic has no queue {queue_id}")
        steps, cut_short = 0, False

        def is_spent() -> bool:
            nonlocal steps, cut_short
            steps += 1
            cut_short = cut_short or steps > TIME_STEPS or is_late() or self.stopping.is_set()
            return cut_short

        found = store.reader.queue_offset_by_time(topic, queue_id, request.timestamp_ms, is_spent)
        return TimeFound(request.rid, found, cut_short)
