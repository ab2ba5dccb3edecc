"""`hastore node`: the files that are here are edited, all or none; the rest is said, in order."""

import json

import pytest
import yaml

from hastore.cli.node import check_masters, read_files
from hastore.config.file import load_names
from hastore.config.node_list import ListChange
from hastore.errors import UsageError
from tests.cli.kit import hastore
from tests.process.harness import Group

NEW = ("--api", "tcp://127.0.0.1:41", "--ha", "127.0.0.1:42", "--http", "127.0.0.1:43")


def write(folder, number, numbers=(1, 2, 3), **changes):
    """Write a node's file by hand, with comments; nobody listens at its ports."""
    lines = "".join(
        f'  {n}: {{api: "tcp://127.0.0.1:{n}1", ha: "127.0.0.1:{n}2", http: "127.0.0.1:{n}3"}}'
        f"  # rack {n}\n"
        for n in numbers
    )
    settings = {
        "cluster": "c", "group": "g", "node": number, "acks": 1,
        "role": "SYNC_MASTER" if number == 1 else "SLAVE", **changes,
    }  # fmt: skip
    settings = {key: value for key, value in settings.items() if value is not None}
    path = folder / f"node{number}.yaml"
    path.write_text(
        f"# node {number}\n{yaml.safe_dump(settings)}nodes:\n{lines}store:\n  root: data{number}\n"
    )
    return path


@pytest.fixture(autouse=True)
def nobody_is_asked_for_long(request, monkeypatch):
    if "files" in request.fixturenames or "full" not in request.keywords:
        monkeypatch.setattr("hastore.cli.node.ANSWER_S", 0.001)


@pytest.fixture
def files(tmp_path):
    return [write(tmp_path, number) for number in (1, 2, 3)]


def node(*arguments):
    done = hastore("node", *map(str, arguments), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def numbers(path):
    return sorted(load_names(str(path)).nodes)


def test_a_node_is_added_and_taken_back(files):
    before = [path.read_bytes() for path in files]
    told = node("add", *files[:2], "--node", 4, *NEW)
    assert told["changed"] == [str(path) for path in files[:2]]
    assert [numbers(path) for path in files] == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3]]
    by_hand, start, promote = told["steps"]
    assert "in the file of node 3, under `nodes`: add the line 4: {api: " in by_hand
    assert start.startswith(
        "start node 4 with a copy of another node's file with `role: SLAVE` and its own `node`"
    )
    assert f"`hastore promote -c {files[0]}`" in promote and "the list 1, 2, 3, 4" in promote
    again = node("add", *files, "--node", 4, *NEW)
    assert again["changed"] == [str(files[2])] and len(again["steps"]) == 2
    assert node("add", *files, "--node", 4, *NEW)["changed"] == []
    back = node("remove", *files, "--node", 4)
    assert len(back["changed"]) == 3 and "stop node 4 for good" in back["steps"][-1]
    assert [path.read_bytes() for path in files] == before


def test_what_a_node_leaves_in_zookeeper_is_to_be_deleted(tmp_path):
    registered = [write(tmp_path, n, registry="zk://127.0.0.1:1") for n in (1, 2, 3)]
    for told in (
        node("remove", *registered, "--node", 3),
        node("replace", *registered[:2], "--node", 2, "--by", 4, *NEW),
    ):
        stop, delete = told["steps"][-2:]
        gone = stop.split()[2]
        assert stop.startswith(f"stop node {gone} for good")
        assert delete.startswith(f"delete the znode /hastore/c/g/{gone} in ZooKeeper: ")


def test_a_folder_of_files(files, tmp_path):
    assert len(node("add", tmp_path, "--node", 4, *NEW)["changed"]) == 3
    done = hastore("node", "remove", str(tmp_path), "--node", "3")
    assert done.returncode == 0
    assert f"{files[2]}: nothing to change" in done.stdout, "its node leaves"
    assert "1. in the file of node 4, under `nodes`: remove node 3\n" in done.stdout
    assert "2. put the list 1, 2, 4 in force" in done.stdout
    assert [numbers(path) for path in files] == [[1, 2, 4], [1, 2, 4], [1, 2, 3, 4]]


def test_a_node_is_replaced(files):
    told = node("replace", *files, "--node", 2, "--by", 4, *NEW)
    assert told["changed"] == [str(files[0]), str(files[2])]
    assert [numbers(path) for path in files] == [[1, 3, 4], [1, 2, 3], [1, 3, 4]]
    assert [step.split()[0] for step in told["steps"]] == ["start", "put", "stop"]
    assert "rack 3" in files[0].read_text() and "rack 2" not in files[0].read_text()


def refused(match, *arguments):
    done = hastore("node", *map(str, arguments))
    assert done.returncode == 2 and match in done.stderr, done.stderr


