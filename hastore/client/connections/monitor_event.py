"""What a ZeroMQ socket's monitor tells. zmq.utils.monitor does it too, but loads asyncio: a tenth
of a node's start.
"""

import struct

_EVENT = struct.Struct("=Hi")


def monitor_event(frame: bytes) -> tuple[int, int]:
    """Return the event's number and its value, a descriptor or an error, from the first frame."""
    number, value = _EVENT.unpack(frame)
    return number, value
