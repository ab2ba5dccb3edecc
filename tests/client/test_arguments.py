"""Every argument of the public API that is of a wrong kind: UsageError at once, with no node asked.

The table is held against the signatures: a new parameter needs its row.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

import hastore
from hastore import Admin, Consumer, OutgoingMessage, Position, Producer, aio
from hastore.client.consumer.positions_client import Positions
from hastore.errors import MessageIllegalError, UsageError
from hastore.protocol import api
from tests.client.conftest import Node

NOBODY = "tcp://127.0.0.1:9"
UTC = datetime.UTC
NAIVE = datetime.datetime(2026, 1, 31)
LONG = "x" * 40_000
NUMBERS = ["5", None, b"5", [5], True, {}]
SECONDS = ["5", b"5", [5], True, float("nan"), datetime.timedelta(seconds=5)]
RELEASED = memoryview(b"a")
RELEASED.release()
MOMENTS = ["2026-01-31", 1.5, True, NAIVE, NAIVE.date(), -1, 2**63, b"5", [5]]

# Values that each parameter of that name refuses, in all methods.
WRONG: dict[str, list[Any]] = {
    "bootstrap": [
        5, b"tcp://127.0.0.1:9", [5], [b"tcp://127.0.0.1:9"], [[NOBODY]], [None], [], "", "h",
        "tcp://h:x", "tcp://h:\u00b2", "tcp://h:-1", "tcp://a b:1", "tcp://a\x00b:1", "http://h:1",
        object(), True,
    ],
    "clock": [5, None, "now", datetime.datetime],
    "security": [
        5, b"client.yaml", ["client.yaml"], True, object(), {"user": "x"}, {"identity": "x"},
        {"tls_ca": 5}, {"tls_ca": ""}, {"tls_ca": "a\0"}, {"tls_ca": "\ud800"},
        {"identity": "no name", "key_file": "f"},
    ],
    "timeout_s": [*SECONDS, datetime.datetime.now(UTC)],
    "topic": [None, 5, b"t", ["t"], ("t",), {"t"}, {}, "", "\ud800", True],
    # -- of a producer
    "acks": [2, -1, "1", "ALL", 1.0, True, [1], b"all", {}],
    "compression": [5, True, "", "LZ4", "gzip", b"lz4", ["lz4"], {}],
    "compression_threshold": [*NUMBERS, 1.5, -1, 2**22 + 1],
    "sync_flush": [1, 0, None, "yes", []],
    "idempotent": [1, 0, None, "yes", []],
    "linger_ms": [*SECONDS, None, -1],
    "delivery_timeout_s": [*SECONDS, None, 0, -1],
    "max_in_flight": [*NUMBERS, 1.5, 0, 1_025],
    "batch_bytes": [*NUMBERS, 1.5, 0, 2**22 + 1],
    "body": ["text", None, 5, ["a"], {}, True, RELEASED],
    "messages": [
        None, 5, b"body", bytearray(b"body"), "body", ["text"], [5], [None], [[b"a"]],
        [b"good", {"body": b"a"}], OutgoingMessage(b"a"),
    ],
    "key": [5, ["k"], {}, RELEASED, b"\xff\xfe", "\ud800", 1.5, True, object()],
    "tags": [5, ["a"], b"a", {"a": 1}, "\ud800", 1.5, True, object()],
    "properties": [
        5, 0, False, True, "ab", b"ab", ["ab"], [("a",)], [("a", "b", "c")], [5], [None],
        {"n": None}, {"n": 1}, {1: "n"}, {"n": ["a"]}, {"n": b"a"}, [("n", None)], {"n": "\ud800"},
        {"HS_PID": "x"}, {"HS_SEQ": "0"}, object(),
    ],
    "transaction_group": [5, b"g", ["g"], "", "a b", "g" * 256, True, "\ud800", {}],
    "check": [5, "COMMIT", b"x", [], True],
    "check_after_s": ["3", [3], 1.5, True, 0, -1, 2_592_001, b"3", {}],
    # -- of a consumer
    "queue": ["0", [0], 1.5, True, -1, 2**31, b"0", {}],
    "message": [None, 5, b"body", "body", ["m"], object()],
    "max_attempts": [*NUMBERS, 1.5, -1, 2**31],
    "dead_letter": [1, 0, None, "yes"],
    "delay_level": ["3", [3], 1.5, True, 0, -1, 100, b"3", {}],
    "queues": [0, "01", b"01", [], ["0"], [-1], [2**31], [None], [True], 1.5],
    "group": [5, b"g", ["g"], "", "g" * 256, True, "\ud800", {}],
    "sql": [5, ["a"], b"a", {"a": 1}, "\ud800", 1.5, True, object(), "", "a >", "a" * 8_193],
    "start": [5, None, "first", b"earliest", ["earliest"], 0],
    "on_lost": [5, None, "first", b"raise", ["raise"]],
    "read_from": [5, None, "slave", b"slaves", ["slaves"]],
    "max_bytes": [*NUMBERS, 1.5, 0, 2**30],
    "prefetch_bytes": [*NUMBERS, 1.5, -1],
    "max_messages": [*NUMBERS, 1.5, 0, -1],
    "share": [1, 0, None, "yes", []],
    "listener": [5, "f", [], print],
    "auto_commit_s": [*SECONDS, -1],
    "position": [
        "0", None, 1.5, -1, 2**63, True, [0], (0, 1), NAIVE,
        Position("0"), Position(-1), Position(0, "1", 0), Position(0, 1, -1),  # type: ignore
    ],
    "timestamp_ms": [*MOMENTS, None],
    # -- of an Admin, and of Positions
    "begin_ms": [*MOMENTS, None],
    "end_ms": [*MOMENTS, None],
    "before": ["5", b"5", [5], True, {}, 1.5, -1],
    "message_id": [5, None, b"00", ["00"], "00", "zz" * 16, True],
    "offsets": [
        None, 5, [0], "0", {}, {"0": 1}, {0: "1"}, {0: -1}, {-1: 0}, {0: None}, {0: True},
    ],
    "allow_back": [1, 0, None, "yes"],
    "name": [None, 5, b"t", ["t"], {}, "", "\ud800", True],
    "read_queues": ["5", b"5", [5], True, {}, 1.5, -1, 4_097],
    "write_queues": ["5", b"5", [5], True, {}, 1.5, -1, 4_097],
    "perm": ["5", b"5", [5], True, {}, 1.5, -1, 7],
    "order": [1, 0, "yes", []],
    "attributes": [5, "a", ["a"], {"a": 1}, {1: "a"}, {"a": None}, {"a": "\udcff"}, {"\ud800": ""}],
}  # fmt: skip
# Wrong for one method alone; and values above that one method accepts.
ALSO: dict[tuple[str, str], list[Any]] = {
    ("Admin.query_key", "key"): ["", None, LONG],
    ("Admin.query_key", "max_messages"): [1_001],
    ("Admin.query_key", "topic"): [LONG],
    ("Admin.create_topic", "queues"): [4_097],
    ("Consumer.__init__", "topic"): [LONG],
    ("Consumer.__init__", "tags"): ["", "||", " ", "a" * 8_193],
    ("Consumer.position", "queue"): [None],
    ("Consumer.seek", "queue"): [None],
    ("Consumer.poll", "timeout_s"): [None],
    ("Positions.commit", "group"): [None],
    ("Positions.committed", "group"): [None],
}
# A valid value of each parameter without a default.
RIGHT: dict[str, Any] = {
    "topic": "t", "body": b"", "messages": [b""], "queue": 0, "position": 0, "timestamp_ms": 0,
    "key": "k", "message_id": "7F00000100002A9F0000000000000000", "group": "g",
    "offsets": {0: 1}, "name": "t",
}  # fmt: skip


def methods_of(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods of a class with parameters, and its constructor."""
    for name, member in inspect.getmembers(owner, inspect.isfunction):
        if name == "__init__" or not name.startswith("_"):
            yield name, member


