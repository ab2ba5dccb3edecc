"""Another running node as the source of a repair, over the client API."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hastore.client.connections.requester import Requester, error_of
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ClientError, NotAuthenticatedError
from hastore.ha.rules.epochs import EpochStarts
from hastore.protocol import api
from hastore.repair.mending import Unfit

ANSWER_S = 30.0  # its disk may be slow


class PeerLog:
    """The log of a node that runs. Methods raise Unfit if it does not answer, or lacks bytes."""

    def __init__(self, where: str, security: SecurityLike = None) -> None:
        """Prepare; `where` is tcp://HOST:PORT. Raises UsageError, ConfigError."""
        self.where = where
        self.min_offset = 0
        self.readable_offset = 0
        self._requester = Requester((where,), SYSTEM_CLOCK, security)

    def close(self) -> None:
        """End the connection."""
        self._requester.close()

    def look(self, *, node: int, cluster: str, group: str, mode: str) -> str | None:
        """Ask for the node's limits; return why it is not one to repair this node from.

        Raises NotAuthenticatedError if the node does not accept this command, or it not the node.
        """
        try:
            reply = self._ask(api.AskStatus)[0]
        except Unfit as unfit:
            return str(unfit)
        if not isinstance(reply, api.NodeStatus):
            return f"it answered {type(reply).__name__} to a question for its status"
        status: dict[str, Any] = reply.status
        theirs = status.get("cluster"), status.get("group"), status.get("mode")
        if theirs != (cluster, group, mode):
            return (
                f"it is of group {theirs[0]}/{theirs[1]}, mode {theirs[2]}, and the log of"
                f" {cluster}/{group}, mode {mode}"
            )
        if status["node"] == node:
            return f"it is node {node} itself"
        self.min_offset = status["min_offset"]
        self.readable_offset = status["readable_offset"]
        return None

    def read(self, start: int, end: int) -> tuple[bytes, EpochStarts]:
        """Return the bytes [start, end), in as many requests as it takes, and who wrote them."""
        found, epochs = bytearray(), []
        while start + len(found) < end:
            at = start + len(found)
            stop = min(end, at + api.MAX_RANGE_BYTES)
            reply, payload = self._ask(partial(api.AskBytes, start=at, end=stop))
            if not isinstance(reply, api.RangeBytes) or not reply.present:
                raise Unfit(f"it does not have bytes [{at}, {stop}) any more")
            if len(payload) != stop - at:
                raise Unfit(f"it sent {len(payload)} bytes of [{at}, {stop})")
            found += payload
            epochs += [(epoch, begin) for epoch, begin in reply.epochs]
        return bytes(found), epochs

    def digest(self, start: int, end: int) -> bytes:
        """Return the digest of bytes."""
        reply, _ = self._ask(partial(api.AskDigest, start=start, end=end))
        if not isinstance(reply, api.RangeDigest) or reply.digest is None:
            raise Unfit(f"it does not have bytes [{start}, {end}) any more")
        return reply.digest

    def _ask(self, make: Callable[[int], api.Request]) -> tuple[Any, Any]:
        address = self._requester.cluster.addresses[0]
        try:
            steps = self._requester.ask(address, make, ANSWER_S)
            reply, payload = self._requester.run_steps(steps)
            if isinstance(reply, api.Failed):
                raise error_of(reply)
        except NotAuthenticatedError:
            raise
        except ClientError as failure:
            raise Unfit(str(failure)) from failure
        return reply, payload
