"""How far a RocketMQ broker had delivered its delayed messages, as its own file says.

A broker notes for each level which message it delivers next, in `config/delayOffset.json`. If that
file lies in the folder of a store that was taken over, in the same place, the first hastore master
goes on from there (store/derived/taken_delays.py).
"""

import json
import re

from hastore.errors import StoreError
from hastore.fs.filesystem import FileSystem
from hastore.record.delays import MAX_LEVELS

FILE = "config/delayOffset.json"
_BYTES_MAX = 64 * 1024
_UNQUOTED = re.compile(r"([{,]\s*)([0-9]{1,3})(\s*:)")  # keys, as fastjson writes them


def read_offsets(fs: FileSystem, root: str) -> dict[int, int] | None:
    """Return the queue offset of each level that the broker delivers next; None without the file.

    Raises StoreError if it is damaged, OSError.
    """
    path = f"{root}/{FILE}"
    if not fs.exists(path):
        return None
    try:
        text = fs.read_bytes(path, _BYTES_MAX).decode()
        table = json.loads(_UNQUOTED.sub(r'\1"\2"\3', text))["offsetTable"]
        found = {int(level): int(offset) for level, offset in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise StoreError(
            f"{path} is no delayOffset.json of RocketMQ ({failure}): give the broker's file, or"
            " remove it, then the broker's delayed messages are not delivered"
        ) from failure
    if any(not 0 < level <= MAX_LEVELS or offset < 0 for level, offset in found.items()):
        raise StoreError(f"{path} has a level or an offset that no broker writes: remove it")
    return found
