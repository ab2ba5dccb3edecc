"""How far a RocketMQ broker had delivered its delayed messages, as its own file says.

A broker notes for each level which message it delivers next, in `config/delayOffset.json`. If that
file lies in the folder of a store that was taken over, in the same place, the first hastore master
goes on from there (store/derived/taken_delays.py).
"""

from hastore.errors import CorruptRecordError, StoreError
from hastore.fs.filesystem import FileSystem
from hastore.server.broker_tables import DELAYS, read_delays

FILE = DELAYS.file
_BYTES_MAX = 64 * 1024


def read_offsets(fs: FileSystem, root: str) -> dict[int, int] | None:
    """Return the queue offset of each level that the broker delivers next; None without the file.

    Raises StoreError if it is damaged, OSError.
    """
    path = f"{root}/{FILE}"
    if not fs.exists(path):
        return None
    try:
        return read_delays(fs.read_bytes(path, _BYTES_MAX))
    except CorruptRecordError as failure:
        raise StoreError(
            f"{path}: {failure}: give the broker's file, or remove it, then the broker's delayed"
            " messages are never delivered; until then all of their levels wait"
        ) from failure
