"""The clients for asyncio: the same names, the same arguments, awaitable.

    async with Producer(["tcp://127.0.0.1:10911"]) as producer:
        result = await producer.send("flights", b"...")

Consumer and Admin wait on the event loop, no thread is behind them; a call of theirs that is
cancelled has moved nothing. The producer's Futures come from its sending thread and are wrapped. A
cancelled `send` is no longer waited for, but may be stored all the same.
"""

from hastore.aio.admin import Admin
from hastore.aio.consumer import Consumer
from hastore.aio.producer import Producer
from hastore.client.producer import OutgoingMessage

__all__ = ["Admin", "Consumer", "OutgoingMessage", "Producer"]
