"""Compare docs/client-protocol.md with the code.

The tables must name every field and limit; the example bytes and the example client must work with
real nodes.
"""

import enum
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from hastore import shares
from hastore.client.connections.transport import MAX_REPLY_BYTES
from hastore.client.consumer.consumer import Consumer
from hastore.config.model import ApiConfig
from hastore.protocol import api, zmtp
from hastore.record.codec import NO_HOST, build_record
from hastore.record.properties import MAX_KEYS
from hastore.server.api import access as api_access
from hastore.server.api import cold_reads, filtered_pulls
from hastore.server.api import connections as api_connections
from hastore.server.api import newcomers as api_newcomers
from hastore.server.api import pulls as api_pulls
from hastore.server.api import queries as api_queries
from hastore.server.api import ranges as api_ranges
from hastore.server.api import replies as api_replies
from hastore.server.api import server as api_server
from hastore.store import message_reader
from hastore.store.append import dedup_window
from hastore.store.derived import consume_queue
from tests.process.harness import Group, Node, wait_until
from tests.process.wire import COMMAND, LONG, MORE, Frame, Wire, command, frame, greeting, ready

PATH = pathlib.Path(__file__).resolve().parent.parent / "docs" / "client-protocol.md"
PAGE = PATH.read_text()
SECTION = re.compile(r"^### (\w+)(?:, `([^`]+)`)?\n(.*?)(?=^##|\Z)", re.M | re.S)
ROW = re.compile(r"^\| *(.*?) *\|$", re.M)
POWERS = {2**63 - 1: "2^63 - 1", 2**31 - 1: "2^31 - 1"}


def structs() -> list[type[msgspec.Struct]]:
    """Return every message of the API, and every structure inside one."""
    found = [
        each
        for each in vars(api).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct)
    ]
    return [each for each in found if not each.__name__.startswith("_")]


def sections() -> dict[str, tuple[str | None, str]]:
    """Return the page's sections on messages: name -> (tag, text)."""
    reference = PAGE.partition("\n## The requests\n")[2]
    return {name: (tag or None, text) for name, tag, text in SECTION.findall(reference)}


def rows(text: str) -> list[list[str]]:
    """Return the cells of a table's rows, without its header."""
    cells = [re.split(r" *(?<!\\)\| *", row) for row in ROW.findall(text)]
    return [row for row in cells[1:] if not set("".join(row)) <= set("-")]


def in_words(kind: Any) -> str:
    """Describe the values of a field in the words of the page."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return " or ".join(in_words(each) for each in kind.types)
    if isinstance(kind, msgspec.inspect.IntType):
        return "int" + bounds(kind.ge, kind.le)
    if isinstance(kind, msgspec.inspect.StrType):
        limits = bounds(kind.min_length, kind.max_length)
        return f"str{limits} characters" if limits else "str"
    if isinstance(kind, msgspec.inspect.ListType):
        return f"array of {in_words(kind.item_type)}"
    if isinstance(kind, msgspec.inspect.TupleType):
        return f"[{', '.join(in_words(each) for each in kind.item_types)}]"
    if isinstance(kind, msgspec.inspect.DictType):
        limits = bounds(kind.min_length, kind.max_length)
        text = f"map of {in_words(kind.key_type)} to {in_words(kind.value_type)}"
        return f"{text}{limits} entries" if limits else text
    if isinstance(kind, msgspec.inspect.StructType | msgspec.inspect.EnumType):
        return str(kind.cls.__name__)
    simple = {"BoolType": "bool", "BytesType": "bin", "NoneType": "nil", "AnyType": "any"}
    return simple[type(kind).__name__]


def bounds(low: int | None, high: int | None) -> str:
    if low is None or high is None:
        assert low is high is None
        return ""
    return f", {low} to {POWERS.get(high, high)}"


def default_of(field: msgspec.inspect.Field) -> str:
    """Return a field's default in the words of the page: its value if the array ends before it."""
    if field.required:
        return "required"
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if isinstance(value, bytes):
        return "empty" if not value else value.hex()
    if isinstance(value, int) and not isinstance(value, bool):
        return POWERS.get(value, str(value))
    return msgspec.json.encode(value).decode().replace("null", "nil")


def expected_rows(struct: type[msgspec.Struct]) -> list[list[str]]:
    """Return the first cells of each row of the struct's table: place, name, type, default."""
    info = msgspec.inspect.type_info(struct)
    first = 0 if info.tag is None else 1
    return [
        [str(place), f"`{field.name}`", in_words(field.type), default_of(field)]
        for place, field in enumerate(info.fields, first)
    ]


