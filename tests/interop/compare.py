"""Compare the stores of hastore and RocketMQ byte by byte, without hastore's own code."""

from __future__ import annotations

import hashlib
import pathlib
import struct
from typing import Any

from tests.process.stores import Log, read_log, tree

# Both sides need the same sizes: RocketMQ refuses a log whose files have another size.
FILE_BYTES = 64 * 1024
QUEUE_UNITS = 300
SLOTS, ENTRIES = 500, 2_000


def sizes(file_bytes: int = FILE_BYTES) -> dict[str, Any]:
    """Return hastore's `store` keys."""
    return {
        "commitlog_file_size": file_bytes,
        "consume_queue_units": QUEUE_UNITS,
        "index_slots": SLOTS,
        "index_entries": ENTRIES,
    }


def rocketmq_sizes(root: pathlib.Path, file_bytes: int = FILE_BYTES) -> dict[str, Any]:
    """Return RocketMQ's keys for the same sizes."""
    return {
        "storePathRootDir": str(root),
        "mappedFileSizeCommitLog": file_bytes,
        "mappedFileSizeConsumeQueue": QUEUE_UNITS * 20,
        "maxHashSlotNum": SLOTS,
        "maxIndexNum": ENTRIES,
        "haSendHeartbeatInterval": 1_000,
        "haHousekeepingInterval": 10_000,
        "haListenPort": 0,
    }


def assert_same_log(one: pathlib.Path, other: pathlib.Path, end: int) -> None:
    """Compare two logs up to `end`, file by file."""
    left, right = tree(one / "commitlog"), tree(other / "commitlog")
    assert end > 0
    at = min(int(name) for name in left)
    while at < end:
        name = f"{at:020d}"
        assert name in left and name in right, f"{name}: {sorted(left)[-3:]} {sorted(right)[-3:]}"
        size = min(len(left[name]), end - at)
        assert len(left[name]) == len(right[name])
        mine, theirs = left[name][:size], right[name][:size]
        if mine != theirs:
            first = next(i for i in range(size) if mine[i] != theirs[i])
            raise AssertionError(
                f"the logs differ at {at + first}: {mine[first : first + 64]!r} and "
                f"{theirs[first : first + 64]!r}"
            )
        at += len(left[name])


def assert_same_derived(
    one: pathlib.Path, other: pathlib.Path, *, index_by_entries: bool = False
) -> None:
    """Check that consume queues (by name) and key index files (in order) are identical.

    With `index_by_entries` the entries are compared instead of the index files: after a kill,
    RocketMQ indexes some keys twice or not at all. Then `other`'s index must have each key of its
    log exactly once, and every entry of RocketMQ's index.
    """
    for kind in ("consumequeue", "batchconsumequeue"):
        left, right = _used(one / kind), _used(other / kind)
        assert left.keys() == right.keys(), f"{kind}: {sorted(left.keys() ^ right.keys())}"
        for name, data in left.items():
            if data != right[name]:
                at = next(i for i in range(len(data)) if data[i] != right[name][i])
                raise AssertionError(
                    f"{kind}/{name} differs at byte {at}: {data[at - at % 20 :][:40].hex()} and "
                    f"{right[name][at - at % 20 :][:40].hex()}"
                )
    if index_by_entries:
        have, wanted = _entries(other), _keys_of(read_log(other))
        assert sorted(have) == sorted(wanted), sorted(set(have) ^ set(wanted))[:4]
        assert set(_entries(one)) <= set(have), sorted(set(_entries(one)) - set(have))[:4]
        return
    mine, theirs = (sorted(tree(root / "index").items()) for root in (one, other))
    mine, theirs = ([data for _, data in files] for files in (mine, theirs))
    assert len(mine) == len(theirs), f"{len(mine)} and {len(theirs)} index files"
    for number, (data, their) in enumerate(zip(mine, theirs, strict=True)):
        if data != their:
            at = next(i for i in range(len(data)) if data[i] != their[i])
            raise AssertionError(
                f"index file {number} of {len(mine)} differs at byte {at} of {len(data)}: header "
                f"{data[:40].hex()} and {their[:40].hex()}, {data[at : at + 40].hex()} and "
                f"{their[at : at + 40].hex()}"
            )


def _entries(root: pathlib.Path) -> list[tuple[int, int]]:
    found = []
    for _, data in sorted(tree(root / "index").items()):
        (count,) = struct.unpack_from(">i", data, 36)
        for number in range(1, count):
            key_hash, offset = struct.unpack_from(">iq", data, 40 + 4 * SLOTS + 20 * number)
            found.append((offset, key_hash))
    return found


def _keys_of(log: Log) -> list[tuple[int, int]]:
    """Return the entries that an index must have: UNIQ_KEY and each of KEYS, except rollbacks."""
    return [
        (found.offset, _key_hash(f"{found.topic}#{key}"))
        for found in log.records
        if found.sys_flag & 0xC != 0xC
        for key in [found.properties.get("UNIQ_KEY"), *found.properties.get("KEYS", "").split(" ")]
        if key
    ]


def _key_hash(text: str) -> int:
    value = 0
    for (unit,) in struct.iter_unpack(">H", text.encode("utf-16-be")):
        value = (31 * value + unit) & 0xFFFFFFFF
    value = value - (1 << 32) if value >> 31 else value
    return 0 if value == -(1 << 31) else abs(value)


def _used(folder: pathlib.Path) -> dict[str, bytes]:
    """Return the files that are not empty: RocketMQ creates the next one a little early."""
    return {name: data for name, data in tree(folder).items() if data.strip(b"\0")}


def lines_of(log: Log) -> list[str]:
    """Return the log's records in the format of Lines.java."""
    return sorted(
        "\t".join(
            (
                found.topic,
                str(found.queue_id),
                str(found.queue_offset),
                str(found.offset),
                hashlib.sha1(found.body).hexdigest(),
                found.properties.get("KEYS", ""),
                found.properties.get("TAGS", ""),
            )
        )
        for found in log.records
    )


def read_lines(path: pathlib.Path) -> list[str]:
    """Return the lines that the Java side wrote."""
    return sorted(path.read_text().splitlines())
