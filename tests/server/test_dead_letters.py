"""Dead letters of a group, listed and sent again by the client and by commands, over a node."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from subprocess import CompletedProcess

import pytest

import hastore
from hastore.client.consumer.shared_consumer import SharedConsumer
from hastore.client.messages import Message
from hastore.dead_letters import (
    RESENT_FROM,
    DeadLetter,
    Resent,
    To,
    read_dead_letters,
    resend_dead_letters,
)
from hastore.errors import MessageIllegalError, UsageError
from hastore.server.node import Node
from tests.cli.kit import hastore as run
from tests.server.kit import config_of, running
from tests.server.test_sent_back import one_of

UNIQUE = "7F0000010001000000000000000000AA"


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Iterator[Node]:
    with running(Node(config_of(tmp_path), lambda: None)) as started:
        with hastore.Admin(started.api.endpoint) as admin:
            admin.create_topic("orders", queues=1)
        yield started


@pytest.fixture
def member(node: Node) -> Iterator[SharedConsumer]:
    with hastore.SharedConsumer("orders", node.api.endpoint, group="g") as consumer:
        yield consumer


def give_up(node: Node, member: SharedConsumer, *keys: str, **properties: str) -> None:
    """Make a dead letter of a new message for each key."""
    with hastore.Producer(node.api.endpoint) as producer:
        for key in keys:
            producer.send_sync(
                "orders", b"order " + key.encode(), key=key, tags="new", properties=properties
            )
    for _ in keys:
        member.send_back(one_of(member), dead_letter=True)
    member.commit()


def letters(node: Node) -> list[DeadLetter]:
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    return list(read_dead_letters("g", node.api.endpoint))


def messages(node: Node, topic: str = "orders") -> list[Message]:
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    with hastore.Consumer(topic, node.api.endpoint, read_from="master") as consumer:
        count = sum(consumer.end_offsets().values())
        found: list[Message] = []
        while len(found) < count:
            found += consumer.poll(timeout_s=60)
        return found


def test_each_is_sent_again_once_and_comes_to_its_topic(
    node: Node, member: SharedConsumer
) -> None:
    give_up(node, member, "a", "b", n="1")
    give_up(node, member, "c", UNIQ_KEY=UNIQUE)
    dead = letters(node)
    assert [(one.topic, one.attempts, one.message.key) for one in dead] == [
        ("orders", 1, "a"), ("orders", 1, "b"), ("orders", 1, "c"),
    ]  # fmt: skip
    first = messages(node)
    assert [one.origin_id for one in dead] == [one.message_id for one in first]
    planned = resend_dead_letters(dead, node.api.endpoint, dry_run=True)
    assert planned == [Resent(one) for one in dead]
    done = resend_dead_letters([*dead[:2], dead[0]], node.api.endpoint)
    assert [(one.letter.message.key, one.result is not None) for one in done] == [
        ("a", True), ("b", True),
    ]  # fmt: skip
    # Another run, as after a crash: it sends what is lacking.
    again = resend_dead_letters(letters(node), node.api.endpoint)
    assert [one.result is not None for one in again] == [False, False, True]
    found = messages(node)[3:]
    assert [one.copy.queue_offset if one.copy else None for one in again] == [3, 4, None]
    assert [one.body for one in found] == [b"order a", b"order b", b"order c"]
    assert [(one.key, one.tags, one.reconsume_times) for one in found] == [
        ("a", "new", 0), ("b", "new", 0), ("c", "new", 0),
    ]  # fmt: skip
    names = {"KEYS", "TAGS", "HS_PID", "HS_SEQ", "UNIQ_KEY", RESENT_FROM}
    assert found[0].properties.keys() == names | {"n"} and found[0].properties["n"] == "1"
    assert found[2].properties["UNIQ_KEY"] == UNIQUE
    assert [one.body for one in (one_of(member), one_of(member), one_of(member))] == [
        b"order a", b"order b", b"order c",
    ]  # fmt: skip


def test_a_copy_that_is_given_up_too_is_another_dead_letter(
    node: Node, member: SharedConsumer
) -> None:
    give_up(node, member, "a")
    resend_dead_letters(letters(node), node.api.endpoint)
    member.send_back(one_of(member), dead_letter=True)
    done = resend_dead_letters(letters(node), node.api.endpoint)
    assert [one.result is not None for one in done] == [False, True]
    assert done[0].copy is not None and done[0].copy.queue_offset == 1
    assert len(messages(node)) == 3


def test_for_the_group_alone_it_goes_to_its_retries(node: Node, member: SharedConsumer) -> None:
    """Other groups that read the topic have had the message already."""
    give_up(node, member, "a")
    tries: list[tuple[To, bool]] = [("group", True), ("group", False), ("topic", False)]
    for to, is_sent in tries:
        (done,) = resend_dead_letters(letters(node), node.api.endpoint, to=to)
        assert (done.result is not None, done.copy is not None) == (is_sent, not is_sent), to
    (copy,) = messages(node, "%RETRY%g")
    assert copy.properties["RETRY_TOPIC"] == "orders" and copy.queue_id == 0
    assert len(messages(node)) == 1


def test_one_that_does_not_say_its_topic_stays(node: Node) -> None:
    with hastore.Producer(node.api.endpoint) as producer:
        producer.send_sync("%DLQ%g", b"of another program", queue=0)
        producer.send_sync("%DLQ%g", b"x", queue=0, properties={"RETRY_TOPIC": "orders"})
    one, two = resend_dead_letters(letters(node), node.api.endpoint)
    assert isinstance(one.error, MessageIllegalError)
    assert "does not say from which topic it came" in str(one.error)
    assert two.result is not None


def test_a_group_without_dead_letters_has_none(node: Node) -> None:
    assert letters(node) == []
    assert resend_dead_letters([], node.api.endpoint) == []


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="the group 'my.group' has no dead letters: for these"):
        read_dead_letters("my.group", "127.0.0.1:1")
    with pytest.raises(UsageError, match='to: expected one of "topic", "group"'):
        resend_dead_letters([], "127.0.0.1:1", to="queue")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="letters: expected DeadLetters"):
        resend_dead_letters([b"x"], "127.0.0.1:1", dry_run=True)  # type: ignore[list-item]


def test_nodes_that_are_down_are_waited_for_once(node: Node, member: SharedConsumer) -> None:
    give_up(node, member, "a", "b")
    dead = letters(node)
    done = resend_dead_letters(dead, "127.0.0.1:1", timeout_s=0.2)
    assert [type(one.error) for one in done] == [hastore.errors.UnreachableError] * 2
    assert done[0].error is done[1].error


def groups(node: Node, *arguments: str) -> CompletedProcess[str]:
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    return run("groups", *arguments, "--bootstrap", node.api.endpoint.removeprefix("tcp://"))


def test_the_commands_list_them_and_send_them_again(node: Node, member: SharedConsumer) -> None:
    give_up(node, member, "a", "b")
    lines = groups(node, "dead-letters", "g").stdout.splitlines()
    assert lines[1].startswith("0:1  orders  key b  1 attempt  born 20") and len(lines) == 2
    listed = groups(node, "dead-letters", "g", "--topic", "orders", "--json").stdout.splitlines()
    one = json.loads(listed[0])
    assert {name: one[name] for name in ("group", "queue_id", "queue_offset", "topic", "key")} == {
        "group": "g", "queue_id": 0, "queue_offset": 0, "topic": "orders", "key": "a",
    }  # fmt: skip
    none = groups(node, "dead-letters", "g", "--topic", "refunds")
    assert (none.returncode, none.stdout) == (0, "") and "has no dead letters of" in none.stderr
    planned = groups(node, "resend", "g", "--all", "--dry-run")
    assert planned.stdout.splitlines() == [
        "would be sent: 0:0  orders  key a", "would be sent: 0:1  orders  key b",
    ]  # fmt: skip
    wrong = groups(node, "resend", "g", "--offset", "1", "--offset", "7")
    assert wrong.returncode == 2 and "queue 0 of %DLQ%g has no message 7" in wrong.stderr
    assert len(messages(node)) == 2, "nothing was sent"
    done = groups(node, "resend", "g", "--offset", "1", "--json")
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)
    assert (sent["outcome"], sent["sent_id"]) == ("sent", messages(node)[-1].message_id)
    again = groups(node, "resend", "g", "--all", "--to", "group")
    assert again.stdout.splitlines() == [
        "sent: 0:0  orders  key a", "sent before: 0:1  orders  key b",
    ]  # fmt: skip
    assert "sent: 1; sent before: 1" in again.stderr


def test_other_groups_that_get_the_copies_are_named(node: Node, member: SharedConsumer) -> None:
    give_up(node, member, "a")
    with hastore.Consumer("orders", node.api.endpoint, group="shipping") as other:
        assert other.poll(timeout_s=60)
        other.commit()
    done = groups(node, "resend", "g", "--all", "--dry-run")
    note = "shipping reads topics of group g, too, and gets these messages once more; with"
    assert note in done.stderr
    assert "shipping" not in groups(node, "resend", "g", "--all", "--to", "group").stderr


def test_what_is_not_sent_is_an_error(node: Node) -> None:
    with hastore.Producer(node.api.endpoint) as producer:
        producer.send_sync("%DLQ%g", b"of another program", queue=0)
    done = groups(node, "resend", "g", "--all")
    assert done.returncode == 1 and "not sent: 0:0 - key -: message 0 in queue 0" in done.stderr
    for wrong in ((), ("--all", "--offset", "1"), ("--offset", "1", "--topic", "t")):
        assert groups(node, "resend", "g", *wrong).returncode == 2
    assert groups(node, "dead-letters", "my.group").returncode == 2
    assert "has no such dead letters" in groups(node, "resend", "none", "--all").stderr
