"""A node reports which file it follows; commands that edit a file check it against that."""

import json
import shutil

import pytest

from tests.cli.kit import hastore
from tests.process.harness import Group


@pytest.fixture
def group(tmp_path):
    with Group(tmp_path) as group:
        yield group.start()


def test_the_status_names_the_file_and_the_store(group):
    status = group[2].status()
    assert status["config"] == str(group[2].path) and status["store"] == str(group[2].store)
    assert status["config_pending"] == []


@pytest.mark.parametrize("command", ["promote", "demote"])
def test_a_file_that_the_node_does_not_follow_is_not_edited(group, tmp_path, command):
    other = tmp_path / "conf" / "a.yaml"
    other.parent.mkdir()
    shutil.copy(group[2].path, other)
    before = other.read_text()
    done = hastore(command, "-c", str(other))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"runs with {group[2].path}" in done.stderr and str(other) in done.stderr
    assert f"`hastore {command} -c {group[2].path}`" in done.stderr
    assert other.read_text() == before
    assert group[2].file_role == "SLAVE" and group[2].status()["role"] == "SLAVE"


def test_a_link_to_the_nodes_file_is_accepted(group, tmp_path):
    link = tmp_path / "link.yaml"
    link.symlink_to(group[2].path)
    assert hastore("demote", "-c", str(link)).returncode == 0
    assert hastore("doctor", "-c", str(link)).returncode == 0


def test_a_node_of_another_group_is_refused(group, tmp_path):
    other = tmp_path / "a.yaml"
    other.write_text(group[2].path.read_text().replace("group: g0", "group: g7"))
    before = other.read_text()
    done = hastore("promote", "-c", str(other))
    assert done.returncode == 2 and other.read_text() == before
    assert "is node 2 of test/g0" in done.stderr and "node 2 of test/g7" in done.stderr
    assert str(group[2].path) in done.stderr and str(other) in done.stderr


def test_a_path_that_does_not_exist_here_is_accepted(group, tmp_path):
    """A node in a container sees its file under another path."""
    aside = tmp_path / "mounted.yaml"
    group[2].path.rename(aside)
    done = hastore("promote", "-c", str(aside), "--patience", "1")
    assert done.returncode == 1, done.stderr
    assert f"it reads {group[2].path}" in done.stderr and done.stderr.count("\n") == 1
    aside.rename(group[2].path)
    group[2].wait_writable()


def test_doctor_reports_that_the_node_runs_with_another_file(group, tmp_path):
    other = tmp_path / "a.yaml"
    shutil.copy(group[2].path, other)
    done = hastore("doctor", "-c", str(other), "--json")
    bad = [one for one in map(json.loads, done.stdout.splitlines()) if one["verdict"] == "bad"]
    assert done.returncode == 1 and [one["check"] for one in bad] == ["node"]
    assert f"runs with {group[2].path}" in bad[0]["text"] and str(other) in bad[0]["text"]


def test_keys_not_in_force_are_shown_with_the_moment_they_take_effect(group):
    group[1].write(acks=1, ha={"slave_timeout": "9s"})
    nodes = {**group[1].settings["nodes"]}
    nodes[3] = {"api": "tcp://127.0.0.1:1", "ha": "127.0.0.1:2", "http": "127.0.0.1:3"}
    group[1].write(acks=2, nodes=nodes)
    group[1].wait_status(lambda s: len(s["config_pending"]) == 3, "the change is seen")
    addresses = ",".join(group.bootstrap)
    done = hastore("status", "--bootstrap", addresses)
    lines = [line for line in done.stdout.splitlines() if "in its file" in line]
    assert done.returncode == 0 and len(lines) == 3, done.stdout
    assert lines[0] == (
        "node 1: acks: 2 in its file, 1 in force until the next promotion, "
        f"`hastore promote -c {group[1].path}`"
    )
    assert lines[1].startswith("node 1: nodes: 1, 2, 3 in its file, 1, 2 in force until")
    assert "ha.slave_timeout: 9000ms" in lines[2] and lines[2].endswith("until the next start")
    done = hastore("doctor", "-c", str(group[1].path), "--json")
    notes = [
        one["text"]
        for one in map(json.loads, done.stdout.splitlines())
        if one["check"] == "pending"
    ]
    assert len(notes) == 3 and notes[0].startswith("acks: 2 in its file")
