"""`hastore status -c`, `hastore status --watch` and `hastore doctor --all`: a whole group."""

import json

import pytest

from hastore.cli import status
from tests.cli.kit import hastore
from tests.cli.test_status import make_group, pair

__all__ = ["make_group", "pair"]


@pytest.fixture
def frames(monkeypatch):
    """Let `--watch` end by Ctrl-C after this many frames."""

    def end_after(count, between=lambda: None):
        pauses = []

        def pause(seconds):
            pauses.append(seconds)
            if len(pauses) == count:
                raise KeyboardInterrupt
            between()

        monkeypatch.setattr(status, "pause", pause)
        return pauses

    return end_after


def test_status_of_all_nodes_of_a_file(pair, monkeypatch):
    monkeypatch.setenv("HASTORE_BOOTSTRAP", "127.0.0.1:1")
    done = hastore("status", "-c", pair.file(2), "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["node"] for line in done.stdout.splitlines()] == [1, 2]
    pair.stop(1)
    done = hastore("status", "-c", pair.file(2), "--json", "--timeout", "5")
    one, two = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 4 and not one["answers"] and two["answers"]


def test_wrong_usage_of_status(pair, tmp_path):
    for arguments, told in (
        (["-c", pair.file(1), "--bootstrap", pair.api()], "not both"),
        (["-c", pair.file(1), "--wait", "1", "--watch"], "not both"),
        (["-c", pair.file(1), "--watch", "0"], "--watch"),
        (["-c", str(tmp_path / "no.yaml")], "no.yaml"),
    ):
        done = hastore("status", *arguments)
        assert done.returncode == 2 and told in done.stderr, done.stderr


def test_status_is_shown_again_until_it_is_interrupted(pair, frames):
    pauses = frames(3, between=lambda: pair.stop(2) if 2 in pair.running else None)
    done = hastore("status", "-c", pair.file(1), "--watch", "--timeout", "5")
    assert done.returncode == 0, done.stderr
    assert pauses == [2.0, 2.0, 2.0] and done.stdout.count("SYNC_MASTER") >= 3
    assert "error: puts that do not set acks are refused" in done.stdout
    assert done.stderr == ""


def test_each_frame_of_a_watch_in_json_is_objects(pair, frames):
    pauses = frames(2)
    done = hastore("status", "-c", pair.file(1), "--watch", "0.5", "--json")
    assert pauses == [0.5, 0.5]
    assert [json.loads(line)["node"] for line in done.stdout.splitlines()] == [1, 2, 1, 2]


def test_a_watch_goes_on_while_no_node_answers(pair, frames):
    pair.stop(1, 2)
    frames(2)
    done = hastore("status", "-c", pair.file(1), "--watch", "--timeout", "0.2")
    assert done.returncode == 0 and done.stdout.count("error: ") == 2


def doctor(group, number):
    done = hastore("doctor", "-c", group.file(number), "--all", "--json")
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_doctor_checks_all_nodes_whose_files_are_here(pair):
    code, found = doctor(pair, 1)
    assert code == 0, [one for one in found if one["verdict"] == "bad"]
    assert found[0] == {
        "node": None, "check": "group", "verdict": "good", "text": "node 1 takes puts",
    }  # fmt: skip
    for number in (1, 2):
        checks = {one["check"] for one in found if one["node"] == number}
        assert {"file", "node", "store", "disk", "files"} <= checks


def test_doctor_asks_a_node_whose_file_is_elsewhere(pair, tmp_path):
    (tmp_path / "node2.yaml").unlink()
    code, found = doctor(pair, 1)
    assert code == 0
    (one,) = [each for each in found if each["node"] == 2]
    assert one["text"].startswith("node 2 runs as SLAVE, epoch ")
    assert f"hastore doctor -c {pair.file(2)}` on its machine" in one["text"]


def test_doctor_says_which_node_is_silent(pair, impatient):
    pair.stop(2)
    code, found = doctor(pair, 1)
    bad = [(one["node"], one["text"]) for one in found if one["verdict"] == "bad"]
    assert code == 1 and bad[0][0] is None and "puts that do not set acks" in bad[0][1]
    assert any(number == 2 and "does not answer" in text for number, text in bad)
    pair.stop(1)
    code, found = doctor(pair, 1)
    assert code == 1 and "no node answers" in found[0]["text"]


def test_doctor_for_people_names_the_node_of_each_line(pair):
    done = hastore("doctor", "-c", pair.file(1), "--all")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("group     group") and done.returncode == 0
    assert all(line.startswith(("node 1  ", "node 2  ")) for line in lines[1:])
