"""`hastore groups`: the lag of consumer groups, and their positions moved."""

import datetime
import json
import time

import pytest

from hastore import Admin, GroupMember
from hastore.cli import groups as commands
from hastore.cli.groups import Place, _ranges_text
from hastore.client.consumer.consumer import Consumer
from hastore.client.consumer.positions_client import Positions
from hastore.client.messages import GroupMembers
from hastore.client.producer.producer import Producer
from hastore.testing import group as running_group
from tests.cli.kit import hastore
from tests.process.harness import wait_until


@pytest.fixture(scope="module")
def node():
    """A node with ten messages in each of two queues of T, and one in U."""
    with running_group(nodes=1) as made:
        with Producer(made.bootstrap) as producer:
            for number in range(20):
                producer.send_sync("T", b"%d" % number, queue=number % 2)
            producer.send_sync("U", b"u", queue=0)
        yield made[1]


@pytest.fixture
def groups(node):
    def run(*arguments):
        return hastore("groups", *arguments, "--bootstrap", node.api.removeprefix("tcp://"))

    return run


def commit(node, group, topic, offsets):
    with Positions([node.api]) as positions:
        positions.commit(group, topic, offsets, allow_back=True)


def objects(done, code=0):
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_retention_has_removed_is_no_lag():
    assert Place("T", 0, position=3, first=5, end=10).lag == 5
    assert Place("T", 0, position=7, first=5, end=10).lag == 3
    assert Place("T", 0, position=12, first=5, end=10).lag == 0


def test_list_describe_and_lag_agree(node, groups):
    commit(node, "billing", "T", {0: 3, 1: 10})
    commit(node, "billing", "U", {0: 0})
    [billing] = [one for one in objects(groups("list", "--json")) if one["group"] == "billing"]
    assert billing == {"group": "billing", "topics": ["T", "U"], "queues": 3, "lag": 8}
    assert objects(groups("lag", "--group", "billing", "--json")) == [
        {"group": "billing", "topic": "T", "lag": 7},
        {"group": "billing", "topic": "U", "lag": 1},
    ]
    described = objects(groups("describe", "billing", "--topic", "T", "--json"))
    assert [(one["queue"], one["position"], one["end"], one["lag"]) for one in described] == [
        (0, 3, 10, 7),
        (1, 10, 10, 0),
    ]
    lines = groups("describe", "billing").stdout.splitlines()
    assert lines[0].split() == ["topic", "queue", "position", "end", "lag", "member"]
    assert lines[1].split() == ["T", "0", "3", "10", "7", "-"]


def test_queues_without_a_position_are_named(node, groups):
    """They count as no lag, and a consumer that reads some queues only has none in the others."""
    commit(node, "half", "T", {0: 10})
    note = "not counted as lag: 10 messages in queue 1 of topic T, where group half has no position"
    for arguments in (("lag", "--group", "half", "--max", "0"), ("describe", "half"), ("list",)):
        done = groups(*arguments)
        assert done.returncode == 0 and note in done.stderr
    commit(node, "half", "T", {1: 10})
    assert "half" not in groups("list").stderr


def test_retries_in_which_the_group_has_no_position_are_named(node, groups):
    """The members have ended before the first retry came: nobody has committed there."""
    commit(node, "late", "T", {0: 10, 1: 10})
    with Producer([node.api]) as producer:
        for group in ("late", "never"):
            producer.send_sync(f"%RETRY%{group}", b"again", queue=0)
    note = "not counted as lag: 1 message in queue 0 of topic %RETRY%{0}, where group {0} has no"
    for group in ("late", "never"):
        for arguments in (("lag", "--group", group), ("lag",), ("describe", group), ("list",)):
            done = groups(*arguments)
            assert done.returncode == 0 and note.format(group) in done.stderr
    assert "%RETRY%" not in groups("describe", "late", "--topic", "T").stderr
    commit(node, "late", "%RETRY%late", {0: 1})
    assert "%RETRY%late" not in groups("list").stderr


