"""`hastore positions`: import from a broker's file, and export to one."""

import json
import subprocess
import sys

import pytest

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from tests.cli.kit import hastore
from tests.process.harness import ROOT, Group


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A node with ten messages in each of two queues of T."""
    with Group(tmp_path_factory.mktemp("positions"), 1, master_role="ASYNC_MASTER") as group:
        group[1].start("master").wait_writable()
        with Producer([group[1].api]) as producer:
            for number in range(20):
                producer.send_sync("T", b"%d" % number, queue=number % 2)
        yield group[1]


@pytest.fixture
def positions(node, tmp_path):
    def run(*arguments, table=None):
        if table is not None:
            file = tmp_path / "consumerOffset.json"
            file.write_text(json.dumps({"offsetTable": table}))
            arguments = (*arguments, str(file))
        return hastore("positions", *arguments, "--bootstrap", node.api.removeprefix("tcp://"))

    return run


def taken(done):
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(one["group"], one["topic"]): (one["outcome"], one["positions"]) for one in found}


def test_a_consumer_continues_at_the_imported_positions(node, positions):
    table = {"T@readers": {"0": 7, "1": 99}, "gone@readers": {"0": 1}, "T@others": {"0": 2}}
    done = positions("import", "--json", table=table)
    assert taken(done) == {
        ("readers", "T"): ("imported", {"0": 7, "1": 10}),
        ("readers", "gone"): ("no such topic", {}),
        ("others", "T"): ("imported", {"0": 2}),
    }
    with Consumer("T", [node.api], group="readers") as consumer:
        got = [message.body for message in consumer.poll(timeout_s=60)]
    assert got == [b"14", b"16", b"18"]
    done = positions("import", table={"T@people": {"0": 3, "1": 11}})
    assert done.stdout == "imported  people  T  0:3 1:10\n"
    assert "the position in queue 1 was outside the log" in done.stderr


def test_committed_positions_are_kept_without_overwrite(positions):
    assert taken(positions("import", "--json", table={"T@twice": {"0": 4}})) == {
        ("twice", "T"): ("imported", {"0": 4})
    }
    table = {"T@twice": {"0": 1}}
    assert taken(positions("import", "--json", table=table)) == {("twice", "T"): ("kept", {"0": 4})}
    assert taken(positions("import", "--json", "--overwrite", table=table)) == {
        ("twice", "T"): ("imported", {"0": 1})
    }


def test_group_and_topic_select_positions(positions):
    table = {"T@one": {"0": 1}, "T@two": {"0": 1}, "U@one": {"0": 1}}
    done = positions("import", "--json", "--group", "one", "--topic", "T", table=table)
    assert list(taken(done)) == [("one", "T")]
    assert "no position to import" in positions("import", "--group", "x", table=table).stderr


def test_export_writes_a_brokers_file(node, positions, tmp_path):
    with Consumer("T", [node.api], group="leaving") as consumer:
        consumer.seek(0, 5)
        consumer.seek(1, 6)
        consumer.commit()
        consumer.seek(1, 9)
        consumer.commit()
    done = positions("export", "--group", "leaving")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)["offsetTable"]
    assert {queue: table["T@leaving"][queue] for queue in "01"} == {"0": 5, "1": 9}
    assert list(table) == ["T@leaving"]
    file = tmp_path / "all.json"
    assert positions("export", str(file)).returncode == 0
    assert "T@leaving" in json.loads(file.read_text())["offsetTable"]


def test_an_export_without_room_leaves_the_one_before(node, tmp_path):
    """It may be the only copy of the positions."""
    file = tmp_path / "all.json"
    file.write_text("the one before")
    file.chmod(0o640)
    words = [sys.executable, str(ROOT / "bin" / "hastore"), "positions", "export", str(file),
             "--bootstrap", node.api.removeprefix("tcp://")]  # fmt: skip
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$0" "$@"', *words], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode and "File too large" in done.stderr, done.stderr
    assert file.read_text() == "the one before" and len([*tmp_path.iterdir()]) == 1
    subprocess.run(words, check=True)
    assert "offsetTable" in file.read_text() and file.stat().st_mode & 0o777 == 0o640
    words[4] = "/dev/stdout"
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert "offsetTable" in done.stdout


def test_another_kind_of_file_is_wrong_usage(positions, tmp_path):
    done = positions("import", table=3)
    assert done.returncode == 2 and "not a consumerOffset.json" in done.stderr
    assert positions("import", str(tmp_path / "none")).returncode == 2
    (tmp_path / "latin").write_bytes(b'{"offsetTable":{"\xe9@g":{}}}')
    done = positions("import", str(tmp_path / "latin"))
    assert done.returncode == 2 and "is not UTF-8" in done.stderr
