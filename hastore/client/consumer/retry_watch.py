"""Waits for the first retry of a group, for the member that would read it.

A group's topic of retries comes into being with its first message, and members are not told of it:
they would read that message when they join again. So the member to which the topic's queue will
fall lets a pull wait there, and joins again once that has found something.
"""

from __future__ import annotations

from hastore.client.connections.requester import Requester
from hastore.client.connections.transport import Arrival
from hastore.errors import MessageIllegalError
from hastore.protocol import api
from hastore.record.delays import RETRY_PREFIX
from hastore.record.properties import check_topic

WAIT_MS = 20_000  # of a pull at the master
ANSWER_MS = 3_500.0  # after this time more a pull without an answer is sent again
AGAIN_MS = 1_000.0  # between two pulls, at least
FOUND_MS = 10_000.0  # after one that found something, if the node says that there is no such topic
_NOTHING = (api.PullStatus.NO_NEW, api.PullStatus.NO_SUCH_QUEUE)


class RetryWatch:
    """A pull of the group's topic of retries, while that does not exist."""

    def __init__(self, requester: Requester, group: str) -> None:
        """Prepare."""
        self._requester = requester
        self.topic = RETRY_PREFIX + group
        self.is_wanted = False  # the topic does not exist, and its queue would be this member's
        self._is_refused = not _is_topic(self.topic)  # nobody can send back, or this one not read
        self._rid: int | None = None
        self._address = ""
        self._next_ms = 0.0

    def look(self, master: str, now: float) -> float:
        """Ask the master if it is time; return when to look again."""
        if not self.is_wanted or self._is_refused:
            return float("inf")
        if self._address != master:
            self._rid, self._next_ms = None, 0.0
        if now >= self._next_ms:
            rid = self._requester.next_rid()
            # One message, since a pull cannot ask for none.
            pull = api.Pull(rid, self.topic, 0, api.Position(0), 1, 1, WAIT_MS)
            sent = self._requester.transport.send(master, pull)
            self._rid, self._address = (rid, master) if sent else (None, "")
            self._next_ms = now + (WAIT_MS + ANSWER_MS if sent else AGAIN_MS)
        return self._next_ms

    def take(self, arrival: Arrival, now: float) -> bool:
        """Take an arrival; return whether the topic exists now."""
        reply = arrival.reply
        if reply is None:
            if arrival.address == self._address:
                self.recover()
            return False
        if self._rid is None or reply.rid != self._rid:
            return False
        self._rid = None
        self._next_ms = min(self._next_ms, now + AGAIN_MS)
        if isinstance(reply, api.Pulled) and reply.status not in _NOTHING:
            self._next_ms = now + FOUND_MS
            return True
        if isinstance(reply, api.Failed) and reply.status == api.Status.FORBIDDEN:
            self._is_refused = True  # each further one would be in the node's audit log
        return False

    def recover(self) -> None:
        """Forget a pull under way: a call was interrupted anywhere, or the connection ended."""
        self._rid, self._address, self._next_ms = None, "", 0.0


def _is_topic(name: str) -> bool:
    try:
        check_topic(name)
    except MessageIllegalError:
        return False
    return True
