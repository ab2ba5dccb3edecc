"""Replicate an append-only commit log between nodes, byte-compatible with RocketMQ."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hastore.client import (
        Admin,
        Consumer,
        Message,
        NodeInfo,
        OutgoingMessage,
        Position,
        Producer,
        SendResult,
        Status,
    )

__version__ = "0.1.0"
__all__ = [
    "Admin",
    "Consumer",
    "Message",
    "NodeInfo",
    "OutgoingMessage",
    "Position",
    "Producer",
    "SendResult",
    "Status",
]


def __getattr__(name: str) -> Any:
    """Load the clients when they are asked for: a node needs none of them."""
    if name in __all__:
        return getattr(import_module("hastore.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the clients too, though they are not loaded yet."""
    return sorted({*globals(), *__all__})
