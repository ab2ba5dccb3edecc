"""Ask one node for its status: that one alone, so that dead ones beside it cost no time."""

from typing import Any

from hastore.client.requester import Requester
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ClientError
from hastore.protocol import api


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
