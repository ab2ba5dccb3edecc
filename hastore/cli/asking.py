"""Ask one node for its status, without waiting for dead nodes of its group."""

import time
from collections.abc import Sequence
from typing import Any

from hastore.client.connections.requester import Requester
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config
from hastore.errors import ClientError
from hastore.protocol import api

REPLAY_S = 5.0  # replay lags by milliseconds, unless it is stuck
_POLL_S = 0.01
ANSWER_S = 1.0  # a node that hangs must not delay the command for long


def wait_replayed(addresses: Sequence[str]) -> None:
    """Wait until the master among `addresses` has replayed its log, up to its end at the call.

    A put is acknowledged before replay enters its message into queues and index. After this wait a
    command finds each message that was acknowledged before it. If there is no master, or replay
    takes longer than `REPLAY_S`, the command goes on with the messages that replay has reached.
    """
    for address in addresses:
        status = ask_status(address, ANSWER_S)
        if status is not None and status["writable"]:
            break
    else:
        return
    deadline, end = time.monotonic() + REPLAY_S, status["max_offset"]
    while status is not None and status["dispatched_offset"] < end:
        if time.monotonic() >= deadline:
            return
        time.sleep(_POLL_S)
        status = ask_status(address, ANSWER_S)


def ask_node(config: Config) -> dict[str, Any] | None:
    """Return the status of the node whose configuration this is; None without an answer."""
    return ask_status(config.nodes[config.node].api, ANSWER_S)


def node_name(config: Config) -> str:
    """Return the node's number and address, for errors."""
    return f"node {config.node} ({config.nodes[config.node].api})"


def ask_status(address: str, timeout_s: float) -> dict[str, Any] | None:
    """Return the node's object of `hastore status --json`; None when it does not answer in time."""
    requester = Requester((address,), SYSTEM_CLOCK)
    try:
        reply, _ = requester.run(requester.ask(address, api.AskStatus, timeout_s))
    except ClientError:
        return None
    finally:
        requester.close()
    return reply.status if isinstance(reply, api.NodeStatus) else None
