"""A replicated, append-only commit log, byte-compatible with RocketMQ; these are its clients."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hastore.client import (
        Admin,
        Consumer,
        Decision,
        GroupMember,
        GroupMembers,
        Message,
        NodeInfo,
        OutgoingMessage,
        Position,
        Producer,
        RebalanceListener,
        Security,
        SendResult,
        SharedConsumer,
        SilentNode,
        Status,
        TopicQueue,
    )

__version__ = "0.1.0.dev0"
__all__ = [
    "Admin",
    "Consumer",
    "Decision",
    "GroupMember",
    "GroupMembers",
    "Message",
    "NodeInfo",
    "OutgoingMessage",
    "Position",
    "Producer",
    "RebalanceListener",
    "Security",
    "SendResult",
    "SharedConsumer",
    "SilentNode",
    "Status",
    "TopicQueue",
]


def __getattr__(name: str) -> Any:
    """Import the clients on first use: a node needs none of them."""
    if name in __all__:
        return getattr(import_module("hastore.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the clients too, imported or not."""
    return sorted({*globals(), *__all__})
