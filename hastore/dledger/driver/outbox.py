"""Outbox: the messages of the updates that are carried out together, until all of it is durable."""

import logging

from hastore.dledger.driver.filling import filled
from hastore.dledger.links.peer_links import PeerLinks
from hastore.dledger.store.entry_store import EntryStore
from hastore.errors import HastoreError
from hastore.protocol.dledger import AppendRequest, Code, Message, PushResponse, PushType

log = logging.getLogger(__name__)


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
        """Hand all messages to the links."""
        if not self._messages:
            return
        messages, self._messages = self._messages, []
        for peer, message in messages:
            try:
                for one in filled(message, self._store):
                    self._links.send(peer, one)
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