def test_the_role_in_a_dead_node_s_file_counts_only_while_no_other_takes_puts(files, tmp_path):
    """Its disk is dead, and node 2 was promoted: nobody can give node 1's file another role."""
    read, left_out = read_files([str(path) for path in files], print), ListChange(gone=1)
    check_masters(read, left_out, {2: {"writable": True}, 3: {"writable": False}})
    for statuses in (
        {2: {"writable": False}},
        {1: {"writable": False}, 2: {"writable": True}},  # it answers: demote it
        {1: {"writable": True}, 2: {"writable": True}},
    ):
        with pytest.raises(UsageError, match="node 1 is a master"):
            check_masters(read, left_out, statuses)
    with pytest.raises(UsageError, match="node 2 is a master"):
        check_masters(read, ListChange(gone=2), {2: {"writable": True}})


def test_what_is_refused_changes_no_file(files, tmp_path):
    before = [path.read_bytes() for path in files]
    refused("node 1 is a master", "remove", *files, "--node", 1)
    refused("node 1 is a master", "replace", *files, "--node", 1, "--by", 4, *NEW)
    refused("with other addresses", "add", *files, "--node", 3, *NEW)
    refused("cannot replace itself", "replace", *files, "--node", 2, "--by", 2, *NEW)
    refused("api", "add", *files, "--node", 4, "--api", "h", *NEW[2:])
    other = tmp_path / "other"
    other.mkdir()
    refused(
        "files of one group", "add", *files, write(other, 4, (4, 5), group="h"), "--node", 6, *NEW
    )
    refused("both files of node 2", "add", *files, write(other, 2), "--node", 4, *NEW)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("no node's file is in", "add", empty, "--node", 4, *NEW)
    assert [path.read_bytes() for path in files] == before


def test_a_list_that_would_not_be_valid_is_written_nowhere(tmp_path):
    """The second file would ask for more slaves than there are."""
    files = [write(tmp_path, 1), write(tmp_path, 2, acks=2)]
    before = [path.read_bytes() for path in files]
    refused("acks", "remove", *files, "--node", 3)
    assert [path.read_bytes() for path in files] == before


@pytest.mark.full
def test_a_node_of_a_group_that_runs_is_replaced(tmp_path):
    with Group(tmp_path, 3) as group:
        two = {n: group[n].settings["nodes"][n] for n in (1, 2)}
        for number in (1, 2):
            group[number].settings["nodes"] = two
            group[number].write()
        group[1].start("master", wait=False)
        group[2].start("slave")
        group[1].wait_in_sync(2)
        address = group[3].settings["nodes"][3]
        own = [item for key in ("api", "ha", "http") for item in (f"--{key}", address[key])]
        files = [str(group[n].path) for n in (1, 2)]
        told = node("replace", *files, "--node", 2, "--by", 3, *own)
        group[3].settings["nodes"] = {1: two[1], 3: address}
        group[3].write()
        group[3].start("slave")
        group[1].wait_in_sync(3)
        assert f"hastore promote -c {files[0]}" in told["steps"][1]
        done = hastore("promote", "-c", files[0], "--json")
        assert done.returncode == 0, done.stderr
        assert group[1].status()["config_pending"] == []
        group[2].kill()
        group[1].wait_in_sync(3)
        group[1].kill()
        done = hastore("promote", "-c", str(group[3].path), "--json")
        assert done.returncode == 0, done.stderr


def test_mode_dledger_in_the_files_here(tmp_path, monkeypatch):
    """The addresses; a member keeps its own, and without an answer nobody is known to be none."""
    files = [write(tmp_path, number, mode="dledger", role=None, acks=None) for number in (1, 2, 3)]
    before = [path.read_bytes() for path in files]
    told = node("add", *files, "--node", 4, *NEW)
    assert len(told["changed"]) == 3
    assert told["steps"][-1].startswith(f"make it a member: `hastore dledger add -c {files[0]} ")
    done = hastore("node", "remove", *map(str, files), "--node", "4")
    assert done.returncode == 1 and "no node answers that knows the members" in done.stderr
    status = {"term": 3, "members": [1, 2, 3], "learners": [{"node": 5}]}
    monkeypatch.setattr("hastore.cli.node.ask", lambda _config: {1: status, 2: {"term": 1}})
    assert len(node("remove", *files, "--node", 4)["changed"]) == 3
    assert [path.read_bytes() for path in files] == before
    refused("node 3 is a member", "remove", *files, "--node", 3)
    refused("node 5 is a member, or becomes one", "remove", *files, "--node", 5)
    refused("in three steps", "replace", *files, "--node", 3, "--by", 4, *NEW)
    refused("files of one group", "add", *files[:2], write(tmp_path, 3), "--node", 4, *NEW)


ODD = {
    "block scalars": "  {n}:\n    api: >-\n      tcp://127.0.0.1:{n}1\n    ha: 127.0.0.1:{n}2\n"
    "    http: |-\n      127.0.0.1:{n}3\n",
    "explicit keys": "  ? {n}\n  : {{api: tcp://127.0.0.1:{n}1, ha: 127.0.0.1:{n}2, http: "
    "127.0.0.1:{n}3}}\n",
}


