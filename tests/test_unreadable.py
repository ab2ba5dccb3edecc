"""Whatever is in bytes that come from a peer or a disk, the reader says that they are unreadable.

msgspec raises three kinds of errors for such bytes (`hastore.errors.UNREADABLE`).
"""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Callable

import pytest

from hastore.client.security import read_security
from hastore.dledger.store.hard_state import HardStateFiles
from hastore.errors import ConfigError, CorruptRecordError, ProtocolError, StoreBrokenError
from hastore.fs.memory import MemoryFileSystem
from hastore.ha.node.node_state import NodeState
from hastore.protocol.committed_positions import decode_commit
from hastore.protocol.dledger_link import decode_message
from hastore.protocol.hello import decode_answer, decode_hello
from hastore.record.queue_ends import PROPERTY, QUEUES_TOPIC, queue_ends_in
from hastore.record.topic_records import change_in
from hastore.registry.remembered import RegistryMemory
from hastore.store.state.entry_state import EntryState

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
        decode_commit(
            b'{"group":"g","topic":"t","positions":{},"%b":%b}' % (name.encode(), value)
        )


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("node.json", lambda fs: NodeState(fs, "/s").load(1, "c", "g")),
        ("registry.json", lambda fs: RegistryMemory(fs, "/s").load()),
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


@pytest.mark.parametrize("text", ["a: 2024-13-45", "a: !!int x", "a: [" * 2_000, "a: 1 2: 3"])
def test_a_file_of_clients_that_yaml_refuses_is_a_wrong_configuration(
    tmp_path: pathlib.Path, text: str
) -> None:
    path = tmp_path / "security.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"security\.yaml"):
        read_security(str(path))
