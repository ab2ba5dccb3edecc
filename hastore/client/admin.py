"""Ask the nodes of a group what they are and what they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from hastore.client.addresses import parse_bootstrap
from hastore.client.messages import decode_messages
from hastore.client.requester import Requester, expect
from hastore.client.results import Message, NodeInfo
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import ClientError
from hastore.protocol import api
from hastore.store.host import parse_message_id

QueueRanges = dict[int, tuple[int, int]]


class Admin:
    """Typed answers about a group; safe to share between threads, one request at a time."""

    def __init__(
        self,
        bootstrap: str | Sequence[str] | None = None,
        *,
        timeout_s: float = 5.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Connect by itself; UsageError for an address that is none."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._requester = Requester(parse_bootstrap(bootstrap), clock)

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._requester.close()

    def status(self) -> list[NodeInfo]:
        """Return what each node that answers says of itself; UnreachableError when none does."""
        with self._lock:
            self._requester.survey(self._timeout_s)
            replies = self._requester.ask_all(api.AskStatus, self._timeout_s)
        infos = [
            NodeInfo(address, reply.status)
            for address, reply in replies.items()
            if isinstance(reply, api.NodeStatus)
        ]
        return sorted(infos, key=lambda info: info.node)

    def maps(self) -> dict[str, api.MapInfo]:
        """Return each node's view of the group by its address."""
        with self._lock:
            self._requester.survey(self._timeout_s)
            return dict(self._requester.cluster.maps)

    def topics(self) -> dict[str, QueueRanges]:
        """Return each topic's queues with their (first, end) queue offsets, as on the master."""
        reply, _ = self._ask(lambda rid: api.AskTopics(rid))
        return expect(api.Topics, reply).topics

    def query_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 32,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
    ) -> list[Message]:
        """Return the messages of a topic with a key, newest first, stored in [begin_ms, end_ms]."""
        reply, payload = self._ask(
            lambda rid: api.FindKey(rid, topic, key, max_messages, begin_ms, end_ms)
        )
        return _messages(expect(api.Found, reply).count, payload)

    def query_message_id(self, message_id: str) -> Message | None:
        """Return the message with an id, None when there is none; UsageError for no id."""
        host, offset = parse_message_id(message_id)
        reply, payload = self._ask(lambda rid: api.FindOffset(rid, offset))
        found = _messages(expect(api.Found, reply).count, payload)
        if not found or found[0].record.store_host != host:
            return None
        return found[0]

    def _ask(self, make: Callable[[int], api.Request]) -> tuple[api.Reply, bytes]:
        """Ask the master first, it knows most; then the others."""
        with self._lock:
            requester = self._requester
            requester.survey(self._timeout_s)
            order = list(reversed(requester.cluster.replicas()))
            heard = [address for address in order if address in requester.cluster.maps]
            return requester.ask_any(heard, make, self._timeout_s)


def _messages(count: int, payload: bytes) -> list[Message]:
    found, failure = decode_messages(payload, ())
    if failure is not None:
        raise failure
    if len(found) != count:
        raise ClientError(f"{len(found)} messages came instead of {count}")
    return found
