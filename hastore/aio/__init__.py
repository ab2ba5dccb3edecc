"""The clients for asyncio: the same names, the same arguments, awaitable.

    async with Producer(["tcp://127.0.0.1:10911"]) as producer:
        result = await producer.send("flights", b"...")

The Producer runs on the event loop itself; what blocks in the others runs in a thread of the
client's own. A cancelled `send` is no longer waited for, but may be stored all the same.
"""

from hastore.aio.admin import Admin
from hastore.aio.consumer import Consumer
from hastore.aio.producer import Producer
from hastore.client.producer import OutgoingMessage

__all__ = ["Admin", "Consumer", "OutgoingMessage", "Producer"]
