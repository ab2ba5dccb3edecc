"""The entries of a DLedger log as `hastore log` prints and checks them."""

import hashlib
from typing import Any

from hastore.fs.filesystem import FileSystem
from hastore.record.entry import (
    ENTRY_HEADER,
    INDEX_UNIT,
    INDEX_UNIT_BYTES,
    EntryHeader,
    pack_unit,
)
from hastore.store.offline.ledger_folder import read_index

_NAMED_MAX = 100
_READ_BYTES = 1 << 16


def entry_fields(raw: bytes, record: dict[str, Any] | None) -> dict[str, Any]:
    """Return a whole entry's fields; `record` are those of the record in it, None without one."""
    header = EntryHeader(*ENTRY_HEADER.unpack_from(raw))
    found: dict[str, Any] = {
        "index": header.index,
        "term": header.term,
        "pos": header.pos,
        "size": header.size,
        "magic": header.magic,
        "channel": header.channel,
        "chain_crc": header.chain_crc,
        "body_crc": header.body_crc,
        "body_size": header.body_size,
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    return found if record is None else found | {"record": record}


class IndexCheck:
    """Compare the index of a DLedger directory with its log, one entry at a time."""

    def __init__(self, fs: FileSystem, ledger: str) -> None:
        self._fs = fs
        self._ledger = ledger
        self._start, self._bytes = 0, b""
        self.units = 0
        self.missing = 0
        self.wrong: list[str] = []
        self.wrong_count = 0

    def check(self, index: int, pos: int, size: int, term: int) -> None:
        """Check the unit of a sound entry."""
        found = self._read(index * INDEX_UNIT_BYTES)
        if not found.strip(b"\0"):
            self.missing += 1
        elif found == pack_unit(index, term, pos, size):
            self.units += 1
        else:
            self.wrong_count += 1
            if len(self.wrong) < _NAMED_MAX:
                shown = INDEX_UNIT.unpack(found) if len(found) == INDEX_UNIT_BYTES else found
                self.wrong.append(f"the unit of entry {index} at {pos} is {shown!r}")

    def _read(self, byte: int) -> bytes:
        at = byte - self._start
        if not 0 <= at < len(self._bytes):
            self._bytes = read_index(self._fs, self._ledger, byte, _READ_BYTES)
            self._start, at = byte, 0
        return self._bytes[at : at + INDEX_UNIT_BYTES]
