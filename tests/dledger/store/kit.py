"""Entry stores for tests: small files, and what they must hold by FORMATS."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hastore.dledger.core.events import OwnEntry, TakenEntries
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore, EntryStore
from hastore.errors import Status
from hastore.fs.filesystem import REAL, FileSystem
from hastore.protocol.dledger import AppendRequest, MemberSet, wire_lists
from hastore.record.log_format import members_in
from tests.store.kit import HOST, config

INDEX_BYTES = 4096


def make(root: object, *, node: int = 1, fs: Any = None, **changes: Any) -> DLedgerMmapFileStore:
    more = {} if fs is None else {"fs": fs}
    return DLedgerMmapFileStore(
        config(root, **changes), node=node, index_file_bytes=INDEX_BYTES, store_host=HOST, **more
    )


@contextmanager
def opened(root: object, **changes: Any) -> Iterator[DLedgerMmapFileStore]:
    """An open store; closed cleanly at the end unless the test closed it."""
    store = make(root, **changes)
    store.open()
    try:
        yield store
    finally:
        store.close()


def put(store: EntryStore, term: int, *payloads: bytes) -> list[int]:
    """Put; all must be stored. Returns the physical offsets."""
    outcome = store.put(term, payloads)
    results = [result for payload in outcome.results for result in payload]
    assert all(result.status is Status.PUT_OK for result in results), results
    assert outcome.count == len(results)
    return [result.offset for result in results if result.offset is not None]


def copy_entries(source: EntryStore, target: EntryStore, *, max_bytes: int = 1 << 20) -> int:
    """Send the entries that `target` lacks, as a leader would; returns how many requests."""
    count = 0
    while target.end_index < source.end_index:
        first = target.end_index + 1
        found = source.read(first, max_bytes)
        lists = lists_of(source, first, found.last_index)
        request = AppendRequest(
            source.end_term, first - 1, source.term_of(first - 1), found.pos, found.size,
            found.runs, source.committed_index, *wire_lists(lists),
        )  # fmt: skip
        with source.messages.view(found.pos, found.size) as view:
            data = bytes(view)
        target.append_taken(request, data, TakenEntries(0, found.last_index))
        count += 1
    return count


def lists_of(store: EntryStore, first: int, last: int) -> list[tuple[int, MemberSet]]:
    """The member lists in entries of a store."""
    found = []
    for index in range(first, last + 1):
        pos, end = store.position(index), store.end_position(index)
        with store.messages.view(pos, end - pos) as view:
            lists = members_in(bytes(view[48:]))
        if lists is not None:
            found.append((index, MemberSet(*lists)))
    return found


def no_op(store: EntryStore, term: int) -> None:
    store.append_own(OwnEntry(store.end_index + 1, term))


def data_of(store: DLedgerMmapFileStore) -> bytes:
    """All bytes of the data files, in order."""
    return folder_bytes(f"{store.messages.directory}/data")


def index_of(store: DLedgerMmapFileStore) -> bytes:
    return folder_bytes(f"{store.messages.directory}/index")


def folder_bytes(folder: str, fs: FileSystem = REAL) -> bytes:
    return b"".join(fs.read_bytes(f"{folder}/{name}") for name in fs.list_dir(folder))


def walk(data: bytes, file_size: int, start: int = 0) -> tuple[list[tuple[int, ...]], bytes]:
    """Read entries by FORMATS alone: their headers as tuples, and the index units they make.

    `data` begins at `start` of the log.
    """
    found, units, at, index, term, before = [], b"", 0, -1, 0, None
    while at < len(data):
        pos = start + at
        left = file_size - pos % file_size
        if left >= 8 and struct.unpack_from(">Ii", data, at) == (0xFFFFFFFF, left):
            assert not any(data[at + 8 : at + left]), "zeros follow a blank's head"
            at += left
            continue
        if left < 48:
            break
        head = struct.unpack_from(">iiqqqiIIi", data, at)
        magic, size, its_index, its_term, its_pos, channel, chain, crc, body = head
        if magic != 1:
            break
        assert its_pos == pos and size == 48 + body and channel == 0 and size + 8 <= left
        if crc:
            rest = data[at : at + 40] + data[at + 44 : at + size]
            assert crc == zlib.crc32(rest)
            assert before is None and start or chain == (before or 0)
        else:
            assert chain == 0
        before = crc
        assert index in (-1, its_index - 1) and its_term >= term
        units += struct.pack(">iqiqq", 1, pos, size, its_index, its_term)
        found.append(head)
        index, term = its_index, its_term
        at += size
    assert not any(data[at:]), f"bytes follow the end {start + at}"
    return found, units
