"""Where a member that starts at the latest begins in a queue without a position.

The latest is where the group begins, not where a queue does that comes later: such a queue would
hide what it got before the member took it. So a queue is read from its end only if it was there
when this member came, and if the group had no position in its topic then. The group's retries are
read from their beginning, as RocketMQ's consumers read them.
"""

from __future__ import annotations

from collections.abc import Iterable

from hastore.client.connections.requester import FOR_NOW, Requester
from hastore.client.connections.transport import Arrival
from hastore.client.consumer.subscription import TopicQueue
from hastore.protocol import api
from hastore.record.delays import RETRY_PREFIX

ANSWER_MS = 3_500.0  # a question without an answer is sent again
AGAIN_MS = 100.0  # after a refusal
ASKED_MAX = 64  # questions under way


class Beginnings:
    """What the group had when this member came; its topics are asked for before the first Join.

    Later another member, which came with this one, may have committed where it begins.
    """

    def __init__(self, requester: Requester, group: str) -> None:
        """Prepare."""
        self._requester = requester
        self._group = group
        self._is_new: dict[str, bool] = {}  # by topic: the group had no position there
        self._counts: dict[str, int] = {}  # by topic: how many queues it had
        self._asked: dict[int, tuple[str, str, float]] = {}  # topic, address, when it was sent
        self._not_before_ms = 0.0

    def learn(self, topics: Iterable[str], master: str | None, now: float) -> bool:
        """Ask the master for what is not known; return whether all is."""
        unknown = {topic for topic in topics if topic not in self._is_new}
        self._asked = {
            rid: (topic, address, sent_ms)
            for rid, (topic, address, sent_ms) in self._asked.items()
            if topic in unknown and address == master and now < sent_ms + ANSWER_MS
        }
        if master is not None and now >= self._not_before_ms:
            under_way = {topic for topic, _, _ in self._asked.values()}
            for topic in sorted(unknown - under_way)[: ASKED_MAX - len(under_way)]:
                rid = self._requester.next_rid()
                if self._requester.transport.send(master, api.Fetch(rid, self._group, topic)):
                    self._asked[rid] = topic, master, now
        return not unknown

    def take(self, arrival: Arrival, now: float) -> bool:
        """Take an arrival; return whether it is the answer to a question."""
        reply, address = arrival.reply, arrival.address
        if reply is None:
            if not arrival.up:
                self._asked = {rid: one for rid, one in self._asked.items() if one[1] != address}
            return False
        asked = self._asked.pop(reply.rid, None)
        if asked is None:
            return False
        if isinstance(reply, api.Positions):
            self._is_new[asked[0]] = not reply.positions
        elif isinstance(reply, api.Failed) and reply.status in FOR_NOW:
            self._not_before_ms = now + AGAIN_MS
        else:  # the Join is refused as well, and says why
            self._is_new[asked[0]] = True
        return True

    def came(self, topics: Iterable[str]) -> None:
        """Note topics that came while the group was there."""
        for topic in topics:
            self._is_new[topic], self._counts[topic] = True, 0

    def joined(self, joined: api.Joined) -> None:
        """Note how many queues each topic has, when this is said for the first time."""
        for topic, count in joined.topics.items():
            self._counts.setdefault(topic, count)
        self._counts.update(dict.fromkeys(joined.missing, 0))

    def is_at_end(self, name: TopicQueue) -> bool:
        """Whether to begin at the end of a queue in which the group has no position."""
        topic, queue = name
        if topic.startswith(RETRY_PREFIX) or not self._is_new.get(topic, False):
            return False
        return queue < self._counts.get(topic, 0)

    def recover(self) -> None:
        """Forget questions under way, after a call was interrupted anywhere."""
        self._asked = {}
