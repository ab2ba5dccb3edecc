"""What ZooKeeper holds: objects of nodes, notes of groups, addresses."""

from __future__ import annotations

import zlib

from hastore.addresses import (
    address_text,
    node_number,
    parse_address,
    parse_cluster_address,
    parse_group_address,
)
from hastore.config.model import Role
from hastore.errors import ProtocolError, RegistryError, UsageError
from hastore.protocol.group_note import (
    GroupRoutes,
    OtherBroker,
    OtherTopic,
    decode_note,
    encode_note,
)
from hastore.registry.cluster_notes import noted_nodes
from hastore.registry.entry import NodeEntry, Once, foreign_problem, parse_entry, siblings_of
from tests.fuzz import kit

REACHES = (
    parse_entry, foreign_problem, siblings_of, decode_note, encode_note, parse_group_address,
    parse_cluster_address, parse_address, noted_nodes, node_number,
)  # fmt: skip
LEAST = kit.Least(0.15, 6)
TOKENS = (
    *(
        b'"role":"SLAVE"',
        b'"api":"tcp://h:1"',
        b'"once":{"id":"a","command":"promote"',
        b'"node":1',
    ),
    *(
        b'"brokers":[["b",{"0":"h:1"},true]]',
        b'"topics":[["T",4,4,6]]',
        b"zk://",
        b"h:1,",
        b"[::1]:1",
    ),
)
OWN = NodeEntry(
    role=Role.SLAVE,
    api="tcp://h:1",
    ha="h:2",
    http="h:3",
    cluster="c",
    group="g",
    node=1,
    store="s",
)
ROUTES = GroupRoutes("g", 5, [OtherBroker("b", {0: "h:1"}, True)], [OtherTopic("T", 4, 4)])


def seeds() -> list[bytes]:
    """Return objects, notes and addresses; the first byte says which. Notes are not compressed."""
    once = Once(id="a", command="promote", epoch=5, wall_ms=6, no_catch_up=True, needed_node=2)
    entry = NodeEntry(role=Role.SYNC_MASTER, api="tcp://[::1]:1", ha="h:2", http="h:3", once=once)
    note = zlib.decompress(encode_note(ROUTES))
    addresses = [
        b"h:1",
        b"[::1]:5",
        b"zk://h:1,i:2/c/g",
        b"zk://h:1/c",
        b"zk://h/c/g",
        b"h",
        b"zk://h:1",
        b"zk://h:1/a b/g",
        b"zk://" + b"h:1," * 20 + b"/c/g",
        b"routes-5",
        b"5",
        b"007",
        b"[x]:1",
    ]
    return [
        b"e" + OWN.encode(),
        b"e" + entry.encode(),
        b"e",
        b"e{}",
        b'e{"role":"KING"}',
        b"e" + b" " * 17_000,
        b"e" + OWN.encode().replace(b"tcp://h", b"h"),
        b"e" + OWN.encode().replace(b'"h:2"', b'"h"'),
        b"e" + entry.encode().replace(b"promote", b"dance"),
        b"e" + OWN.encode().replace(b"c", b"d"),
        b"n" + note,
        b"n{}",
        b"n" + note.replace(b"5", b'"x"'),
        b"n" + note[:-1],
        b"z" + encode_note(ROUTES),
        b"z" + encode_note(ROUTES)[:-5],
        *(b"a" + one for one in addresses),
    ]


def one(data: bytes) -> None:
    """Read an object, a note or an address; write it, and read it again."""
    kind, raw = data[:1], data[1:]
    if kind == b"e":
        with kit.documented(RegistryError):
            entry = parse_entry(raw, "/hastore/c/g/1")
        assert parse_entry(entry.encode(), "/x") == entry
        assert foreign_problem(entry, "/x", entry) is None
        foreign_problem(entry, "/x", OWN)
        siblings_of({1: entry, 2: OWN}, "c", "g")
        assert parse_address(entry.ha) is not None
    elif kind in (b"n", b"z"):
        with kit.documented(ProtocolError):
            routes = decode_note(zlib.compress(raw, 0) if kind == b"n" else raw)
        assert decode_note(encode_note(routes)) == routes
    else:
        _addresses(kit.text_of(raw))


def _addresses(text: str) -> None:
    found = parse_address(text)
    if found is not None:
        assert parse_address(address_text(*found)) == found and 0 <= found[1] <= 65_535
    noted_nodes([text])
    number = node_number(text)
    assert number is None or str(number) == text
    accepted = found is not None or number is not None
    refused: list[UsageError] = []
    for parse in (parse_group_address, parse_cluster_address):
        try:
            parse(text)
            accepted = True
        except UsageError as why:
            refused.append(why)
    if not accepted:
        with kit.documented(UsageError):
            raise refused[len(text) % 2]