def test_the_page_has_every_message_and_no_other() -> None:
    tags = {each.__name__: msgspec.inspect.type_info(each).tag for each in structs()}
    assert len(tags) == 62
    documented = {name: tag for name, (tag, _) in sections().items()}
    enums = dict.fromkeys(("Status", "PullStatus"))
    assert documented == {**tags, **enums}


@pytest.mark.parametrize("struct", structs(), ids=lambda struct: struct.__name__)
def test_every_field_is_described_in_its_place(struct: type[msgspec.Struct]) -> None:
    table = rows(sections()[struct.__name__][1])
    assert [row[:4] for row in table] == expected_rows(struct)
    assert all(len(row) == 5 and row[4] for row in table), "what it means is missing"


@pytest.mark.parametrize("kind", [api.Status, api.PullStatus])
def test_every_status_that_travels_is_explained(kind: type[enum.Enum]) -> None:
    table = rows(sections()[kind.__name__][1])
    assert [row[0] for row in table] == [f"`{each.value}`" for each in kind]
    assert all(row[-1] for row in table)


def test_the_page_says_correctly_what_is_stored_and_what_to_repeat() -> None:
    for name, stored, again, _ in rows(sections()["Status"][1]):
        status = api.Status(name.strip("`"))
        unknown = status is api.Status.TIMEOUT
        assert stored == ("yes" if status.is_stored else "perhaps" if unknown else "no"), name
        late = unknown or status.value.startswith("FLUSH_")
        assert again.startswith("yes") == (status.is_refusal or late)


def test_the_headers_of_a_member_are_the_code_s() -> None:
    place = api.Place(api.Position(7, 65_537, 91), 0, 9)
    messages: list[Any] = [
        api.Join(1, "g", "m", 5, [api.Subscription("t")]),
        api.Joined(1, 3, ["m"], {"t": 4}),
        api.Lock(2, "g", "m", {"t": [0, 1]}, True),
        api.Locked(2, 60_000, {"t": [0]}, {"t": {0: place}}),
        api.Commit(3, "g", "t", {0: api.Position(9)}, 3_000, [0], "m"),
        api.Notice(1, "g"),
        api.Unlock(4, "g", "m", {"t": [0]}),
        api.Locked(4),
        api.Failed(3, api.FENCED, "..."),
    ]
    kinds = {True: ">", False: "<"}
    expected = [
        f"{kinds[isinstance(one, api.Sharing | api.Commit)]} {api.encode(one).hex(' ')}"
        for one in messages
    ]
    block = PAGE.partition("```members\n")[2].partition("```")[0]
    assert block.splitlines() == expected


