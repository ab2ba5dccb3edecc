"""Compare consume queue files with the log, one record at a time."""

import mmap

from hastore.fs.filesystem import File, FileSystem, file_name, is_file_name
from hastore.store.derived.contract import Dispatched, inner_batch_of
from hastore.store.derived.queues.consume_queue import UNIT, UNIT_BYTES, is_directory_name

_NAMED_MAX = 100
_NOTHING = bytes(UNIT_BYTES)
_OPEN_MAX = 128


class QueueCheck:
    """Count the units that agree with the log, are missing (not replayed yet) or are wrong."""

    def __init__(self, root: str, fs: FileSystem) -> None:
        self._root = root
        self._fs = fs
        self._queues: dict[tuple[str, int], _QueueMap] = {}
        self.units = 0
        self.missing = 0
        self.wrong: list[str] = []
        self.wrong_count = 0

    def check(self, record: Dispatched) -> None:
        """Check a record's unit; prepared records and inner batches are not checked."""
        if not record.takes_unit or inner_batch_of(record) is not None:
            return
        if record.queue_id < 0 or record.queue_offset < 0 or not is_directory_name(record.topic):
            return
        key = record.topic, record.queue_id
        queue = self._queues.get(key)
        if queue is None:
            if len(self._queues) >= _OPEN_MAX:
                self._queues.clear()
            directory = f"{self._root}/consumequeue/{record.topic}/{record.queue_id}"
            queue = self._queues[key] = _QueueMap(self._fs, directory)
        found = queue.unit(record.queue_offset)
        if found == _NOTHING or not found:
            self.missing += 1
        elif found == UNIT.pack(record.offset, record.size, record.tags_code):
            self.units += 1
        else:
            self.wrong_count += 1
            if len(self.wrong) < _NAMED_MAX:
                offset, size, tags = UNIT.unpack(found)
                self.wrong.append(
                    f"{record.topic} queue {record.queue_id} queue offset {record.queue_offset}:"
                    f" ({offset}, {size}, {tags}) instead of"
                    f" ({record.offset}, {record.size}, {record.tags_code})"
                )


class _QueueMap:
    """One queue's files; one of them is mapped at a time."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._directory = directory
        self._starts = [
            int(name) // UNIT_BYTES for name in fs.list_dir(directory) if is_file_name(name)
        ]
        self._start = 0
        self._map: mmap.mmap | bytes = b""

    def unit(self, queue_offset: int) -> bytes:
        """Return the 20 bytes of a queue offset; empty when no file has it."""
        at = (queue_offset - self._start) * UNIT_BYTES
        found = self._map[at : at + UNIT_BYTES] if at >= 0 else b""
        if not found and self._select(queue_offset):
            at = (queue_offset - self._start) * UNIT_BYTES
            found = self._map[at : at + UNIT_BYTES]
        return found if len(found) == UNIT_BYTES else b""

    def _select(self, queue_offset: int) -> bool:
        below = [start for start in self._starts if start <= queue_offset]
        if not below or (self._map and below[-1] == self._start):
            return False
        self._start = below[-1]
        path = f"{self._directory}/{file_name(self._start * UNIT_BYTES)}"
        try:
            file: File = self._fs.open(path, writable=False)
        except FileNotFoundError:  # retention removed it
            self._map = b""
            return False
        try:
            self._map = file.map() if file.size else b""
        finally:
            file.close()
        return True