def cases(owner: type) -> list[tuple[str, str, Any]]:
    """Return (method, parameter, wrong value) for every parameter of a class."""
    found = []
    for method, function in methods_of(owner):
        for name in list(inspect.signature(function).parameters)[1:]:
            wrong = WRONG[name] + ALSO.get((f"{owner.__name__}.{method}", name), [])
            found += [(method, name, value) for value in wrong]
    return found


def arguments(function: Callable[..., Any], name: str, value: Any) -> dict[str, Any]:
    """Return what a call needs, with one argument given."""
    needed = {
        each.name: RIGHT[each.name]
        for each in list(inspect.signature(function).parameters.values())
        if each.default is inspect.Parameter.empty and each.name != "self"
    }
    return {**needed, name: value}


def named_in(name: str, failure: BaseException) -> None:
    """Assert that the error names the argument."""
    assert name in str(failure) or name.replace("_", " ") in str(failure), failure


def it_waited(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a node was asked, or waited for")


SYNCHRONOUS: list[tuple[type, Callable[[], Any]]] = [
    (Producer, lambda: Producer(NOBODY)),
    (Consumer, lambda: Consumer("t", NOBODY, group="g")),
    (Admin, lambda: Admin(NOBODY)),
    (Positions, lambda: Positions(NOBODY)),
    (OutgoingMessage, lambda: OutgoingMessage(b"")),
]


def forbid_waiting(client: Any, patch: pytest.MonkeyPatch) -> None:
    """Make every request to a node fail the test."""
    if isinstance(client, Producer):
        patch.setattr(client._driver, "wait_found", it_waited)
        patch.setattr(client._driver, "flush", it_waited)
        patch.setattr(client._window, "admit", it_waited)
    elif isinstance(client, aio.Producer):
        patch.setattr(client._driver, "send", it_waited)
        patch.setattr(client._driver, "flush", it_waited)
    elif not isinstance(client, OutgoingMessage):
        patch.setattr(client._requester, "ask_all", it_waited)


@pytest.mark.parametrize(("owner", "make"), SYNCHRONOUS, ids=lambda each: each.__name__)
def test_a_wrong_argument_is_named_at_once(owner: type, make: Callable[[], Any]) -> None:
    client = make()
    with pytest.MonkeyPatch.context() as patch:
        forbid_waiting(client, patch)
        for method, name, value in cases(owner):
            given = arguments(getattr(owner, method), name, value)
            call = owner if method == "__init__" else getattr(client, method)
            try:
                with pytest.raises(UsageError) as failure:
                    call(**given)
            except BaseException as other:
                raise AssertionError(f"{owner.__name__}.{method}({name}={value!r})") from other
            named_in(name, failure.value)
    if hasattr(client, "close"):
        client.close()


@pytest.mark.parametrize("owner", [aio.Producer, aio.Consumer, aio.Admin])
def test_the_same_for_asyncio(owner: Any) -> None:
    async def main() -> None:
        client = owner("t", NOBODY, group="g") if owner is aio.Consumer else owner(NOBODY)
        with pytest.MonkeyPatch.context() as patch:
            forbid_waiting(client, patch)
            for method, name, value in cases(owner):
                given = arguments(getattr(owner, method), name, value)
                try:
                    with pytest.raises(UsageError) as failure:
                        if method == "__init__":
                            owner(**given)
                        else:
                            await getattr(client, method)(**given)
                except BaseException as other:
                    raise AssertionError(f"{owner.__name__}.{method}({name}={value!r})") from other
                named_in(name, failure.value)
        await client.close()

    asyncio.run(main())


def test_an_error_names_the_given_value_and_the_expected_ones() -> None:
    with pytest.raises(UsageError) as failure:
        Consumer("t", NOBODY, group=5)  # type: ignore[arg-type]
    assert str(failure.value) == (
        "group: expected a str of 1 to 255 characters without lone surrogates, got 5 (int)"
    )
    with Consumer("t", NOBODY) as consumer, pytest.raises(UsageError) as failure:
        consumer.seek_to_time(NAIVE)
    assert "got datetime.datetime(2026, 1, 31, 0, 0) (datetime)" in str(failure.value)
    assert "a datetime with a time zone" in str(failure.value)
    with Producer(NOBODY) as producer:
        with pytest.raises(UsageError, match=r"^properties\['n'\]: .*got None \(NoneType\)$"):
            producer.send("t", b"", properties={"n": None}, queue=0)  # type: ignore[dict-item]
        with pytest.raises(UsageError, match=r"^messages\[1\]: .*got 'text' \(str\)$"):
            producer.send_batch("t", [b"a", "text"])  # type: ignore[list-item]
        with pytest.raises(UsageError, match=r"^body: expected bytes.*got 'text' \(str\)$"):
            producer.send("t", "text", queue=0)  # type: ignore[arg-type]
        with pytest.raises(MessageIllegalError, match="at most 4194304 fit"):
            producer.send("t", bytes(2**22 + 1), queue=0)


def test_a_key_of_bytes_is_the_same_as_its_text(node: Node) -> None:
    with Producer([node.address]) as producer:
        sent = [
            producer.send_sync("t", b"", key="flug-\u00fc"),
            producer.send_sync("t", b"", key="flug-\u00fc".encode()),
            producer.send_sync("t", b"", key=bytearray("flug-\u00fc", "utf-8")),
            *producer.send_batch("t", [OutgoingMessage(b"", key="flug-\u00fc".encode())]).result(9),
        ]
    assert len({result.queue_id for result in sent}) == 1
    with Admin([node.address]) as admin:
        found = admin.query_key("t", "flug-\u00fc".encode())
    assert [message.key for message in found] == ["flug-\u00fc"] * 4

    async def main() -> None:
        async with aio.Producer([node.address]) as producer:
            result = await producer.send("t", b"", key="flug-\u00fc".encode())
            assert result.queue_id == sent[0].queue_id

    asyncio.run(main())


def test_bytes_that_are_not_utf8_are_written_back_unchanged(node: Node) -> None:
    """Another client may have written bytes that are not UTF-8; they can be sent on unchanged."""
    with Producer([node.address]) as producer:
        for _ in range(2):
            producer.send_sync("t", b"", tags="\udcff", properties={"\udcfe": "a"}, queue=0)
        text = producer.send_sync("t", b"", key="k", properties=[("a", "b"), ("a", "c")], queue=0)
        assert text.offset
    with Consumer("t", [node.address], queues=[0]) as consumer:
        message = consumer.poll(1)[0]
    assert (message.tags, message.properties["\udcfe"]) == ("\udcff", "a")


class Kind(str, enum.Enum):  # noqa: UP042 - whose format() is its name
    """A str whose `str()` is different."""

    ONE = "one"


def test_a_text_of_another_class_is_stored_as_the_text_it_is(node: Node) -> None:
    with Producer([node.address]) as producer:
        producer.send_sync("t", b"", key=Kind.ONE, tags=Kind.ONE, properties={Kind.ONE: Kind.ONE})
    with Consumer("t", [node.address]) as consumer:
        [message] = consumer.poll()
    assert (message.key, message.tags, message.properties["one"]) == ("one", "one", "one")


def test_a_time_is_a_datetime_or_milliseconds(node: Node) -> None:
    with Producer([node.address]) as producer:
        producer.send_sync("t", b"early", queue=0)
    with Consumer("t", [node.address], queues=[0]) as consumer:
        [stored] = consumer.poll()
        at_ms = stored.store_timestamp_ms
        at = datetime.datetime.fromtimestamp(at_ms / 1000.0, UTC).replace(
            microsecond=at_ms % 1000 * 1000
        )
        tokyo = at.astimezone(datetime.timezone(datetime.timedelta(hours=9)))
        micro = datetime.timedelta(microseconds=1)
        for moment, place in (
            (at_ms, 0), (at, 0), (tokyo, 0), (at - micro, 0), (at + micro, 1), (at_ms + 1, 1),
        ):  # fmt: skip
            consumer.seek_to_time(moment)
            assert consumer.position(0) == Position(place), moment
    with Producer([node.address]) as producer:
        producer.send_sync("u", b"", key="k", queue=0)
    with Admin([node.address]) as admin:
        [message] = admin.query_key("u", "k")
        at = datetime.datetime.fromtimestamp(message.store_timestamp_ms / 1000.0, UTC)
        asked: list[api.FindKey] = []
        transport = admin._requester.transport
        transport.send = spy(transport.send, asked)  # type: ignore
        admin.query_key("u", "k", begin_ms=at + micro, end_ms=at + micro)
    [find] = [each for each in asked if isinstance(each, api.FindKey)]
    assert (find.begin_ms, find.end_ms) == (
        message.store_timestamp_ms + 1, message.store_timestamp_ms
    )  # fmt: skip


def spy(send: Callable[[str, Any], bool], asked: list[Any]) -> Callable[[str, Any], bool]:
    def sending(address: str, message: Any) -> bool:
        asked.append(message)
        return send(address, message)

    return sending


@pytest.mark.parametrize("kind", [Producer, aio.Producer])
@pytest.mark.parametrize("linger_ms", [2_000, 3_000.0, float("inf")])
def test_a_message_must_not_linger_for_longer_than_it_may_take(kind: Any, linger_ms: float) -> None:
    """It would end unsent, and its error would blame the node."""
    with pytest.raises(UsageError, match=r"linger_ms: .* delivery_timeout_s, 2 s"):
        kind([NOBODY], linger_ms=linger_ms, delivery_timeout_s=2)


def test_ints_of_other_types_and_infinite_times_are_accepted(node: Node) -> None:
    class Int:
        def __index__(self) -> int:
            return 2

    huge, count = 10**400, Int()
    with Producer(
        [node.address], max_in_flight=count, delivery_timeout_s=huge  # type: ignore[arg-type]
    ) as producer:
        assert producer.send_sync("t", b"", queue=Int()).queue_id == 2  # type: ignore[arg-type]
        assert producer.flush(float("inf")) and producer.flush(huge)
        assert producer.flush(-1) in (True, False)  # a negative time
    with Consumer("t", [node.address], queues=[Int()], timeout_s=1e12) as consumer:  # type: ignore
        assert len(consumer.poll(timeout_s=float("inf"))) == 1
        assert consumer.poll(timeout_s=-0.1) == []
        assert consumer.poll(timeout_s=-huge) == []
        assert consumer.position(2).queue_offset == 1


def test_a_malformed_request_is_not_sent(node: Node) -> None:
    """32,767 characters are allowed, but not 64 KiB: a node would close the connection."""
    with Consumer("\u4e2d" * 32_000, [node.address], timeout_s=5.0) as consumer:
        with pytest.raises(UsageError, match="a header of 96"):
            consumer.positions()
    assert set(hastore.__all__) >= {"Admin", "Consumer", "OutgoingMessage", "Producer"}
