"""Ask one node for its status, without waiting for dead nodes of its group."""

import time
from collections.abc import Sequence
from typing import Any

from hastore.addresses import is_group_address
from hastore.client.connections.requester import Requester
from hastore.client.security import SecurityLike, as_security, with_tls
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config, Wire
from hastore.errors import ClientError, NotAuthenticatedError
from hastore.protocol import api

REPLAY_S = 5.0  # replay lags by milliseconds, unless it is stuck
_POLL_S = 0.01
_FIND_S = 5.0
ANSWER_S = 1.0  # a node that hangs must not delay the command for long


def wait_replayed(addresses: Sequence[str]) -> None:
    """Wait until the master among `addresses` has replayed its log, up to its end at the call.

    A put is acknowledged before replay enters its message into queues and index. After this wait a
    command finds each message that was acknowledged before it. If there is no master, or replay
    takes longer than `REPLAY_S`, the command goes on with the messages that replay has reached.
    """
    for address in _known(addresses):
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
    return ask_own_status(config, config.node, ANSWER_S)


def node_name(config: Config) -> str:
    """Return the node's number and address, for errors."""
    return f"node {config.node} ({config.nodes[config.node].api})"


def _known(addresses: Sequence[str]) -> Sequence[str]:
    """Return the addresses of nodes; those that a group has in ZooKeeper, if that is given."""
    if not is_group_address(addresses[0]):
        return addresses
    requester = Requester(tuple(addresses), SYSTEM_CLOCK)
    try:
        requester.run(requester.survey(_FIND_S))
    except ClientError:
        return ()  # the command itself says so
    finally:
        requester.close()
    return requester.cluster.addresses


def ask_own_status(config: Config, number: int, timeout_s: float) -> dict[str, Any] | None:
    """Return the status of a node of the configured group, as `ask_status` does.

    TLS comes from the configuration, unless HASTORE_SECURITY or --security says otherwise; the
    identity comes from there. Raises NotAuthenticatedError if the node does not accept it.
    """
    security = as_security(None)
    own = config.security
    if own.api is Wire.TLS and own.ca is not None:
        security = with_tls(security, own.ca, own.certificate, own.key)
    return ask_status(config.nodes[number].api, timeout_s, security)


def ask_status(
    address: str, timeout_s: float, security: SecurityLike = None
) -> dict[str, Any] | None:
    """Return the node's object of `hastore status --json`; None when it does not answer in time.

    Raises NotAuthenticatedError if the node does not accept this command, or it not the node.
    """
    requester = Requester((address,), SYSTEM_CLOCK, security)
    try:
        reply, _ = requester.run(requester.ask(address, api.AskStatus, timeout_s))
    except NotAuthenticatedError:
        raise
    except ClientError:
        return None
    finally:
        requester.close()
    return reply.status if isinstance(reply, api.NodeStatus) else None
