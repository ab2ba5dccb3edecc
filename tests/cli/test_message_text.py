"""Templates of `consume --format`, the JSON and keyed lines of `produce`, and the round trip."""

import json

import pytest

from hastore import Consumer, Producer
from hastore.cli.message_text import Template, has_key, parse_json, parse_keyed
from hastore.client.consumer.positions_client import Positions
from hastore.errors import UsageError
from tests.cli.kit import hastore
from tests.cli.test_status import make_group, pair

__all__ = ["make_group", "pair"]


class One:
    """What a template and a filter ask of a message."""

    topic, queue_id, queue_offset, key, tags, message_id = "t", 2, 7, "a b", None, "ID"
    store_timestamp_ms, born_timestamp_ms, properties = 1_500, 2**62, {"KEYS": "a b"}


@pytest.mark.parametrize(
    ("text", "filled"),
    [("%b\n", b"body\n"), (r"%k\t%g|%t\n", b"a b\t|t\n"), ("%q/%o %i %S %%", b"2/7 ID 4 %"),
     ("%s", b"1970-01-01T00:00:01.500Z"), ("%d", str(2**62).encode()),
     ("%p", b'{"KEYS": "a b"}'), ("", b""), (r"\\%b é", "\\body é".encode())],
)  # fmt: skip
def test_a_template(text, filled):
    assert Template(text).fill(One(), b"body") == filled


@pytest.mark.parametrize("text", ["%x", "%", "\\", r"\x", "%b%"])
def test_a_wrong_template_is_refused(text):
    with pytest.raises(UsageError, match="is unknown"):
        Template(text)


def test_a_key_among_several():
    assert all(has_key(One(), key) for key in ("a b", "a", "b")) and not has_key(One(), "c")


def test_a_keyed_line():
    assert parse_keyed(b"k:b:c", b":") == (b"b:c", {"key": b"k"})
    assert parse_keyed(b"k => b", b" => ") == (b"b", {"key": b"k"})


@pytest.mark.parametrize(
    ("line", "text"),
    [(b"", "no JSON"), (b"[]", "no JSON object"), (b"{}", "give body"), (b"\xff", "no JSON"),
     (b'{"body": 1}', "give body"), (b'{"body": "a", "body_base64": "YQ=="}', "give body"),
     (b'{"body_base64": "%"}', "body_base64"), (b'{"body": "\\ud800"}', "surrogates"),
     (b'{"body": "a", "key": 1}', "key: 1 is not a str"),
     (b'{"body": "a", "delay_level": true}', "delay_level"),
     (b'{"body": "a", "properties": []}', None), (b'{"body": "a", "properties": "x"}', "object"),
     (b'{"body": "a", "body_error": "junk"}', "not readable: junk"),
     (b"[" * 100_000, "no JSON")],
)  # fmt: skip
def test_any_line_is_a_message_or_one_error(line, text):
    if text is None:
        assert parse_json(line, keep_queues=False).body == b"a"
        return
    with pytest.raises(UsageError, match=text):
        parse_json(line, keep_queues=False)


def test_what_hastore_sets_itself_is_left_out():
    given = {"body": "a", "properties": {"KEYS": "k", "HS_PID": "p", "HS_SEQ": "1", "x": "y"}}
    found = parse_json(json.dumps(given).encode(), keep_queues=False)
    assert found.options["properties"] == {"x": "y"}
    with pytest.raises(UsageError, match="queue_id"):
        parse_json(b'{"body": "a"}', keep_queues=True)


def run(group, *arguments, stdin=None):
    done = hastore(*arguments, "--bootstrap", group.api(), stdin=stdin)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_what_consume_prints_produce_takes(pair):
    with Producer(pair.api().split(",")) as producer:
        producer.send_sync("from", b"one", key="k1", tags="red", properties={"x": "1", "y": "é"})
        producer.send_sync("from", b"\xff\x00", queue=2)
        producer.send_sync("from", b"two\nlines", key="k1 k2", queue=2)
    code, lines, problems = run(pair, "consume", "from", "--json")
    assert code == 0, problems
    text = "".join(f"{line}\n" for line in lines).encode()
    code, _, problems = run(pair, "produce", "to", "--input", "json", "--keep-queues", stdin=text)
    assert (code, problems) == (0, "3 messages sent\n")
    code, copies, _ = run(pair, "consume", "to", "--json")
    kept = ("key", "tags", "queue_id", "queue_offset", "body", "body_base64")

    def plain(line):
        found = json.loads(line)
        own = {n: v for n, v in found["properties"].items() if not n.startswith("HS_")}
        return {name: found.get(name) for name in kept} | {"properties": own}

    assert sorted(map(plain, copies), key=str) == sorted(map(plain, lines), key=str)
    assert all(json.loads(line)["topic"] == "to" for line in copies)


def test_keyed_lines_and_a_filter_by_key(pair):
    text = b"a:1\nb:2\nno key\na:3\n"
    code, lines, problems = run(
        pair, "produce", "keyed", "--key-separator", ":", "--tag", "t", "--json", stdin=text
    )
    assert code == 1 and "line 3: the line has no key" in problems
    assert [json.loads(line)["status"] for line in lines] == [
        "PUT_OK", "PUT_OK", "MESSAGE_ILLEGAL", "PUT_OK",
    ]  # fmt: skip
    code, lines, _ = run(pair, "consume", "keyed", "--key", "a", "--format", r"%k=%b (%g)\n")
    assert code == 0 and lines == ["a=1 (t)", "a=3 (t)"]


def test_a_group_goes_on_where_it_was(pair):
    with Producer(pair.api().split(",")) as producer:
        for number in range(5):
            producer.send_sync("grouped", str(number).encode(), queue=0)
    assert run(pair, "consume", "grouped", "--group", "g", "--max", "2")[1] == ["0", "1"]
    with Positions(pair.api().split(",")) as positions:
        assert positions.committed("g", "grouped")[0].queue_offset == 2
    assert run(pair, "consume", "grouped", "--group", "g")[1] == ["2", "3", "4"]
    assert run(pair, "consume", "grouped", "--group", "g")[1] == []
    assert run(pair, "consume", "grouped")[1] == list("01234")
    with Consumer("grouped", pair.api().split(","), group="g") as consumer:
        assert consumer.positions()[0].queue_offset == 5


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["produce", "t", "--input", "json", "--key", "k"], "--key: with --input json"),
        (["produce", "t", "--input", "json", "--key-separator", ":"], "--key-separator: with"),
        (["produce", "t", "--keep-queues"], "--keep-queues"),
        (["produce", "t", "--key", "k", "--key-separator", ":"], "not both"),
        (["produce", "t", "--key-separator", ""], "it is empty"),
        (["consume", "t", "--format", "%x"], "'%x' is unknown"),
        (["consume", "t", "--format", "%b", "--json"], "not both"),
        (["consume", "t", "--group", "g", "--from", "7"], "hastore groups reset"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_asked(words, text):
    done = hastore(*words, "--bootstrap", "127.0.0.1:1", stdin=b"")
    assert done.returncode == 2 and text in done.stderr and done.stderr.count("\n") == 1
