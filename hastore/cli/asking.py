"""Ask one node for its status: that one alone, so that dead ones beside it cost no time."""

import time
from collections.abc import Sequence
from typing import Any

from hastore.client.connections.requester import Requester
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ClientError
from hastore.protocol import api

REPLAY_S = 5.0  # replay is behind by milliseconds, unless it stands still
_POLL_S = 0.01
_ANSWER_S = 1.0  # a node that hangs must not hold up the command for long


def wait_replayed(addresses: Sequence[str]) -> None:
    """Wait until the master among `addresses` has replayed what its log held when asked first.

    A put is acknowledged before replay makes its message known to queues and keys: what was
    acknowledged before a command is found by it. Without a master, or when replay does not come
    within `REPLAY_S`, the command goes on with what there is.
    """
    for address in addresses:
        status = ask_status(address, _ANSWER_S)
        if status is not None and status["writable"]:
            break
    else:
        return
    deadline, end = time.monotonic() + REPLAY_S, status["max_offset"]
    while status is not None and status["dispatched_offset"] < end:
        if time.monotonic() >= deadline:
            return
        time.sleep(_POLL_S)
        status = ask_status(address, _ANSWER_S)


def ask_status(address: str, timeout_s: float) -> dict[str, Any] | None:
    """Return the object of `hastore status --json` of the node at `address`; None: no answer."""
    requester = Requester((address,), SYSTEM_CLOCK)
    try:
        reply, _ = requester.run(requester.ask(address, api.AskStatus, timeout_s))
    except ClientError:
        return None
    finally:
        requester.close()
    return reply.status if isinstance(reply, api.NodeStatus) else None
