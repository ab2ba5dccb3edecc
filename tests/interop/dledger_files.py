"""DLedger's files, read and written without hastore's own code.

entries = read_ledger(base / "dledger-n0")
write_ledger(base / "dledger-n0", [(1, b""), (1, b"body")])  # (term, body)
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from tests.process.stores import tree

HEAD = struct.Struct(">iiqqqiIIi")  # magic size index term pos channel chainCrc bodyCrc bodySize
UNIT = struct.Struct(">iqiqq")  # magic pos size index term
BLANK = 0xFFFFFFFF
DATA_BYTES, INDEX_BYTES = 64 * 1024, 32 * 512
ROCKETMQ_INDEX_BYTES = 32 * 5 * 1024 * 1024  # RocketMQ cannot set it
Body = bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a data file."""

    index: int
    term: int
    pos: int
    size: int
    body: bytes
    crc: int = 0  # bodyCrc; DLedger itself writes none

    def line(self) -> str:
        """Return the line that `dledger.dump` writes for it."""
        digest = hashlib.sha256(self.body).hexdigest()
        return f"{self.index} {self.term} {self.pos} {self.size} 1 {digest}"


def read_ledger(folder: pathlib.Path, *, is_live: bool = False) -> list[Entry]:
    """Return the entries of a store; fail on a gap, a wrong place, or a wrong index unit.

    With `is_live` a node may be writing: its last entries, which may have no units yet, are left
    out. An entry is whole when its unit is written.
    """
    units = tree(folder / "index")
    data = tree(folder / "data")  # after the index: what that names is whole here
    index = b"".join(units[name] for name in sorted(units))
    first, written = min(map(int, units), default=0), len(index.rstrip(b"\0"))
    entries: list[Entry] = []
    for name in sorted(data):
        at = 0
        while at + HEAD.size <= len(data[name]):
            magic, size, number, term, pos, channel, chain, crc, length = HEAD.unpack_from(
                data[name], at
            )
            place = number * UNIT.size - first
            if magic != 1 or (is_live and place >= written):
                break
            assert channel == 0 and size == HEAD.size + length, (name, at)
            covered = data[name][at : at + 40] + data[name][at + 44 : at + size]
            assert crc in (0, zlib.crc32(covered)), (name, at)
            assert chain == (entries[-1].crc if entries and crc else 0), (name, at)
            assert pos == int(name) + at, (name, at, pos)
            assert not entries or number == entries[-1].index + 1, (name, at, number)
            assert not entries or term >= entries[-1].term, (name, at, term)
            body = data[name][at + HEAD.size : at + size]
            entries.append(Entry(number, term, pos, size, body, crc))
            unit = UNIT.unpack_from(index, place)
            assert unit == (1, pos, size, number, term), (name, at, unit)
            at += size
        else:
            continue
        if struct.unpack_from(">I", data[name], at)[0] != BLANK:
            break
    return entries


def write_ledger(
    folder: pathlib.Path,
    entries: Sequence[tuple[int, Body]],
    *,
    data_bytes: int = DATA_BYTES,
    index_bytes: int = INDEX_BYTES,
    committed: int | None = None,
    vote: str = "",
) -> list[Entry]:
    """Write a store of entries (term, body), as after a clean stop; all are committed."""
    files, units, at, done = [bytearray(data_bytes)], bytearray(), 0, []
    for number, (term, body) in enumerate(entries):
        size = HEAD.size + len(body)
        assert size + 8 <= data_bytes
        if at + size + 8 > data_bytes:
            struct.pack_into(">Ii", files[-1], at, BLANK, data_bytes - at)
            files.append(bytearray(data_bytes))
            at = 0
        pos = (len(files) - 1) * data_bytes + at
        HEAD.pack_into(files[-1], at, 1, size, number, term, pos, 0, 0, 0, len(body))
        files[-1][at + HEAD.size : at + size] = body
        units += UNIT.pack(1, pos, size, number, term)
        done.append(Entry(number, term, pos, size, bytes(body)))
        at += size
    for name in ("data", "index"):
        (folder / name).mkdir(parents=True)
    for place, part in enumerate(files):
        (folder / "data" / f"{place * data_bytes:020d}").write_bytes(part)
    for start in range(0, len(units), index_bytes):
        file = folder / "index" / f"{start:020d}"
        file.write_bytes(units[start : start + index_bytes])
        os.truncate(file, index_bytes)
    end = len(done) - 1
    mark = end if committed is None else committed
    (folder / "checkpoint").write_text(f"endIndex={end}\ncommittedIndex={mark}\n")
    term = done[-1].term if done else 0
    (folder / "currterm").write_text(f"voteLeader={vote}\ncurrTerm={term}\n")
    return done
