"""The clients for asyncio: the same names and arguments, with awaitable methods.

    async with Producer(["tcp://127.0.0.1:10911"]) as producer:
        result = await producer.send("flights", b"...")

All clients run on the event loop itself, without a thread. A cancelled call of a Consumer has moved
no position. A cancelled `send` either sends nothing, or its message is delivered in order as usual.
"""

from hastore.aio.producer import Producer
from hastore.aio.readers import Admin, Consumer, SharedConsumer
from hastore.client.producer.producer import OutgoingMessage

__all__ = ["Admin", "Consumer", "OutgoingMessage", "Producer", "SharedConsumer"]