@pytest.mark.parametrize("odd", ODD)
def test_a_list_that_is_written_oddly_is_changed_as_wanted_or_not_at_all(tmp_path, odd):
    lines = "".join(ODD[odd].format(n=n) for n in (1, 2, 3))
    text = "cluster: c\ngroup: g\nnode: 1\nrole: SLAVE\nacks: 1\nstore: {root: data}\nnodes:\n"
    path = tmp_path / "node1.yaml"
    for number, change, wanted in (
        (2, ("remove",), {1, 3}),
        (3, ("remove",), {1, 2}),
        (4, ("add", *NEW), {1, 2, 3, 4}),
        (2, ("replace", "--by", "4", *NEW), {1, 3, 4}),
        (3, ("replace", "--by", "4", *NEW), {1, 2, 4}),
    ):
        path.write_text(text + lines)
        done = hastore("node", change[0], str(path), "--node", str(number), *change[1:])
        if done.returncode == 0:
            assert set(numbers(path)) == wanted
            continue
        assert done.returncode == 2 and path.read_text() == text + lines
        assert "cannot be edited safely" in done.stderr or "not be valid" in done.stderr


def test_a_number_that_no_file_and_no_node_knows_is_wrong_usage(files, monkeypatch):
    before = [path.read_bytes() for path in files]
    slaves = [{"node": 2}, {"node": None}]
    master = {"writable": True, "slaves": slaves, "unlinked": [{"node": 3}], "config_pending": []}
    statuses = {1: master}
    monkeypatch.setattr("hastore.cli.node.ask", lambda _config: statuses)
    refused("node 9 is in none of these files, and no node", "remove", *files, "--node", 9)
    refused("node 9 is in none", "replace", *files, "--node", 9, "--by", 4, *NEW)
    assert [path.read_bytes() for path in files] == before
    # The command again, after all files were changed: the list in force still has the node.
    for path in files:
        node("remove", path, "--node", 3)
    nodes = {"key": "nodes", "in_force": [1, 2, 3], "in_file": [1, 2], "counts_from": "promotion"}
    statuses[1] = {**master, "unlinked": [], "config_pending": [nodes]}
    assert node("remove", *files[:2], "--node", 3)["changed"] == []
    # And after a replacement that is in force: its new node tells that it was done.
    node("replace", *files[:2], "--node", 2, "--by", 5, *NEW)
    statuses[1] = {**master, "slaves": []}
    assert node("replace", files[0], "--node", 2, "--by", 5, *NEW)["changed"] == []


def test_a_number_that_is_unknown_here_may_be_known_to_a_node_that_is_silent(files):
    done = hastore("node", "remove", *map(str, files), "--node", "9")
    assert done.returncode == 0 and "warning: node 9 is in none of these files" in done.stderr


def test_what_is_no_file_in_a_folder_is_left_out(files, tmp_path):
    """As the link to nowhere by which Emacs locks a file that is edited."""
    (tmp_path / ".#node1.yaml").symlink_to("ops@host.4711:1")
    (tmp_path / "old.yaml").mkdir()
    told = node("add", tmp_path, "--node", 4, *NEW)
    assert told["changed"] == [str(path) for path in files]
    assert told["left_out"] == [str(tmp_path / ".#node1.yaml"), str(tmp_path / "old.yaml")]


def test_other_files_in_a_folder_are_left_out(files, tmp_path):
    """As those that `hastore init --tls` leads to, and whatever else has this ending."""
    (tmp_path / "identities.yaml").write_text("ops:\n  challenge_secret: x\n  admin: true\n")
    (tmp_path / "many.yml").write_text("a: 1\n---\nb: 2\n")
    (tmp_path / "list.yaml").write_text("- nodes\n")
    (tmp_path / "empty.yaml").write_text("")
    told = node("add", tmp_path, "--node", 4, *NEW)
    assert told["changed"] == [str(path) for path in files]
    assert told["left_out"] == [
        str(tmp_path / name) for name in ("empty.yaml", "identities.yaml", "list.yaml", "many.yml")
    ]
    done = hastore("node", "remove", str(tmp_path), "--node", "4")
    assert done.returncode == 0, done.stderr
    assert f"note: {tmp_path / 'identities.yaml'} is no node's file, and is left out" in done.stderr
    # A file that is named is not left out, nor one of a node that is not valid.
    refused("identities.yaml", "add", tmp_path / "identities.yaml", "--node", 4, *NEW)
    files[1].write_text(files[1].read_text().replace("role: SLAVE", "rule: SLAVE"))
    refused("rule: is unknown", "add", tmp_path, "--node", 4, *NEW)
    files[1].write_text("nodes: {\n")
    refused("node2.yaml", "add", tmp_path, "--node", 4, *NEW)


def test_a_folder_without_a_nodes_file(tmp_path):
    (tmp_path / "identities.yaml").write_text("ops: {admin: true}\n")
    refused("no node's file is in", "add", tmp_path, "--node", 4, *NEW)
