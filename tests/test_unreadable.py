"""Whatever is in bytes that come from a peer or a disk, the reader says that they are unreadable.

msgspec raises three kinds of errors for such bytes (`hastore.errors.UNREADABLE`).
"""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Callable

import pytest

from hastore.client.consumer.positions_client import parse_offsets
from hastore.client.security import read_security
from hastore.dledger.store.hard_state import HardStateFiles
from hastore.errors import (
    ConfigError,
    CorruptRecordError,
    ProtocolError,
    StoreBrokenError,
    UsageError,
)
from hastore.fs.memory import MemoryFileSystem
from hastore.ha.node.node_state import NodeState
from hastore.protocol.committed_positions import decode_commit
from hastore.protocol.dledger_link import decode_message
from hastore.protocol.hello import decode_answer, decode_hello
from hastore.record.queue_ends import PROPERTY, QUEUES_TOPIC, queue_ends_in
from hastore.record.topic_records import change_in
from hastore.registry.remembered import RegistryMemory
from hastore.server.broker_tables import POSITIONS, load
from hastore.server.remoting.group_requests import _member_of
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.stated_ends import StatedEnds
from hastore.store.derived.deliveries import read_delays
from hastore.store.state.crc_frame import CrcFrame
from hastore.store.state.entry_state import EntryState
from hastore.store.state.replay_progress import read_dispatched

DEEP = b"\x91" * 60_000 + b"\xc0"  # MessagePack: lists in lists
DEEP_JSON = b"[" * 60_000 + b"]" * 60_000


@pytest.mark.parametrize(
    ("decode", "before"),
    [
        (decode_hello, b"\x81\xa1x"),
        (decode_answer, b"\x82\xa4type\xa8surveyed\xa1x"),
        (decode_message, b"\x83\xa4type\xa4take\xa4term\x01\xa1x"),
    ],
)
def test_a_peer_that_nests_its_message_deeply_breaks_the_protocol(
    decode: Callable[[bytes], object], before: bytes
) -> None:
    with pytest.raises(ProtocolError, match="recursion"):
        decode(before + DEEP)


@pytest.mark.parametrize(("name", "value"), [("more", DEEP_JSON), ("member", b'"\xff"')])
def test_a_record_that_says_nothing_readable_is_no_commit(name: str, value: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        decode_commit(b'{"group":"g","topic":"t","positions":{},"%b":%b}' % (name.encode(), value))


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("node.json", lambda fs: NodeState(fs, "/s").load(1, "c", "g")),
        ("registry.json", lambda fs: RegistryMemory(fs, "/s", 1).load()),
        ("entries.json", lambda fs: EntryState(fs, "/s").load()),
        ("votes.json", lambda fs: HardStateFiles(fs, "/s", "/s/dledger-n1").load()),
    ],
)
@pytest.mark.parametrize("value", [DEEP_JSON, b'"\xff"', b"1e999", b"1" * 400])
def test_a_damaged_state_file_is_named(
    name: str, load: Callable[[MemoryFileSystem], object], value: bytes
) -> None:
    fs = MemoryFileSystem()
    fs.make_dirs("/s/hastore")
    fields = ("version", "store_id", "role", "remembers", "more")
    for field in fields:
        fs.replace_bytes(f"/s/hastore/{name}", b'{"%b":%b' % (field.encode(), value))
        with pytest.raises(StoreBrokenError, match=f"/s/hastore/{name}"):
            load(fs)


def test_deep_nesting_in_a_record_of_the_log_itself_is_no_statement() -> None:
    text = b'{"since":0,"id":1,"part":0,"parts":1,"next":%b}' % DEEP_JSON[:20_000]
    value = b"%08x" % zlib.crc32(text) + text
    raw = PROPERTY.encode() + b"\x01" + value + b"\x02"
    assert queue_ends_in(QUEUES_TOPIC, 0xC, raw) is None
    text = b'{"deleted":"t","more":%b}' % DEEP_JSON[:20_000]
    assert change_in(b"HS_TOPIC\x01%08x%b\x02" % (zlib.crc32(text), text)) is None


@pytest.mark.parametrize(
    "text",
    ["2024-13-45", "!!int x", "!!int ''", "!!bool x", "!!timestamp x", "[" * 400, "1 2: 3"],
)
def test_a_file_of_clients_that_yaml_refuses_is_a_wrong_configuration(
    tmp_path: pathlib.Path, text: str
) -> None:
    path = tmp_path / "security.yaml"
    path.write_text(f"identity: {text}\n")
    with pytest.raises(ConfigError, match=r"security\.yaml"):
        read_security(str(path))


def _deliveries(fs: MemoryFileSystem) -> object:
    return read_delays(fs, "/s")


def _window(fs: MemoryFileSystem) -> object:
    return DedupWindow(fs, "/s", lambda: 0).load(900, True) or None


def _statements(fs: MemoryFileSystem) -> object:
    stated = StatedEnds(fs, "/s")
    stated.load(900, True)
    return stated.since(900)


@pytest.mark.parametrize(
    ("name", "magic", "load"),
    [
        ("deliveries", b"HSDL", _deliveries),
        ("idempotence", b"HSIW", _window),
        ("queues", b"HSQE", _statements),
        ("replay", b"HSRP", lambda fs: read_dispatched(fs, "/s/hastore/replay")),
    ],
)
@pytest.mark.parametrize("content", [b"", b"\0\0\0\2" * 5])
def test_a_file_whose_checksum_is_right_but_not_its_lengths_counts_as_missing(
    name: str, magic: bytes, load: Callable[[MemoryFileSystem], object], content: bytes
) -> None:
    fs = MemoryFileSystem()
    fs.make_dirs("/s/hastore")
    fs.replace_bytes(f"/s/hastore/{name}", CrcFrame(magic, 1).pack(content))
    assert load(fs) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("currterm", "voteLeader=n1\ncurrTerm=99999999999999999999\n"),
        ("currterm", "voteLeader=n1\ncurrTerm=-1\n"),
        ("currterm", "voteLeader=n99999\ncurrTerm=1\n"),
        ("checkpoint", f"committedIndex={2**64}\nendIndex=1\n"),
    ],
)
def test_a_number_that_no_node_writes_shows_damage(name: str, text: str) -> None:
    fs = MemoryFileSystem()
    for folder in ("/s/hastore", "/s/dledger-n1"):
        fs.make_dirs(folder)
    fs.replace_bytes(f"/s/dledger-n1/{name}", text.encode())
    with pytest.raises(StoreBrokenError, match=f"/s/dledger-n1/{name} is damaged"):
        HardStateFiles(fs, "/s", "/s/dledger-n1").load()


@pytest.mark.parametrize(
    "table",
    [
        '{"@g":{"0":5}}',
        '{"T@g":{"0":Infinity}}',
        '{"T@g":{"0":NaN}}',
        '{"T@g":{"0":null}}',
        '{"T@g":5}',
        "[" * 60_000,
    ],
)
def test_a_table_of_positions_that_says_nothing_readable_is_refused(table: str) -> None:
    with pytest.raises(UsageError, match=r"consumerOffset\.json"):
        parse_offsets('{"offsetTable":' + table + "}")


def test_a_string_that_does_not_end_is_read_once() -> None:
    """Not once from each quote in it: some 100 KB of a client would stop the node for minutes."""
    endless = b'"' + b'\\"' * 500_000
    with pytest.raises(CorruptRecordError):
        load(POSITIONS, b"{" + endless)
    with pytest.raises(UsageError):
        parse_offsets((b"{" + endless).decode())
    assert _member_of(b'"messageQueueTable":{' + endless, b'"messageQueueTable":') is None
