"""The client commands with a running pair: their output on stdout and stderr, and exit codes."""

import base64
import json
import socket
import subprocess
import sys

import pytest

from hastore import Producer
from hastore.cli import read
from hastore.cli.common import print_error
from hastore.cli.status import no_master_text
from hastore.client.messages import FoundMessages
from hastore.client.producer import preparer
from tests.cli.kit import hastore
from tests.process import harness
from tests.process.harness import ROOT, Group, wait_until

STATUS_KEYS = [
    *("node", "role", "epoch", "min_offset", "max_offset", "flushed_offset", "confirmed_offset"),
    *("readable_offset", "writable", "slaves", "waiting_puts", "forwarding", "delayed", "topics"),
    *("rescued_bytes", "unclean", "reason"),
]
SLAVE_KEYS = [
    *("node", "address", "state", "ack_offset", "lag_bytes", "in_sync", "classic", "files_kept"),
]
PERF_KEYS = [
    *("messages", "bytes", "seconds", "msgs_per_s", "mb_per_s", "p50_ms", "p99_ms", "p999_ms"),
    *("max_ms", "acked", "unknown", "failed"),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = {"commitlog_file_size": "16MiB"}
    with Group(tmp_path_factory.mktemp("commands"), store=store) as group:
        yield group.start()


@pytest.fixture
def command(group, monkeypatch):
    """Run a command with the pair as HASTORE_BOOTSTRAP; return exit code, stdout lines, stderr."""
    monkeypatch.setenv("HASTORE_BOOTSTRAP", ",".join(group.bootstrap))

    def run(*arguments, stdin=b""):
        done = hastore(*arguments, stdin=stdin)
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


def objects(lines):
    return [json.loads(line) for line in lines]


def test_status_is_an_object_for_each_node(command):
    code, lines, problems = command("status", "--json")
    assert (code, problems) == (0, "")
    master, slave = objects(lines)
    assert [key for key in master if key in STATUS_KEYS] == STATUS_KEYS
    assert (master["node"], master["role"], master["writable"]) == (1, "SYNC_MASTER", True)
    assert (slave["node"], slave["role"], slave["writable"]) == (2, "SLAVE", False)
    assert list(master["slaves"][0]) == SLAVE_KEYS
    assert master["slaves"][0]["in_sync"] is True
    assert set(master["forwarding"].values()) == {0}, "no client of RocketMQ is here"


def test_status_is_a_table_for_people(command):
    code, lines, _ = command("status")
    assert code == 0
    assert any(line.split()[:2] == ["1", "SYNC_MASTER"] for line in lines)
    assert any("slave 2" in line and "in sync" in line for line in lines)


def test_a_line_is_a_message_and_comes_back_unchanged(command):
    text = ["one", "", "drei größer", '{"a": 1}']
    code, lines, problems = command(
        "produce", "lines", "--json", "--key", "k 1", stdin="\n".join(text).encode()
    )
    assert code == 0, problems
    results = objects(lines)
    assert [list(result) for result in results] == [
        ["status", "msg_id", "offset", "queue_id", "queue_offset", "level"]
    ] * len(text)
    assert {result["status"] for result in results} == {"PUT_OK"}
    assert {result["level"] for result in results} == {"SYNC_MEM(1)"}
    assert [result["queue_offset"] for result in results] == [0, 1, 2, 3]
    assert command("consume", "lines") == (0, text, "")
    code, lines, _ = command("query", "--msg-id", results[2]["msg_id"])
    assert (code, lines) == (0, ["drei größer"])
    code, lines, _ = command("query", "--topic", "lines", "--key", "k", "--json")
    assert code == 0 and [one["offset"] for one in objects(lines)] == [
        result["offset"] for result in reversed(results)
    ]


def test_bodies_that_are_not_text_are_printed_as_base64(command):
    body = b"\x80\x04\x95pickle\xff"
    assert command("produce", "bytes", "--queue", "1", stdin=body + b"\n")[0] == 0
    code, lines, _ = command("consume", "bytes", "--json")
    (message,) = objects(lines)
    assert code == 0 and base64.b64decode(message["body_base64"]) == body
    assert (message["queue_id"], message["queue_offset"]) == (1, 0)


def test_bodies_are_compressed_on_request_and_printed_as_they_were(command):
    body = b"a long line " * 1_000
    code, _, _ = command("produce", "packed", "--compression", "zstd", stdin=body + b"\nshort")
    assert code == 0
    assert sorted(command("consume", "packed")[1]) == sorted([body.decode(), "short"])
    code, lines, _ = command("consume", "packed", "--json", "--raw")
    stored = [one.get("body_base64", "") for one in objects(lines)]
    assert code == 0 and sorted(len(base64.b64decode(one)) < 100 for one in stored) == [True, True]
    assert any(base64.b64decode(one)[:4] == bytes.fromhex("28b52ffd") for one in stored), "ZSTD's"
    assert command("produce", "packed", "--compression", "rar")[0] == 2


def test_a_body_that_does_not_decompress_is_an_error_and_the_others_are_printed(
    command, group, monkeypatch
):
    monkeypatch.setattr(preparer, "compress", lambda *_: (b"junk", 0x301))
    with Producer(group.bootstrap, compression="zlib", compression_threshold=5) as producer:
        for body in (b"one", b"damaged", b"two"):
            producer.send_sync("rotten", body, queue=0, key="k")
    for words in (["consume", "rotten"], ["query", "--topic", "rotten", "--key", "k"]):
        code, lines, problems = command(*words)
        assert (code, sorted(lines)) == (1, ["one", "two"])
        assert problems.count("\n") == 1 and "does not decompress (zlib)" in problems
    code, lines, _ = command("consume", "rotten", "--json")
    assert code == 1
    assert [(one["body"], "body_error" in one) for one in objects(lines)] == [
        ("one", False), ("junk", True), ("two", False)
    ]  # fmt: skip
    assert command("consume", "rotten", "--raw") == (0, ["one", "junk", "two"], "")


def test_consume_prints_what_its_filter_wants(command):
    for tag, price in (("red", 5), ("green", 50), ("blue", 500)):
        words = ("--tag", tag, "--property", f"price={price}", "--queue", "0")
        assert command("produce", "chosen", *words, stdin=tag.encode())[0] == 0
    assert command("consume", "chosen", "--tags", "red || blue")[1] == ["red", "blue"]
    assert command("consume", "chosen", "--sql", "price > 10")[1] == ["green", "blue"]
    assert command("consume", "chosen", "--tags", "none") == (0, [], "")
    for words, why in (
        (("--sql", "price >"), "sql: SQL filter: it ends too early: 'price >'. Write RocketMQ's"),
        (("--tags", "||"), "tags: || names no tag"),
        (("--tags", "red", "--sql", "price > 10"), "tags and sql: give one of them"),
    ):
        code, _, problem = command("consume", "chosen", *words)
        assert code == 2 and why in problem and problem.count("\n") == 1


def test_a_file_is_sent(command, tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb\n")
    assert command("produce", "filed", "--file", str(path)) == (0, [], "2 messages sent\n")
    code, lines, _ = command("consume", "filed")
    assert code == 0 and sorted(lines) == ["a", "b"]
    code, lines, problems = command("produce", "filed", "--file", str(tmp_path / "none"))
    assert code == 2 and problems.count("\n") == 1
    assert problems == f"error: --file {tmp_path / 'none'}: No such file or directory\n"


@pytest.mark.parametrize(
    ("acks", "level"), [("0", ""), ("1", "MASTER_MEM"), ("all", "SYNC_MEM(1)")]
)
def test_acks_set_the_level(command, acks, level):
    code, lines, problems = command("produce", "levels", "--json", "--acks", acks, stdin=b"x\n")
    assert code == 0, problems
    assert objects(lines)[0]["level"] == level


def test_a_flushed_put_without_a_flushing_slave_is_refused_with_the_key(command):
    code, lines, problems = command(  # the refusal comes long before the timeout
        "produce", "levels", "--json", "--sync-flush", "--timeout", "3600", stdin=b"x\n"
    )
    assert code == 1 and "needs 1 slave with ha.ack_point: flushed" in problems
    assert objects(lines)[0]["status"] == "SLAVE_NOT_AVAILABLE"


def test_produce_reports_once_that_there_is_no_master_and_goes_on():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["produce", "later", "--timeout", "3600", "--bootstrap", nowhere]
        with subprocess.Popen(
            [sys.executable, "-m", "hastore", *arguments], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as producing:  # fmt: skip
            try:
                producing.stdin.write("x\n")
                producing.stdin.flush()
                said = producing.stderr.readline()
                assert said.startswith("no master yet at ") and nowhere in said, said
                assert "--timeout" in said and producing.poll() is None  # it still tries
            finally:
                producing.terminate()
                _, rest = producing.communicate()
    assert "no master yet" not in rest


def test_a_line_that_is_too_long_is_refused_alone(command):
    lines = b"before\n" + b"x" * (9 * 2**20) + b"\nafter\n"
    code, results, problems = command("produce", "long", "--json", "--queue", "0", stdin=lines)
    assert code == 1 and "line 2: " in problems and "4194304" in problems
    assert [one.get("line") for one in objects(results)] == [None, 2, None]
    assert "4194304" in objects(results)[1]["reason"]
    statuses = [result["status"] for result in objects(results)]
    assert statuses == ["PUT_OK", "MESSAGE_ILLEGAL", "PUT_OK"]
    assert command("consume", "long")[1] == ["before", "after"]


def test_consume_starts_at_the_given_place(command):
    command("produce", "starts", "--queue", "2", stdin=b"0\n1\n2\n3\n")
    assert command("consume", "starts", "--queue", "2", "--from", "2")[1] == ["2", "3"]
    assert command("consume", "starts", "--from", "2020-01-01T00:00:00Z")[1] == list("0123")
    assert command("consume", "starts", "--from", "2999-01-01")[1] == []
    assert command("consume", "starts", "--from", "latest")[1] == []
    assert command("consume", "starts", "--max", "3")[1] == ["0", "1", "2"]
    assert command("consume", "starts", "--queue", "0")[1] == []


def test_consume_from_an_offset_passes_by_queues_that_end_before(command):
    command("produce", "uneven", "--queue", "2", stdin=(b"x" * 2_000 + b"\n") * 3_000)
    code, lines, problems = command("consume", "uneven", "--from", "10")
    assert (code, len(lines)) == (0, 2_990), problems


def test_consume_follows_until_it_has_enough(command):
    command("produce", "followed", "--queue", "0", stdin=b"x\n")
    code, lines, _ = command("consume", "followed", "--follow", "--max", "1")
    assert (code, lines) == (0, ["x"])


def test_consume_commits_where_a_group_begins(command):
    """A run that prints nothing has a place, too: the next one goes on there."""
    from_latest = ("consume", "cron", "--group", "cron", "--from", "latest")
    command("produce", "cron", stdin=b"old\n" * 8)
    assert command(*from_latest)[1] == []
    command("produce", "cron", stdin=b"new\n" * 8)
    assert command(*from_latest)[1] == ["new"] * 8
    assert command(*from_latest)[1] == []


def test_consume_commits_where_a_group_begins_also_before_the_first_message(command):
    from_latest = ("consume", "cron2", "--group", "cron", "--from", "latest")
    assert command(*from_latest)[1] == []
    command("produce", "cron2", stdin=b"new\n" * 8)
    assert command(*from_latest)[1] == ["new"] * 8
    # A queue of its own: the others have a position already.
    of_one = ("consume", "cron3", "--group", "cron", "--from", "latest", "--queue", "1")
    command("produce", "cron3", "--queue", "0", stdin=b"other\n")
    assert command(*of_one)[1] == []
    command("produce", "cron3", "--queue", "1", stdin=b"new\n")
    assert command(*of_one)[1] == ["new"]


def test_consume_commits_what_its_filter_has_passed(command):
    command("produce", "rare", stdin=b"x\n" * 16)
    of_group = ("consume", "rare", "--group", "rare", "--tags", "rare")
    lag = ("groups", "lag", "--group", "rare", "--json")
    assert command(*of_group)[1] == []
    assert [one["lag"] for one in objects(command(*lag)[1])] == [0]
    command("produce", "rare", "--tag", "rare", stdin=b"y\n")
    assert command(*of_group)[1] == ["y"]
    command("produce", "rare", stdin=b"z\n" * 16)
    assert command(*of_group)[1] == []
    assert [one["lag"] for one in objects(command(*lag)[1])] == [0]


def test_an_empty_topic_is_not_an_error(command):
    assert command("consume", "nosuch") == (0, [], "topic nosuch has no messages yet\n")


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (("produce", "a/b"), b"x", "topic 'a/b'"),
        (("produce", ".."), b"x", "topic '..'"),
        (("produce", ""), b"x", "topic ''"),
        (("produce", "x" * 128), b"x", "1 to 127"),
        (("produce", "t", "--acks", "2"), b"x", "--acks"),
        (("consume", "t", "--from", "yesterday"), b"", "has no messages yet"),
        (("consume", "lines", "--from", "yesterday"), b"", "--from yesterday"),
        (("query", "--key", "k"), b"", "--topic and --key"),
        (("query", "--msg-id", "zz"), b"", "zz"),
        (("status", "--bootstrap", "nowhere"), b"", "'nowhere' is not an address"),
        (("nosuch",), b"", "No such command 'nosuch'"),
        (("stauts",), b"", "did you mean status?"),
        (("produce",), b"", "Missing argument 'TOPIC'"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value)[:40],
)
def test_wrong_usage_is_one_line_and_exit_code_2(command, arguments, stdin, expected):
    command("produce", "lines", stdin=b"there is something\n")
    code, lines, problems = command(*arguments, stdin=stdin)
    assert expected in problems and lines == []
    if "has no messages yet" not in expected:
        assert code == 2
        errors = [line for line in problems.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1


@pytest.mark.parametrize("words", [(), ("log",), ("perf",)])
def test_a_group_without_arguments_prints_its_help(words):
    done = hastore(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.rstrip("\n") == hastore(*words, "--help").stdout.rstrip("\n")
    commands = done.stderr.partition("Commands:\n")[2].splitlines()
    assert commands and all(line.endswith(".") and "..." not in line for line in commands)


def test_errors_that_are_not_printed_are_counted(command):
    code, lines, problems = command("produce", "t", "--queue", "99", stdin=b"x\n" * 13)
    assert code == 1 and lines == []
    said = problems.splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in said[:10]] == [
        f" line {number}" for number in range(1, 11)
    ]
    assert "store.default_queues" in said[0]
    assert said[10:] == ["... and 3 more errors; --json prints all", "0 messages sent, 13 failed"]


def test_a_missing_queue_is_named(command):
    command("produce", "queues", "--queue", "1", stdin=b"x\n")
    code, lines, problems = command("consume", "queues", "--queue", "99")
    assert (code, lines) == (0, []) and "queue 99 of topic queues has no messages" in problems


def test_status_waits_for_the_group(command, group):
    code, lines, problems = command("status", "--wait", "60")
    assert (code, problems) == (0, "") and any("in sync" in line for line in lines)
    done = hastore("status", "--wait", "0.1", "--timeout", "0.2", "--bootstrap", "127.0.0.1:1")
    assert done.returncode == 1 and "no answer" in done.stderr


def test_h_prints_help_too(command):
    for words in ((), ("status",), ("log", "dump"), ("serve",)):
        code, lines, problems = command(*words, "-h")
        assert (code, problems) == (0, "") and lines[0].startswith("Usage: hastore"), words


def test_the_package_can_be_run(group):
    done = subprocess.run(
        [sys.executable, "-m", "hastore", "status", "--bootstrap", ",".join(group.bootstrap)],
        capture_output=True, text=True, timeout=180, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0 and "SYNC_MASTER" in done.stdout, done.stderr


def test_without_a_master_the_most_recent_node_is_named():
    def node(number, role, epoch, end, *, writable=False):
        return {"node": number, "role": role, "epoch": epoch, "max_offset": end,
                "writable": writable}  # fmt: skip

    slaves = [node(1, "SLAVE", 65537, 900), node(2, "SLAVE", 131074, 500)]
    assert "node 2 is the most up to date (epoch 131074, max_offset 500)" in no_master_text(slaves)
    assert no_master_text([*slaves, node(3, "SYNC_MASTER", 131074, 500, writable=True)]) is None
    waiting = no_master_text([*slaves, node(3, "SYNC_MASTER", 1, 5)])
    assert "node 3 waits to become master" in waiting
    refused = node(2, "SLAVE", 131074, 500) | {"written_over": {"node": 3, "offset": 400}}
    assert "node 1 is the most up to date" in no_master_text([slaves[0], refused])
    assert "node 3 has refused node 2 as its slave" in no_master_text([refused])
    assert no_master_text([]) is None


def test_a_group_without_a_master(make_group):
    group = make_group().start()
    group[1].kill()
    done = hastore("status", "--bootstrap", ",".join(group.bootstrap), "--timeout", "5")
    assert done.returncode == 4
    said = done.stderr.splitlines()[0]
    assert said.startswith("error: no node takes writes; node 2 is the most up to date")
    assert said.endswith(f"run `hastore promote -c {group[2].path}`")
    assert any(line.split()[:2] == ["2", "SLAVE"] for line in done.stdout.splitlines())


def test_writable_is_not_yes_while_default_puts_are_refused(make_group):
    group = make_group().start()
    group[2].kill()
    wait_until(lambda: group[1].status()["problems"], 60, "the loss of the slave is not noticed")
    done = hastore("status", "--bootstrap", group[1].api, "--timeout", "5")
    line = next(each for each in done.stdout.splitlines() if each.startswith("1 "))
    assert "acks 1 only" in line and "yes" not in line


def test_an_unknown_log_level_is_wrong_usage(make_group, monkeypatch):
    group = make_group()
    monkeypatch.setenv("HASTORE_LOG", "nonsense")
    done = hastore("serve", "-c", str(group[1].path))
    assert done.returncode == 2 and "HASTORE_LOG=NONSENSE" in done.stderr.splitlines()[-1]


def test_a_query_takes_a_span_of_time_and_says_when_it_was_cut_short(command, monkeypatch):
    asked = []

    def query_key(self, topic, key, **limits):
        asked.append(limits)
        return FoundMessages([], 1_700_000_000_123)

    monkeypatch.setattr(read.Admin, "query_key", query_key)
    span = ("--since", "2026-01-31", "--until", "2026-01-31T12:00:00+01:00")
    code, lines, problems = command("query", "--topic", "lines", "--key", "k", *span)
    assert code == 1 and not lines
    assert problems.endswith(
        "the node has cut the search short: older messages may be missing; to find them, search"
        " again with --until 2023-11-14T22:13:20.123Z\n"
    )
    found = FoundMessages([], 1_700_000_000_123, (), 4711)
    monkeypatch.setattr(read.Admin, "query_key", lambda *_, **limits: asked.append(limits) or found)
    once_more = command("query", "--topic", "lines", "--key", "k", "--before", "9999")
    assert once_more[0] == 1 and once_more[2].endswith("search again with --before 4711\n")
    assert asked.pop()["before"] == 9999
    assert asked[0]["begin_ms"].isoformat() == "2026-01-31T00:00:00+00:00"
    assert asked[0]["end_ms"].isoformat() == "2026-01-31T12:00:00+01:00"
    code, _, problems = command("query", "--topic", "lines", "--key", "k", "--until", "noon")
    assert code == 2 and "--until noon" in problems


def test_a_damaged_message_is_not_one_that_does_not_exist(command, monkeypatch):
    def query_key(self, topic, key, **limits):
        return FoundMessages([], None, [4711])

    monkeypatch.setattr(read.Admin, "query_key", query_key)
    code, _, problems = command("query", "--topic", "lines", "--key", "k")
    assert code == 3 and "1 message that may have the key cannot be read" in problems
    assert "offset 4711" in problems and "no such message" not in problems


def test_a_message_that_is_not_found_is_exit_code_1(command):
    code, lines, problems = command("query", "--topic", "lines", "--key", "never")
    assert (code, lines, problems) == (1, [], "no such message\n")


def test_no_answer_is_exit_code_1():
    # It does not wait for a node that may start: else "within 600 s" would stand here.
    done = hastore("status", "--bootstrap", "127.0.0.1:1,127.0.0.1:2", "--timeout", "600")
    assert (done.returncode, done.stdout) == (1, "")
    refused = "Connection refused: no node listens there"
    assert done.stderr == (
        "error: no answer from tcp://127.0.0.1:1, tcp://127.0.0.1:2 "
        f"(tcp://127.0.0.1:1: {refused}; tcp://127.0.0.1:2: {refused})\n"
    )


def test_perf_measures_produce_and_consume(command):
    code, lines, problems = command(
        *("perf", "produce", "--topic", "perf", "--count", "500", "--size", "100"),
        *("--in-flight", "16", "--json"),
    )
    assert code == 0, problems
    (fields,) = objects(lines)
    assert list(fields) == PERF_KEYS
    assert (fields["messages"], fields["bytes"], fields["acked"]) == (500, 50_000, 500)
    assert fields["p50_ms"] <= fields["p99_ms"] <= fields["max_ms"]
    for more in (("--in-flight", "1"), ("--in-flight", "2", "--batch", "30")):
        code, lines, _ = command(
            "perf", "produce", "--topic", "perf", "--count", "100", "--json", *more
        )
        assert code == 0 and objects(lines)[0]["acked"] == 100
    code, lines, _ = command("perf", "consume", "--topic", "perf", "--count", "700", "--json")
    assert code == 0 and objects(lines)[0]["messages"] == 700
    assert list(objects(lines)[0]) == PERF_KEYS


def test_perf_says_what_is_missing(command, monkeypatch):
    """It ended with 1 and without a word, and took its wait for the time of the messages."""
    monkeypatch.setattr("hastore.cli.perf.WAIT_S", 1.0)
    command("produce", "few", stdin=b"1\n2\n3\n")
    code, lines, problems = command("perf", "consume", "--topic", "few", "--count", "4", "--json")
    came = objects(lines)[0]["messages"]  # 3, unless the machine stands still for so long
    assert code == 1 and came < 4
    assert problems.startswith(f"error: {came} of 4 messages came, and then none for 1 s; give ")
    command("topics", "create", "shut", "--perm", "r")
    code, lines, problems = command("perf", "produce", "--topic", "shut", "--count", "3", "--json")
    assert code == 1 and objects(lines)[0]["failed"] == 3
    assert problems.startswith("error: 3 messages were refused, and the outcome of 0 is not known")
    assert "the first reason: MESSAGE_ILLEGAL: topic shut takes no messages" in problems


def test_doctor_finds_nothing_wrong_with_a_running_node(command, group):
    code, lines, problems = command("doctor", "-c", str(group[1].path), "--json")
    assert code == 0, problems
    assert {one["verdict"] for one in objects(lines)} <= {"good", "note"}
    code, lines, _ = command("doctor", "-c", str(group[1].path))
    assert code == 0 and any("runs as SYNC_MASTER" in line for line in lines)
    assert any("answers, without a secret" in line for line in lines)
    assert any(line.split()[:2] == ["disk", "good"] and "take 64 MiB" in line for line in lines)


def test_doctor_reports_another_size_of_the_log_files(command, group):
    command("produce", "lines", stdin=b"x\n")
    change = "store.commitlog_file_size=4MiB"
    code, lines, _ = command("doctor", "-c", str(group[1].path), "--json", "-o", change)
    bad = {one["check"]: one["text"] for one in objects(lines) if one["verdict"] == "bad"}
    assert code == 1 and set(bad) == {"store", "node 2"}
    assert "16777216 bytes (16 MiB)" in bad["store"] and "4194304 (4 MiB)" in bad["store"]
    assert "16 MiB, this node of 4 MiB" in bad["node 2"]


def test_doctor_reports_another_secret_without_affecting_the_peer(command, group, tmp_path):
    before = group[2].status()
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o600)
    given = f"ha.secret_file={secret}"
    code, lines, _ = command("doctor", "-c", str(group[1].path), "--json", "-o", given)
    bad = {one["check"]: one["text"] for one in objects(lines) if one["verdict"] == "bad"}
    assert code == 1 and set(bad) == {"node 2"} and "ha.secret_file" in bad["node 2"]
    after = group[2].status()
    assert [after[key] for key in ("epoch", "promised_epoch", "role")] == [
        before[key] for key in ("epoch", "promised_epoch", "role")
    ]


def test_a_store_in_use_is_exit_code_3_and_can_be_read(command, group):
    words = ("serve", "-c", str(group[1].path), "-o", "nodes.1.http=127.0.0.1:0")
    done = harness.hastore(*words)  # a process: a node begins to start
    assert done.returncode == 3 and done.stdout == ""
    assert "another process" in done.stderr.splitlines()[-1]
    command("produce", "lines", stdin=b"x\n")
    code, lines, problems = command("log", "verify", "--json", "--store", str(group[2].store))
    assert code == 0, problems
    assert objects(lines)[0]["ok"] is True


def test_an_error_that_a_node_sent_reaches_no_terminal_as_control_characters(capsys):
    print_error("refused: \x1b]0;title\x07 first\nsecond \u202e")
    shown = capsys.readouterr().err
    assert shown == "error: refused: \\x1b]0;title\\x07 first second \\u202e\n"
