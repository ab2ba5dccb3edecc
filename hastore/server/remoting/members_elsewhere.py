"""The members of a consumer group as the other nodes have heard them.

A node that has just started hears of a group's members one by one, as each of them connects again.
By its own list a consumer would find itself alone, and take all queues from positions that are
seconds old, while the others go on. So for YOUNG_MS after a node has heard of a group's first
member, it answers GET_CONSUMER_LIST_BY_GROUP (38) with what all nodes know together.

One question about a group is under way at a time; who asks meanwhile gets the same answer. A node
that does not answer in time is not waited for again for SILENT_MS. Everything runs in the API's
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from hastore.errors import UNREADABLE
from hastore.protocol.remoting import Answer, Code, Frame
from hastore.server.remoting.door import Door

log = logging.getLogger(__name__)

YOUNG_MS = 60_000.0  # two heartbeats of a client
WAIT_MS = 1_000.0  # for the other nodes; clients wait for 3 s
SILENT_MS = 5_000.0
TICK_MS = 20.0  # how often it is looked for whether a link is open by now
WAITING_MAX = 10_000  # requests that wait for other nodes

# What the other nodes know together; None if none of them has said anything.
Then = Callable[[frozenset[str] | None], None]


class _IdList(msgspec.Struct):
    consumerIdList: list[str] = []


class _Question:
    """A question about a group that is under way."""

    __slots__ = ("asked", "ids", "then", "to_ask", "until_ms")

    def __init__(self, nodes: set[int], until_ms: float) -> None:
        self.to_ask = nodes
        self.asked: set[int] = set()  # these have not answered yet
        self.until_ms = until_ms
        self.ids: frozenset[str] | None = None
        self.then: list[Then] = []


class MembersElsewhere:
    """Asks the other nodes, of one node."""

    def __init__(self, door: Door, others: Callable[[], Iterable[int]]) -> None:
        """Prepare; `others` names the other nodes of the group."""
        self._door = door
        self._clock = door.parts.clock
        self._others = others
        self._questions: dict[str, _Question] = {}  # by group
        self._silent: dict[int, float] = {}  # until when a node is not waited for
        self._waiting = 0
        self._ticking = False

    def ask(self, group: str, then: Then) -> bool:
        """Let `then` have a group's client ids; False if too many wait.

        It is called at once if no other node can be asked.
        """
        question = self._questions.get(group)
        if question is None:
            now = self._clock.monotonic_ms()
            nodes = {node for node in self._others() if self._silent.get(node, 0.0) <= now}
            if not nodes or self._door.forwarding is None:
                then(None)
                return True
            question = _Question(nodes, now + WAIT_MS)
        if self._waiting >= WAITING_MAX:
            return False
        self._waiting += 1
        question.then.append(then)
        if len(question.then) == 1:
            self._questions[group] = question
            self._go_on(group, question)
            self._tick_soon()
        return True

    def _go_on(self, group: str, question: _Question) -> None:
        """Ask who was not asked yet, as far as it can be; answer if nobody is left."""
        forwarding = self._door.forwarding
        for node in list(question.to_ask):
            frame = Frame(Code.GET_CONSUMER_LIST_BY_GROUP, 0, fields={"consumerGroup": group})
            hear = partial(self._hear, group, question, node)
            if forwarding is not None and forwarding.ask(frame, hear, node):
                question.to_ask.discard(node)
                question.asked.add(node)
        now = self._clock.monotonic_ms()
        if question.until_ms <= now:
            for node in question.to_ask | question.asked:
                self._silent[node] = now + SILENT_MS
            self._end(group, question)

    def _hear(self, group: str, question: _Question, node: int, answer: Frame | None) -> None:
        question.asked.discard(node)
        if answer is not None and self._questions.get(group) is question:
            try:
                ids: Iterable[str] = ()  # a code other than 0: it knows none
                if answer.code == Answer.SUCCESS:
                    ids = msgspec.json.decode(answer.body, type=_IdList).consumerIdList
                question.ids = (question.ids or frozenset()).union(ids)
            except UNREADABLE as failure:
                log.warning("node %d answers what is no list of client ids: %s", node, failure)
        if not question.asked and not question.to_ask:
            self._end(group, question)

    def _end(self, group: str, question: _Question) -> None:
        if self._questions.get(group) is question:
            del self._questions[group]
            self._waiting -= len(question.then)
            for then in question.then:
                self._door.later(partial(then, question.ids))

    def _tick_soon(self) -> None:
        if self._questions and not self._ticking:
            self._ticking = True
            self._door.at(self._clock.monotonic_ms() + TICK_MS, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        for group, question in list(self._questions.items()):
            self._go_on(group, question)
        self._tick_soon()