def test_the_limits_are_the_code_s() -> None:
    text = PAGE.partition("## Limits")[2].partition("\n## ")[0]
    assert [row[:2] for row in rows(text)] == [
        ["greeting and READY", f"{api_connections.HANDSHAKE_MS / 1000:g} s"],
        [
            "TLS, greeting, READY and the proof of an identity, together",
            f"{api_connections.HANDSHAKE_MS / 1000:g} s",
        ],
        [
            "requests without a proof, on a node with identities",
            f"{api_access.REFUSED_MAX}; frames of {api_connections.STRANGER_BYTES} bytes",
        ],
        ["command", f"{zmtp.MAX_COMMAND_BYTES} bytes"],
        ["header frame", f"{api.MAX_HEADER_BYTES} bytes"],
        ["payload frame", f"{api.MAX_FRAME_BYTES} bytes"],
        ["frames of a message", f"{len(api_connections._LIMITS)}"],
        ["a message", f"{api_connections.MESSAGE_MS / 1000:g} s from its first byte to its last"],
        ["unfinished messages of all connections", mib(api_connections.HELD_BYTES_MAX)],
        ["replies that the client leaves unread", mib(api_replies.UNSENT_OF_ONE_BYTES)],
        ["the same", mib(api_replies.ENDED_AT_BYTES)],
        [
            "the same, of all connections",
            f"{mib(api_replies.UNSENT_BYTES)}; {mib(api_replies.ENDED_AT_BYTES_ALL)}",
        ],
        [
            "connections",
            f"`api.max_connections` ({ApiConfig().max_connections:,}); with n file descriptors at "
            f"most n / 2 - {shares.BESIDE_CONNECTIONS}, or n / 4 if that is greater",
        ],
        [
            "connections of one address that have sent something and wait for their first turn",
            f"{api_newcomers.OF_SOURCE_MAX}",
        ],
        ["a peer that is gone without closing", "30 s, by TCP keep-alive"],
        ["body of a record", f"{api.MAX_MESSAGE_BYTES} bytes, or `store.max_message_size`"],
        ["KEYS of a record", f"{MAX_KEYS:,} words"],
        [
            "puts that wait for their confirmation, on a node",
            "`api.max_pending_puts`, `api.max_pending_bytes`",
        ],
        [
            "pulls that wait",
            f"{api_pulls.MAX_PARKED_OF_ONE:,} of a connection, {api_pulls.MAX_PARKED:,} of a node;"
            " a pull for a missing topic waits only if the name has at most 127 characters",
        ],
        [
            "what one look of a pull with a filter compares",
            f"by tags {consume_queue.TAGGED_UNITS_MAX:,} entries of the queue, and"
            f" {filtered_pulls.MAX_RECORDS:,} records that have one of the hashes; by SQL as many"
            f" records as cost {filtered_pulls.MAX_EVALUATED:,} terms of the expression, at most"
            f" {filtered_pulls.MAX_RECORDS:,}, and with {filtered_pulls.MAX_PROPERTIES:,}"
            " properties",
        ],
        [
            "pulls whose messages must be read from the node's disk",
            f"{cold_reads.MAX_COLD_OF_ONE:,} of a connection, {cold_reads.MAX_COLD:,} of a node; "
            "one of each connection always may; a turn for each connection",
        ],
        ["commits and fetches that wait", f"{api_server.MAX_FETCHES:,} of a node"],
        [
            "a range of AskDigest; of AskBytes",
            f"{mib(api.MAX_DIGEST_BYTES)}; {mib(api.MAX_RANGE_BYTES)}",
        ],
        [
            "digests and ranges that wait",
            f"{api_ranges.MAX_RANGES_OF_ONE} of a connection, {api_ranges.MAX_RANGES} of a node",
        ],
        [
            "queries that wait (FindKey, FindTime, FindOffset)",
            f"{api_queries.MAX_QUERIES_OF_ONE} of a connection, {api_queries.MAX_QUERIES:,} of a"
            " node; one of each connection always may",
        ],
        [
            "what one FindKey looks at",
            f"{message_reader.STEPS_MAX:,} entries of the key index, {message_reader.READS_MAX:,}"
            f" records, {mib(message_reader.READ_BYTES_MAX)} of them",
        ],
        ["what one FindTime looks at", f"{api_queries.TIME_STEPS} records"],
        ["time of a query, from its arrival on", f"{api_queries.LIMIT_MS / 1000:g} s"],
        [
            "sequence numbers remembered",
            f"{api.WINDOW:,} of each of the {dedup_window._MAX_PRODUCERS:,} producers"
            f" that wrote last; the last one of {dedup_window._MAX_IDLE:,} more; the owner with"
            " most gives way",
        ],
        ["reply frame, for the client to check", mib(MAX_REPLY_BYTES)],
    ]
    for name in (api.POSITIONS_TOPIC, api.PRODUCER_ID, api.SEQUENCE):
        assert name in PAGE


def mib(size: int) -> str:
    return f"{size / 2**20:g} MiB"


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert links and all((PATH.parent / link).exists() for link in links)


def assert_like(said: bytes, line: str) -> None:
    """Compare a node's bytes with a line of the page; `..` matches any byte, or any rest."""
    wanted = line[1:].partition("#")[0].split()
    assert len(wanted) <= len(said) and (".." in wanted or len(wanted) == len(said)), line
    for place, (pair, byte) in enumerate(zip(wanted, said, strict=False)):
        assert pair in ("..", f"{byte:02x}"), f"byte {place} of {said.hex(' ')}: {line}"


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Iterator[Node]:
    """A running ASYNC_MASTER without slaves."""
    with Group(tmp_path, 1, master_role="ASYNC_MASTER") as group:
        yield group[1].start("master")


def map_of(said: Frame, rid: int) -> api.MapInfo:
    assert said.flags in (0, LONG), said
    reply = api.decode_reply(said.body)
    assert isinstance(reply, api.Map) and reply.rid == rid
    return reply.map


def test_the_exchange_in_bytes(node: Node) -> None:
    block = re.search(r"```text\n(> ff .*?)```", PAGE, re.S)
    assert block is not None
    lines = block[1].splitlines()
    assert [line[0] for line in lines] == [">", "<"] * 4
    with Wire(node.api) as wire:
        for asked, answered in zip(lines[::2], lines[1::2], strict=True):
            wire.send(bytes.fromhex(asked[1:].partition("#")[0]))
            if asked == lines[0]:
                assert_like(wire.greeting(), answered)
                continue
            said = wire.frame()
            assert_like(bytes((said.flags, len(said.body))) + said.body, answered)
            if said.flags == 0:
                assert map_of(said, 7).node == 1


HANDSHAKES = {
    "3.1": (greeting(), ready()),
    "3.0": (greeting(minor=0), ready()),
    "3.9": (greeting(minor=9), ready()),
    "another padding": (b"\xff" + b"\x5a" * 8 + greeting()[9:], ready()),
    "another case": (greeting(), ready(name=b"SOCKET-type")),
    "more properties": (greeting(), ready(more=b"\x08Identity\0\0\0\0\x05X-Own\0\0\0\x03abc")),
}


