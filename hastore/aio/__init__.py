"""The clients for asyncio: the same names and arguments, awaitable.

    async with Producer(["tcp://127.0.0.1:10911"]) as producer:
        result = await producer.send("flights", b"...")

All run on the event loop itself, without a thread. A cancelled call of Consumer or Admin has moved
no position; a cancelled `send` was either not sent, or is stored in its place.
"""

from hastore.aio.admin import Admin
from hastore.aio.consumer import Consumer
from hastore.aio.producer import Producer
from hastore.client.producer.producer import OutgoingMessage

__all__ = ["Admin", "Consumer", "OutgoingMessage", "Producer"]
