"""The Python of docs/python-api.md and docs/testing.md, run against real nodes."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hastore import Consumer, Decision, Message, Producer
from hastore.testing.groups import Group, group
from tests.cli.kit import hastore
from tests.documents.blocks import Block, take

API, TESTING = "docs/python-api.md", "docs/testing.md"
IMPORTS = take(API, "from hastore import Admin")
PRODUCER = take(API, "from hastore import Producer\nfrom hastore.errors")
TRANSACTIONS = take(API, "import time\nfrom hastore import Decision")
CONSUMER = take(API, 'from hastore import Consumer\n\nwith Consumer("orders"')
SHARED = take(API, "from hastore import Consumer, RebalanceListener")
SENT_BACK = take(API, "for message in consumer.poll():\n    try:")
DEAD_LETTERS = take(API, "from hastore.dead_letters import")
SECURITY = take(API, "from hastore import Producer, Security")
ASYNCIO = take(API, "import asyncio")
TRACES = take(API, "from hastore import Consumer, Producer\nfrom hastore.otel")
CRASH = take(TESTING, "from hastore import Producer")
FIXTURE = take(TESTING, "def test_orders_survive_a_crash(hastore_group)")
HISTORY = take(TESTING, "from hastore import Consumer, Producer\nfrom hastore.history")
CHECKED = take(TESTING, "hastore check history.jsonl")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with group(folder=tmp_path_factory.mktemp("pair")) as made:
        yield made


class EnoughError(Exception):
    """Ends an example that would wait for messages forever."""


def play(block: Block, pair: Group, **names: Any) -> dict[str, Any]:
    """Run a block with the addresses of a pair; return its names."""
    code = block.text
    for shown, node in zip(("tcp://127.0.0.1:10911", "tcp://127.0.0.1:10921"), pair, strict=True):
        code = code.replace(shown, node.api)
    space = {"__name__": "example", **names}
    exec(compile(code, str(block), "exec"), space)  # noqa: S102 - it is the product's own
    return space


def test_imports(pair: Group) -> None:
    assert "SilentNode" in play(IMPORTS, pair)


def test_a_producer(pair: Group, capsys: pytest.CaptureFixture[str]) -> None:
    play(PRODUCER, pair)
    assert "SYNC_MEM(1)" in capsys.readouterr().out


def test_a_transaction(pair: Group) -> None:
    kept: list[str] = []

    class Database:
        @staticmethod
        def insert_order(number: str) -> None:
            kept.append(number)

        @staticmethod
        def commit() -> None:
            kept.append("commit")

        @staticmethod
        def has_order(number: str) -> bool:
            return number in kept

    names = play(TRANSACTIONS, pair, addresses=pair.bootstrap, database=Database())
    assert kept == ["4711", "commit"]
    kept.clear()
    check, now = names["check"], [0.0]
    names["time"] = SimpleNamespace(monotonic=lambda: now[0])
    message = SimpleNamespace(key="4712", born_timestamp_ms=1)  # made long ago, by our clock
    assert check(message) is check(message) is Decision.UNKNOWN
    now[0] = 61.0
    assert check(message) is Decision.ROLLBACK
    kept.append("4712")
    assert check(message) is Decision.COMMIT
    assert not names["first_asked"]


def test_a_consumer(pair: Group, capsys: pytest.CaptureFixture[str]) -> None:
    with Producer(pair.bootstrap) as producer:
        producer.send_sync("orders", b"1", key="k")
    while not capsys.readouterr().out:  # a poll that finds nothing within its second ends
        play(CONSUMER, pair)


def test_a_shared_consumer(pair: Group) -> None:
    with Producer(pair.bootstrap) as producer:
        producer.send_sync("flights", b"AA 1")

    def show(*_shown: object) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        play(SHARED, pair, print=show)


def test_what_cannot_be_handled_is_sent_back(pair: Group) -> None:
    with Producer(pair.bootstrap) as producer:
        producer.send_sync("bookings", b"poison")
    seen: list[bytes] = []

    def handle(message: Message) -> None:
        seen.append(message.body)
        raise EnoughError

    with Consumer("bookings", pair.bootstrap, group="desk", share=True) as consumer:
        while not seen:
            play(SENT_BACK, pair, consumer=consumer, handle=handle, log=logging.getLogger())
        assert sum(consumer.lag().values()) == 0
    with Consumer("SCHEDULE_TOPIC_XXXX", pair.bootstrap) as waiting:
        (copy,) = waiting.poll(timeout_s=60)
        assert copy.properties["REAL_TOPIC"] == "%RETRY%desk"


def test_dead_letters(pair: Group, capsys: pytest.CaptureFixture[str]) -> None:
    with Producer(pair.bootstrap) as producer:
        place = {"RETRY_TOPIC": "orders"}
        producer.send_sync("%DLQ%billing", b"x", key="k", queue=0, properties=place)
    told = ""
    while not told:  # until the node's replay has come to it
        play(DEAD_LETTERS, pair, addresses=pair.bootstrap)
        told = capsys.readouterr().out
    assert told.startswith("k 0 SendResult(PUT_OK, 'orders', queue"), told


def test_security(pair: Group, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = hastore("keys", "new", "orders-app", "--file", "identities.yaml")
    assert made.returncode == 0, made.stderr
    assert hastore("keys", "ca", "--dir", ".").returncode == 0
    found = play(SECURITY, pair)
    assert found["security"].key_file == "orders-app.key"


def test_asyncio(pair: Group, capsys: pytest.CaptureFixture[str]) -> None:
    play(ASYNCIO, pair)
    assert int(capsys.readouterr().out) > 0


def test_traces(pair: Group) -> None:
    charged: list[bytes] = []
    pytest.importorskip("opentelemetry")
    while not charged:
        play(TRACES, pair, bootstrap=pair.bootstrap, charge=charged.append)
    assert charged


def test_a_group_in_ones_own_tests(pair: Group, tmp_path: pathlib.Path) -> None:
    names = play(CRASH, pair)
    names["test_orders_survive_a_crash"]()
    play(FIXTURE, pair, **names)["test_orders_survive_a_crash"](pair)


@pytest.mark.full
def test_a_history_of_ones_own_tests(pair: Group, tmp_path: pathlib.Path) -> None:
    """It comes last, because it kills the master; its topic has no messages of other blocks."""
    own = replace(HISTORY, text=HISTORY.text.replace('"orders"', '"recorded-orders"'))
    play(own, pair)["test_no_order_is_lost"](pair, tmp_path)
    for line in CHECKED.text.splitlines():
        typed = line.replace("history.jsonl", str(tmp_path / "history.jsonl"))
        typed = typed.replace("node2.yaml", str(pair[2].config))
        typed = typed.replace("data/node2", str(pair[2].store))
        done = hastore(*typed.split()[1:])
        assert done.returncode == 0, (done.stdout, done.stderr)