def test_everything_that_the_page_allows_works(node: Node) -> None:
    put = api.encode(api.Put(2, 1))
    payload = build_record("t", b"x" * 300, queue_id=0, born_timestamp_ms=1, born_host=NO_HOST)
    for place, (name, (hello, own)) in enumerate(HANDSHAKES.items()):
        with Wire(node.api) as wire:
            wire.shake_hands(hello, own)
            wire.send(command(b"OF-LATER"), frame(api.encode(api.AskMap(1)), LONG))
            assert map_of(wire.frame(), 1).writable, name
            ping = command(b"PING", b"\0\x64" + b"c" * 16)
            wire.send(frame(put, MORE), ping, frame(payload))
            said = [wire.frame(), wire.frame()]
            [pong] = [each for each in said if each.flags & COMMAND]
            assert pong.body == b"\x04PONG" + b"c" * 16, name
            [answer] = [each for each in said if not each.flags & COMMAND]
            reply = api.decode_reply(answer.body)
            assert isinstance(reply, api.PutDone) and reply.queue_offsets == [place], name
            wire.send(frame(api.encode(api.AskMap(3)), MORE), frame(b"not looked at"))
            map_of(wire.frame(), 3)
            wire.send(frame(put))
            empty = api.decode_reply(wire.frame().body)
            assert isinstance(empty, api.PutDone) and empty.offsets == [], name


BREACHES = {
    "an empty message": frame(b""),
    "no msgpack": frame(b"\xc1"),
    "no array": frame(msgspec.msgpack.encode({"map": 1})),
    "an unknown tag": frame(msgspec.msgpack.encode(["nonsense", 1])),
    "a missing field": frame(msgspec.msgpack.encode(["at", 1])),
    "a float": frame(msgspec.msgpack.encode(["map", 1.0])),
    "out of range": frame(msgspec.msgpack.encode(["put", 1, 2])),
    "a long header": frame(bytes(api.MAX_HEADER_BYTES + 1)),
    "a long payload": bytes((LONG,)) + (api.MAX_FRAME_BYTES + 1).to_bytes(8) + bytes(100),
    "a huge size": bytes((LONG,)) + (2**63).to_bytes(8) + bytes(100),
    "three frames": frame(api.encode(api.AskMap(1)), MORE) + frame(b"2", MORE) + frame(b"3"),
}


def test_a_forbidden_message_closes_only_its_own_connection(node: Node) -> None:
    with Wire(node.api) as other:
        other.shake_hands()
        for name, said in BREACHES.items():
            with Wire(node.api) as wire:
                wire.shake_hands()
                wire.send(said)
                last = wire.until_closed()
                if len(said) < 1_000:  # closing with unread bytes may discard the ERROR
                    assert [each.body[:6] for each in last] == [b"\x05ERROR"], name
                assert all(each.flags & COMMAND for each in last), name
        other.send(frame(api.encode(api.AskMap(9))))
        map_of(other.frame(), 9)


def client_of_the_page() -> str:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 1
    code: str = blocks[0]
    assert len(code.splitlines()) <= 60 and "hastore" not in code.replace('"hastore', "")
    return code


def test_the_client_finds_the_master_puts_and_reads_back(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "client.py"
    path.write_text(client_of_the_page())
    with Group(tmp_path) as group:
        group.start()
        silent = socket.create_server(("127.0.0.1", 0))  # a node that does not answer
        addresses = [f"tcp://127.0.0.1:{silent.getsockname()[1]}", group[2].api, group[1].api]

        def run() -> list[str]:
            done = subprocess.run(
                [sys.executable, "-W", "error", str(path), *addresses],
                capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
            )  # fmt: skip
            assert done.returncode == 0 and not done.stderr, done.stderr
            return done.stdout.splitlines()

        try:
            assert run() == [
                f"the master is {group[1].api}, epoch 65537",
                "PUT_OK SYNC_MEM(1): queue 0, queue offset 0, offset 0",
                "read b'hello, log'",
            ]
            [put] = [line for line in run() if line.startswith("PUT_OK")]
            assert "queue offset 1" in put
        finally:
            silent.close()
        with Consumer("greetings", [group[2].api]) as consumer:
            messages: list[Any] = []  # a slave shows the second one a moment later
            wait_until(lambda: messages.extend(consumer.poll(timeout_s=1.0)) or len(messages) == 2,
                       60, "not both have come")  # fmt: skip
        assert [message.body for message in messages] == [b"hello, log"] * 2
        assert len({message.properties["HS_PID"] for message in messages}) == 2
        assert {message.properties["HS_SEQ"] for message in messages} == {"0"}