def test_members_are_shown_with_their_queues(node, groups):
    commit(node, "shared", "T", {0: 0, 1: 0})
    none = groups("members", "shared")
    assert (none.returncode, none.stdout) == (0, "")
    assert "no member of group shared is online" in none.stderr
    with Consumer(["T", "U"], [node.api], group="shared", share=True) as consumer:
        while len(consumer.assignment) < 8:
            consumer.poll(timeout_s=1)
        [member] = objects(groups("members", "shared", "--json"))
        address = member.pop("address")
        assert address.startswith("127.0.0.1:")
        assert member == {
            "group": "shared",
            "member": consumer.member,
            "client": "hastore",
            "queues": {"T": [0, 1, 2, 3], "U": [0, 1, 2, 3]},
        }
        lines = groups("members", "shared").stdout.splitlines()
        assert lines[0].split() == ["member", "address", "client", "queues"]
        assert lines[1].split(maxsplit=3) == [
            consumer.member, address, "hastore", "T 0-3; U 0-3"
        ]  # fmt: skip
        bootstrap = ("--bootstrap", node.api)
        consumed = hastore("consume", "U", "--group", "shared", "--max", "1", *bootstrap)
        assert "group shared has 1 member online, who share its queues" in consumed.stderr
        described = objects(groups("describe", "shared", "--topic", "T", "--json"))
        assert [one["member"] for one in described] == [consumer.member] * 2
        with Admin([node.api]) as admin:
            found = admin.group_members("shared")
        assert found.members == [GroupMember(consumer.member, address, "hastore")]
        assert found.owners["U"] == dict.fromkeys(range(4), consumer.member)


def test_queues_are_shown_as_ranges():
    assert _ranges_text({"orders": [0, 1, 2, 3, 7], "refunds": [0]}) == "orders 0-3, 7; refunds 0"
    assert _ranges_text({}) == _ranges_text(None) == "-"


def test_lag_can_be_a_check(node, groups):
    commit(node, "checked", "T", {0: 4})
    assert groups("lag", "--group", "checked", "--max", "6").returncode == 0
    assert groups("lag", "--group", "checked", "--max", "5").returncode == 4


@pytest.mark.parametrize(
    ("to", "more", "moved"),
    [
        ("earliest", (), {0: 0, 1: 0}),
        ("latest", (), {0: 10, 1: 10}),
        ("7", ("--queue", "1"), {0: 5, 1: 7}),
        ("2001-01-01", (), {0: 0, 1: 0}),
        ("2999-01-01T00:00:00Z", (), {0: 10, 1: 10}),
    ],
)
def test_reset_moves_a_group(node, groups, to, more, moved):
    commit(node, "mover", "T", {0: 5, 1: 5})
    arguments = ("reset", "mover", "--topic", "T", "--to", to, *more, "--json")
    planned = objects(groups(*arguments, "--dry-run"))
    assert all(not one["done"] and one["from"] == 5 for one in planned)
    done = objects(groups(*arguments))
    assert [{**one, "done": False} for one in done] == planned
    with Positions([node.api]) as positions:
        found = positions.committed("mover", "T")
    assert {queue: place.queue_offset for queue, place in found.items()} == moved


def test_reset_is_refused_while_members_are_online(node, groups):
    """Their next commit would move the group back within seconds."""
    commit(node, "busy", "T", {0: 5, 1: 5})
    with Consumer("T", [node.api], group="busy", share=True) as consumer:
        assert consumer.poll(timeout_s=60)
        done = groups("reset", "busy", "--topic", "T", "--to", "earliest")
        assert done.returncode == 1 and "nothing was changed" in done.stderr, done
        assert "1 member of group busy is online" in done.stderr
        assert groups("reset", "busy", "--topic", "T", "--to", "0", "--queue", "1", "--dry-run")
        with Positions([node.api]) as positions:
            assert positions.committed("busy", "T")[1].queue_offset == 5
        forced = groups("reset", "busy", "--topic", "T", "--to", "earliest", "--force")
        assert forced.returncode == 0, forced


def test_reset_is_refused_where_rocketmqs_clients_are_not_served():
    """Python's members are online all the same, and commit their own place after the move."""
    with running_group(nodes=1, settings={"remoting": {"enabled": False}}) as made:
        with Producer(made.bootstrap) as producer:
            producer.send_sync("T", b"x", queue=0)
        with Consumer("T", made.bootstrap, group="busy", share=True) as consumer:
            assert consumer.poll(timeout_s=60)
            consumer.commit()
            done = hastore(
                "groups", "reset", "busy", "--topic", "T", "--to", "earliest",
                "--bootstrap", made[1].api.removeprefix("tcp://"),
            )  # fmt: skip
            assert done.returncode == 1, done
            assert "1 member of group busy is online" in done.stderr


