"""A member's side of a group that shares its queues: who is in it, which queues, whose locks.

    Join, to every node  -->  the master's list of members  -->  the queues that are this member's
        missing ones: Lock  -->  granted: `assigned`, read from the group's position on
        too many:     `revoked`  -->  given back by Unlock, once the listener was told
        all:          Lock again each RENEW_MS; not granted, or the lease is over: `fenced`

A queue is read only under its lock at the master, until its lease is over by this client's own
clock. The lease counts from when the request was sent, so it ends before the lock does. Nothing
here waits: `advance` sends what is due, `on_arrival` takes what comes, and `take_event` says what
the listener must be told.

Which queues are a member's follows from all members' ids (protocol/allocation.py). What falls to a
member that does not read the topic the master gives to others: `more` of its answer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hastore.client.connections.requester import FOR_NOW, Requester, error_of
from hastore.client.connections.transport import Arrival
from hastore.client.consumer.beginnings import Beginnings
from hastore.client.consumer.retry_watch import RetryWatch
from hastore.client.consumer.shared_fetcher import SharedFetcher, SharedQueue
from hastore.client.consumer.subscription import TopicQueue, Wanted
from hastore.clock import Clock
from hastore.errors import ClientError, ForbiddenError
from hastore.protocol import api
from hastore.protocol.allocation import in_order, share_of
from hastore.record.delays import RETRY_PREFIX
from hastore.record.message_filter import TAGS

log = logging.getLogger(__name__)

JOIN_MS = 10_000.0  # between two Joins to a node
RENEW_MS = 10_000.0  # between two renewals of all locks
LIST_MS = 5_000.0  # how often patterns are compared with the names of all topics
ANSWER_MS = 3_500.0  # a request without an answer is sent again; a master decides within 3 s
AGAIN_MS = 100.0  # after a refusal; doubled up to AGAIN_MS_MAX while a lock is another member's
AGAIN_MS_MAX = 1_000.0
LOCK_MS = 60_000.0  # how long a lock may live at a master that has not answered
BELIEF = 0.9  # the part of a lock's time for which it is believed in: clocks may differ in speed
OLD_MS = 30_000.0  # until a node that seems to be too old is sent a Join again
NAMED = 8  # queues in a text
OLD_MAX = 3  # ends of a connection that never answered a Join: the node is too old
ASSIGNED, REVOKED, FENCED = "assigned", "revoked", "fenced"


class Event(NamedTuple):
    """What the listener must be told."""

    kind: str
    queues: list[TopicQueue]


class _Asked:
    """A request to the master that is under way."""

    __slots__ = ("address", "queues", "rid", "sent_ms")

    def __init__(self, rid: int, address: str, sent_ms: float, queues: list[TopicQueue]) -> None:
        self.rid = rid
        self.address = address
        self.sent_ms = sent_ms
        self.queues = queues


class _Node:
    """What this member has said to a node."""

    __slots__ = ("ends", "has_answered", "next_ms", "rid")

    def __init__(self) -> None:
        self.next_ms = 0.0  # when the next Join is due
        self.rid: int | None = None  # of the last Join
        self.has_answered = False
        self.ends = 0  # of the connection, after a Join and without an answer to any


Begin = Callable[[TopicQueue, api.Place], api.Position]


class Sharing:
    """The membership of one consumer; used by one thread at a time."""

    fetcher: SharedFetcher  # set right after both are made: each gets the other's arrivals

    def __init__(
        self,
        requester: Requester,
        clock: Clock,
        wanted: Wanted,
        group: str,
        member: str,
        token: int,
        begin: Begin,
        beginnings: Beginnings | None,
    ) -> None:
        """Prepare; `begin` says where to begin in a queue that was assigned.

        `beginnings`, of a member that starts at the latest: it asks before the member joins.
        """
        self._requester = requester
        self._clock = clock
        self._wanted = wanted
        self._group = group
        self.member = member
        self._token = token
        self._begin = begin
        self._beginnings = beginnings
        self._retries = RetryWatch(requester, group)
        self._nodes: dict[str, _Node] = {}
        self._topics = set(wanted.names)  # patterns add to them
        self._list_rid: int | None = None
        self._next_list_ms = 0.0
        self._has_listed = False
        self._master: str | None = None
        self.joined: api.Joined | None = None  # the master's answer
        self._mine: set[TopicQueue] = set()  # by that answer
        self._missing_told: set[str] = set()
        self._refused: str | None = None  # why the group may not consume, as it was told last
        self._is_closing = False
        self._taking: _Asked | None = None
        self._next_take_ms = 0.0
        self._again_ms = AGAIN_MS
        self._renewing: _Asked | None = None
        self._next_renew_ms = 0.0
        self._unlocking: _Asked | None = None
        self._giving: dict[TopicQueue, float] = {}  # locks to give back, and when they end anyway
        self._events: deque[Event] = deque()
        self._telling: list[Event] = []  # what the listener is told now, or was before an interrupt
        self._failure: ClientError | None = None
        self._next_ms = 0.0  # when `advance` has something to do
        self.moved: dict[TopicQueue, int] = {}  # by an administrator; the core seeks
        # Lost with positions that are not committed, until the listener was told: a commit that
        # had nothing left to send would look like a commit of these.
        self.lost: dict[TopicQueue, SharedQueue] = {}

    # -- what the core calls

    def take_event(self, calls: int) -> Event | None:
        """Return what the listener must be told next; `told` says that it was.

        `calls`: how many calls of the listener are under way, since it may poll. What another call
        was to tell comes first: that was interrupted.
        """
        # Whatever instruction an interrupt comes at: an event is told twice rather than never.
        while len(self._telling) > calls:
            self._events.appendleft(self._telling[-1])
            del self._telling[-1]
        while self._events:
            kind, queues = self._events[0]
            if kind != FENCED:  # some of them may be lost since
                queues = [name for name in queues if name in self.fetcher.mine]
            if queues:
                self._telling.append(Event(kind, queues))
            self._events.popleft()
            if queues:
                return self._telling[-1]
        return None

    def told(self, event: Event) -> None:
        """Forget an event of which the listener was told."""
        if event.kind == FENCED:
            for name in event.queues:
                self.lost.pop(name, None)
        self._telling = [each for each in self._telling if each is not event]

    def lost_untold(self, calls: int) -> list[TopicQueue]:
        """Return which of `lost` the listener neither was told of nor is told of now.

        `calls`: as for `take_event`.
        """
        telling = {
            name for event in self._telling[:calls] if event.kind == FENCED for name in event.queues
        }
        return sorted(self.lost.keys() - telling)

    def raise_failure(self) -> None:
        """Raise what the master has refused for good."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def renew_now(self) -> None:
        """Ask for all locks again at once: one of them seems to be another member's."""
        self._next_renew_ms = self._next_ms = 0.0

    def recover(self) -> None:
        """Forget requests under way, after a call was interrupted anywhere."""
        self._forget_taking()
        self._renewing = self._unlocking = None
        self._list_rid = None
        self._retries.recover()
        if self._beginnings is not None:
            self._beginnings.recover()
        for node in self._nodes.values():
            node.next_ms = 0.0
        self._next_take_ms = self._next_renew_ms = self._next_list_ms = self._next_ms = 0.0
        # Whether the listener was told may be unknown: it is told again of what must leave.
        self._events = deque(each for each in self._events if each.kind != REVOKED)
        for queue in self.fetcher.mine.values():
            queue.is_leaving = False
        if self.joined is not None:
            self._share_out(self.joined)

    def give_back(self, queues: Iterable[TopicQueue]) -> None:
        """Stop reading queues, and give their locks back."""
        for name in queues:
            queue = self.fetcher.mine.get(name)
            if queue is not None:
                self._giving[name] = queue.lease_ms
                self.fetcher.drop(name)
        self._next_ms = 0.0

    @property
    def is_giving(self) -> bool:
        """Whether a lock is still to be given back."""
        return bool(self._giving)

    def revoke_all(self) -> list[TopicQueue]:
        """Want no queue any more; return those that the member has."""
        self._is_closing = True
        self._retries.is_wanted = False
        self._mine = set()
        self._events.clear()
        self._forget_taking()
        mine = list(self.fetcher.mine.values())
        for queue in mine:
            queue.is_leaving = True
        return [queue.name for queue in mine]

    def leave(self) -> None:
        """Say to all nodes that this member leaves: then the others ask for its locks."""
        transport = self._requester.transport
        for address in self._requester.cluster.addresses:
            if transport.is_up(address):
                rid = self._requester.next_rid()
                transport.send(address, api.Leave(rid, self._group, self.member))

    def advance(self) -> float:
        """Send what is due; return the ms until there is something else to do."""
        now = self._clock.monotonic_ms()
        if now >= self._next_ms:
            self._next_ms = now + AGAIN_MS_MAX
            self._end_leases(now)
            self._look_at_master()
            self._join(now)
            self._list(now)
            if self._master is not None:
                self._unlock(now, self._master)
                self._renew(now, self._master)
                self._take(now, self._master)
                self._by(self._retries.look(self._master, now))
        return max(0.0, self._next_ms - now)

    def _by(self, when_ms: float) -> None:
        """Let `advance` look again at that time at the latest."""
        self._next_ms = min(self._next_ms, when_ms)

    # -- who is there

    def _look_at_master(self) -> None:
        master = self._requester.cluster.master
        if master == self._master:
            return
        self._master = master
        if master is not None:
            self._node(master).next_ms = 0.0
            self._next_renew_ms = self._next_take_ms = 0.0

    def _node(self, address: str) -> _Node:
        return self._nodes.setdefault(address, _Node())

    def _join(self, now: float) -> None:
        transport = self._requester.transport
        if self._is_closing:
            return
        beginnings = self._beginnings
        if beginnings is not None and not beginnings.learn(self._topics, self._master, now):
            self._by(now + AGAIN_MS)
            return
        for address in self._requester.cluster.addresses:
            node = self._node(address)
            if not transport.is_up(address):
                continue
            if now >= node.next_ms:
                rid = self._requester.next_rid()
                topics = [self._subscription(topic) for topic in sorted(self._topics)]
                request = api.Join(rid, self._group, self.member, self._token, topics)
                if transport.send(address, request):
                    node.rid, node.next_ms = rid, now + JOIN_MS
                else:
                    node.next_ms = now + AGAIN_MS
            self._by(node.next_ms)

    def _subscription(self, topic: str) -> api.Subscription:
        """Return what this member reads of a topic, as the group's other members are told."""
        wanted = self.fetcher.wanted
        if wanted is None or topic.startswith(RETRY_PREFIX):
            return api.Subscription(topic)
        return api.Subscription(topic, wanted.expression, "TAG" if wanted.kind == TAGS else "SQL92")

    def _list(self, now: float) -> None:
        """Ask which topics there are, for the patterns."""
        if not self._wanted.has_patterns or self._master is None or self._is_closing:
            return
        if now >= self._next_list_ms:
            rid = self._requester.next_rid()
            sent = self._requester.transport.send(self._master, api.AskConfigs(rid))
            self._list_rid = rid if sent else None
            self._next_list_ms = now + (LIST_MS if sent else AGAIN_MS)
        self._by(self._next_list_ms)

    def _listed(self, topics: Iterable[str]) -> None:
        found = self._wanted.names.union(filter(self._wanted.matches, topics))
        if len(found) > api.MAX_SUBSCRIPTIONS:
            self._failure = ClientError(
                f"the patterns {self._wanted} match {len(found):,} topics; at most "
                f"{api.MAX_SUBSCRIPTIONS:,}"
            )
            return
        if found != self._topics:
            if self._beginnings is not None and self._has_listed:
                self._beginnings.came(found - self._topics)
            self._topics = set(found)
            for node in self._nodes.values():
                node.next_ms = 0.0
            self._next_ms = 0.0
        self._has_listed = True

    def _take_joined(self, address: str, joined: api.Joined) -> None:
        node = self._node(address)
        node.has_answered, node.ends = True, 0
        if address != self._requester.cluster.master:
            return
        forbidden = self._wanted.names.intersection(joined.forbidden)
        if forbidden:
            self._failure = ForbiddenError(
                f"this client's identity has no right to consume {', '.join(sorted(forbidden))}"
            )
        for topic in joined.missing:
            if topic not in self._missing_told:
                self._missing_told.add(topic)
                log.warning(
                    "group %s: topic %s does not exist yet; it is read once it does",
                    self._group, topic,
                )  # fmt: skip
        retries = self._retries.topic
        if retries in joined.forbidden and retries not in self._missing_told:
            self._missing_told.add(retries)
            log.warning(
                "group %s: this client's identity has no right to read %s: what is sent back in the"
                " group, and falls to it, waits for a member of hastore's that has; whoever keeps"
                " the nodes' file of identities can add the group to its `groups`",
                self._group, retries,
            )  # fmt: skip
        if joined.refused != self._refused:
            self._refused = joined.refused
            if joined.refused is None:
                log.warning("group %s may consume again", self._group)
            else:
                log.warning("group %s may not consume: %s", self._group, joined.refused)
        self.joined = joined
        if self._beginnings is not None and joined.refused is None:  # else all numbers are 0
            self._beginnings.joined(joined)
        self._share_out(joined)

    def _share_out(self, joined: api.Joined) -> None:
        """Find which queues are this member's, and revoke those that are not any more."""
        if self._is_closing:
            return
        members = in_order(joined.members)
        is_there = self._retries.topic in joined.topics
        self._retries.is_wanted = not is_there and bool(share_of(1, members, self.member))
        mine = {
            TopicQueue(topic, queue)
            for topic, count in joined.topics.items()
            for queue in (*share_of(count, members, self.member), *joined.more.get(topic, ()))
        }
        if mine != self._mine:
            self._mine = mine
            self._next_take_ms, self._again_ms = 0.0, AGAIN_MS
        leaving = [
            queue for name, queue in self.fetcher.mine.items()
            if name not in mine and not queue.is_leaving
        ]  # fmt: skip
        for queue in leaving:
            queue.is_leaving = True
        if leaving:
            self._events.append(Event(REVOKED, sorted(queue.name for queue in leaving)))
        self._next_ms = 0.0

    # -- locks

    def _end_leases(self, now: float) -> None:
        ended = [queue for queue in self.fetcher.mine.values() if queue.lease_ms <= now]
        self._lose(ended)
        for name, until_ms in list(self._giving.items()):
            if until_ms <= now:
                del self._giving[name]
        for queue in self.fetcher.mine.values():
            self._by(queue.lease_ms)

    def _lose(self, queues: list[SharedQueue]) -> None:
        if not queues:
            return
        names = sorted(queue.name for queue in queues)
        self._events.append(Event(FENCED, names))  # first: what is in `lost` will be told
        for queue in queues:
            if queue.is_unsure or queue.kept != queue.next.queue_offset:
                self.lost[queue.name] = queue
            self.fetcher.drop(queue.name)
        self._next_take_ms, self._again_ms = 0.0, AGAIN_MS
        log.warning("group %s: %s lost %s", self._group, self.member, first_names(names))

    def _ask(
        self, now: float, address: str, queues: list[TopicQueue],
        make: Callable[[int, dict[str, list[int]]], api.Request],
    ) -> _Asked | None:  # fmt: skip
        by_topic: dict[str, list[int]] = {}
        for topic, queue in queues:
            by_topic.setdefault(topic, []).append(queue)
        rid = self._requester.next_rid()
        if not self._requester.transport.send(address, make(rid, by_topic)):
            self._by(now + AGAIN_MS)
            return None
        self._by(now + ANSWER_MS)
        return _Asked(rid, address, now, queues)

    def _waits(self, asked: _Asked | None, now: float) -> bool:
        """Whether a request is under way, and may still be answered."""
        if asked is None or asked.sent_ms + ANSWER_MS <= now:
            return False
        self._by(asked.sent_ms + ANSWER_MS)
        return True

    def _unlock(self, now: float, master: str) -> None:
        if self._waits(self._unlocking, now) or not self._giving:
            return
        queues = list(self._giving)[: api.MAX_LOCK_QUEUES]
        self._unlocking = self._ask(
            now, master, queues, lambda rid, by: api.Unlock(rid, self._group, self.member, by)
        )

    def _renew(self, now: float, master: str) -> None:
        if self._waits(self._renewing, now):
            return
        if not self.fetcher.mine:
            return
        if now < self._next_renew_ms:
            self._by(self._next_renew_ms)
            return
        # The longest unrenewed first, if one request has no room for all.
        queues = sorted(self.fetcher.mine.values(), key=lambda one: one.lease_ms)
        names = [queue.name for queue in queues[: api.MAX_LOCK_QUEUES]]
        self._renewing = self._ask(
            now, master, names, lambda rid, by: api.Lock(rid, self._group, self.member, by)
        )
        if self._renewing is not None:
            more = len(queues) > len(names)
            self._next_renew_ms = now + (AGAIN_MS if more else RENEW_MS)

    def _take(self, now: float, master: str) -> None:
        if self._waits(self._taking, now):
            return
        self._forget_taking()
        missing = [
            name for name in self._mine
            if name not in self.fetcher.mine and name not in self._giving
        ]  # fmt: skip
        if not missing:
            return
        if now < self._next_take_ms:
            self._by(self._next_take_ms)
            return
        queues = sorted(missing)[: api.MAX_LOCK_QUEUES]
        self._taking = self._ask(
            now, master, queues,
            lambda rid, by: api.Lock(rid, self._group, self.member, by, places=True),
        )  # fmt: skip

    def _forget_taking(self) -> None:
        """Forget a request for locks, which the master may have given without our knowing."""
        asked, self._taking = self._taking, None
        if asked is not None:
            until_ms = asked.sent_ms + ANSWER_MS + LOCK_MS
            self._giving.update(
                (name, until_ms) for name in asked.queues
                if name not in self._mine and name not in self.fetcher.mine
            )  # fmt: skip

    # -- what arrives

    def on_arrival(self, arrival: Arrival) -> None:
        """Take an arrival, if it is about this membership."""
        reply, address = arrival.reply, arrival.address
        beginnings = self._beginnings
        if self._requester.cluster.master != self._master:
            self._next_ms = 0.0
        if beginnings is not None and beginnings.take(arrival, self._clock.monotonic_ms()):
            self._next_ms = 0.0
            if isinstance(reply, api.Failed) and reply.status in FOR_NOW:
                self._is_refused(reply)
            return
        if self._retries.take(arrival, self._clock.monotonic_ms()):
            self._node(address).next_ms = self._next_ms = 0.0
        if reply is None:
            self._connection(arrival)
        elif isinstance(reply, api.Notice):
            self._notice(address, reply)
        elif self._renewing is not None and reply.rid == self._renewing.rid:
            asked, self._renewing = self._renewing, None
            self._renewed(asked, reply)
        elif self._taking is not None and reply.rid == self._taking.rid:
            asked, self._taking = self._taking, None
            self._took(asked, reply)
        elif self._unlocking is not None and reply.rid == self._unlocking.rid:
            asked, self._unlocking = self._unlocking, None
            if not self._is_refused(reply):
                for name in asked.queues:
                    self._giving.pop(name, None)
                self._next_ms = 0.0
        elif reply.rid == self._list_rid:
            self._list_rid = None
            if isinstance(reply, api.Configs):
                self._listed(one.name for one in reply.topics)
        elif reply.rid == self._node(address).rid:
            self._node(address).rid = None
            if isinstance(reply, api.Joined):
                self._take_joined(address, reply)
            else:
                self._node(address).next_ms = self._clock.monotonic_ms() + AGAIN_MS_MAX
                if address == self._requester.cluster.master:
                    self._is_refused(reply)

    def _connection(self, arrival: Arrival) -> None:
        node = self._node(arrival.address)
        self._next_ms = 0.0
        if node.ends < OLD_MAX:
            node.next_ms = 0.0
        if arrival.up:
            return
        if node.rid is not None and not node.has_answered:
            node.ends += 1
            if node.ends >= OLD_MAX:
                node.next_ms = self._clock.monotonic_ms() + OLD_MS
                if arrival.address == self._master:
                    self._failure = ClientError(
                        f"{arrival.address} closed the connection {OLD_MAX} times at a Join: its "
                        "hastore is too old to share queues; upgrade the nodes of the group"
                    )
        node.rid = None
        if self._taking is not None and self._taking.address == arrival.address:
            self._forget_taking()
        if self._renewing is not None and self._renewing.address == arrival.address:
            self._renewing = None
        if self._unlocking is not None and self._unlocking.address == arrival.address:
            self._unlocking = None
        self._next_renew_ms = 0.0

    def _notice(self, address: str, notice: api.Notice) -> None:
        if notice.group != self._group:
            return
        if notice.topic is not None:
            self.moved.update(
                (TopicQueue(notice.topic, queue), offset)
                for queue, offset in notice.offsets.items()
            )
            return
        if address == self._master:  # the other nodes know their members by themselves
            self._node(address).next_ms = self._next_take_ms = self._next_ms = 0.0

    def _is_refused(self, reply: api.Reply) -> bool:
        """Whether a reply is a refusal; one that is not for now only is raised by the next poll."""
        if not isinstance(reply, api.Failed):
            return False
        self._next_take_ms = self._clock.monotonic_ms() + AGAIN_MS
        self._by(self._next_take_ms)
        if reply.status == "SERVICE_NOT_AVAILABLE":
            if self._requester.cluster.master == self._master:
                self._requester.cluster.lose()
            self.fetcher.look_for_nodes()
        elif reply.status != "BUSY":
            self._failure = error_of(reply)
        return True

    def _renewed(self, asked: _Asked, reply: api.Reply) -> None:
        if self._is_refused(reply):
            self._next_renew_ms = self._clock.monotonic_ms() + AGAIN_MS
            return
        if not isinstance(reply, api.Locked):
            return
        until_ms = asked.sent_ms + reply.lease_ms * BELIEF
        lost = []
        for name in asked.queues:
            queue = self.fetcher.mine.get(name)
            if queue is None:
                continue
            if name.queue_id in reply.queues.get(name.topic, ()):
                queue.lease_ms = max(queue.lease_ms, until_ms)
            else:
                lost.append(queue)
        self._lose(lost)

    def _took(self, asked: _Asked, reply: api.Reply) -> None:
        if self._is_refused(reply) or not isinstance(reply, api.Locked):
            return
        now = self._clock.monotonic_ms()
        until_ms = asked.sent_ms + reply.lease_ms * BELIEF
        if until_ms <= now:  # this process was stopped meanwhile
            self._next_take_ms = 0.0
            return
        got = []
        for name in asked.queues:
            place = reply.places.get(name.topic, {}).get(name.queue_id)
            if place is None or name in self.fetcher.mine:
                continue
            if name not in self._mine:  # it became another member's meanwhile
                self._giving[name] = until_ms
                continue
            queue = self.fetcher.add(name, self._begin(name, place), until_ms)
            queue.kept = None if place.position is None else place.position.queue_offset
            got.append(name)
        if got:
            self._events.append(Event(ASSIGNED, got))
        if len(got) == len(asked.queues):
            self._again_ms = AGAIN_MS
            self._next_ms = 0.0
        else:
            self._next_take_ms = now + self._again_ms
            self._again_ms = min(AGAIN_MS_MAX, 2 * self._again_ms)
            self._by(self._next_take_ms)


def first_names(queues: list[TopicQueue]) -> str:
    """Return the first of these queues for a text."""
    more = f" and {len(queues) - NAMED} more" if len(queues) > NAMED else ""
    return ", ".join(f"queue {one.queue_id} of {one.topic}" for one in queues[:NAMED]) + more