def test_reset_is_refused_if_the_master_does_not_say_who_is_online(node, groups, monkeypatch):
    """A slave that was cut off from the members knows none of them."""
    monkeypatch.setattr(commands, "_ask_members", lambda *_given: GroupMembers([], None))
    done = groups("reset", "busy", "--topic", "T", "--to", "earliest")
    assert done.returncode == 1 and "nobody knows whether members" in done.stderr, done
    assert "nothing was changed: try again, or give --force" in done.stderr


def test_reset_of_a_group_that_is_new_says_so(node, groups):
    for more in (("--dry-run",), ()):  # the look before counts most
        done = groups("reset", "bilingg", "--topic", "T", "--to", "latest", *more)
        assert done.returncode == 0
        assert "group bilingg had no position in topic T before; is its name right?" in done.stderr


def test_reset_to_a_time_between_messages(node, groups):
    with Producer([node.api]) as producer:
        producer.send_sync("timed", b"before", queue=0)
        time.sleep(0.002)  # the log counts in milliseconds
        now = datetime.datetime.now(datetime.UTC)
        time.sleep(0.002)
        producer.send_sync("timed", b"after", queue=0)
    assert groups("reset", "new", "--topic", "timed", "--to", now.isoformat()).returncode == 0
    with Consumer("timed", [node.api], group="new") as consumer:
        assert [one.body for one in consumer.poll(timeout_s=60)] == [b"after"]
        consumer.commit()


@pytest.fixture
def removed():
    """A node whose retention has removed the first messages of T; the group "late" is there."""
    retention = {"max_size": "1MiB", "hold": "1s", "check_interval": "1s"}
    settings = {"store": {"commitlog_file_size": "256KiB"}, "retention": retention}
    with running_group(nodes=1, settings=settings) as made:
        with Producer(made.bootstrap) as producer:
            producer.send_sync("T", b"first", queue=0)
            commit(made[1], "late", "T", {0: 1})
            while removed_before(made[1]) <= 1:
                producer.send_sync("T", bytes(60_000), queue=0)
        # Until retention has nothing more to remove: the first message must not move any more.
        wait_until(lambda: log_size(made[1]) <= 2**20, 60, "retention removed too little")
        yield made[1]


def log_size(node):
    status = node.status()
    return status["max_offset"] - status["min_offset"]


def removed_before(node):
    with Admin([node.api]) as admin:
        return admin.topics()["T"][0][0]


def test_consume_goes_on_where_retention_has_removed_messages(removed):
    def consume(*arguments):
        return hastore("consume", "T", *arguments, "--json", "--bootstrap", removed.api)

    lost = consume("--group", "late")
    assert (lost.returncode, lost.stdout) == (1, "")
    assert "before the first one kept" in lost.stderr and "--on-lost earliest" in lost.stderr
    assert "`hastore groups reset late --topic T --to earliest`" in lost.stderr
    found = objects(consume("--group", "late", "--on-lost", "earliest"))
    first = found[0]["queue_offset"]
    assert first == removed_before(removed)
    assert objects(consume("--group", "late")) == [], "that was committed"
    begin = consume("--from", "0", "--max", "1")
    assert objects(begin)[0]["queue_offset"] == first
    assert f"queue 0 has no message before queue offset {first:,}" in begin.stderr
    assert objects(consume("--from", "1", "--queue", "0"))[0]["queue_offset"] == first
    beyond = consume("--from", "99999", "--queue", "0", "--follow")
    assert beyond.returncode == 1 and "beyond the end" in beyond.stderr
    assert "groups reset" not in beyond.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("describe", "nobody"), "group nobody has not committed a position here"),
        (("reset", "g", "--topic", "gone", "--to", "earliest"), "there is no such topic"),
        (("reset", "g", "--topic", "T", "--to", "yesterday"), "--to yesterday: is not a time"),
        (("reset", "g", "--topic", "T", "--to", "3"), "name it with --queue"),
        (("reset", "g", "--topic", "T", "--to", "11", "--queue", "0"), "goes from 0 to 10"),
        (("reset", "g", "--topic", "T", "--to", "earliest", "--queue", "9"), "has 2 queues"),
        (("reset", "g", "--to", "earliest"), "--topic"),
    ],
)
def test_what_cannot_be_done_changes_nothing(node, groups, arguments, says):
    done = groups(*arguments)
    assert done.returncode == 2 and says in done.stderr and done.stdout == ""
    with Positions([node.api]) as positions:
        assert positions.committed("g", "T") == {}
