"""Flips through a real ZooKeeper that is killed, paused, emptied and restarted meanwhile."""

import json
import shutil
import subprocess
import time

import pytest

from hastore import Producer
from tests.process.harness import Ports, hastore, wait_until
from tests.registry.servers import Wire, flip, registered


def role_of(node):
    return node.status()["role"]


def put(group, body):
    with Producer(group.bootstrap, delivery_timeout_s=120.0) as producer:
        return producer.send_sync("t", body)


@pytest.mark.full
def test_a_plain_set_by_another_client_flips_the_pair(pair, servers):
    assert put(pair, b"before").status == "PUT_OK"
    servers.set_role(2, "SYNC_MASTER")
    pair[2].wait_writable()
    servers.set_role(1, "SLAVE")
    pair[2].wait_in_sync(1)
    assert put(pair, b"after").status == "PUT_OK"
    pair[1].wait_status(lambda s: s["registry"]["role"] == "SLAVE" and not s["problems"], "slave")
    # The node has added what tells two nodes with one number apart.
    wait_until(lambda: "store" in servers.read(2), 60, "the object stays incomplete")
    assert pair[1].file_role == "SYNC_MASTER"  # the files are untouched


@pytest.mark.full
def test_zookeepers_own_command_line_flips_the_pair(pair, servers):
    entry = json.dumps({**servers.read(2), "role": "SYNC_MASTER"}, separators=(",", ":"))
    program, jars = servers.each[0].java
    done = subprocess.run(
        [program, "-cp", jars, "org.apache.zookeeper.ZooKeeperMain", "-server"]
        + [servers.each[0].address, "set", "/hastore/test/g0/2", entry],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pair[2].wait_writable()
    pair[1].wait_status(lambda s: s["role"] == "SLAVE", "slave")


def test_promote_and_demote_edit_the_registry(pair, servers):
    done = hastore("promote", "-c", str(pair[2].path))
    assert done.returncode == 0, done.stderr
    assert "node 2 is SYNC_MASTER of epoch 131074" in done.stdout
    assert hastore("demote", "-c", str(pair[1].path)).returncode == 0
    assert servers.read(2)["role"] == "SYNC_MASTER"
    assert servers.read(1)["role"] == "SLAVE"
    assert pair[2].file_role == "SLAVE"
    # Again: a new epoch of the present master. The options are used once, then removed.
    epoch = pair[2].status()["epoch"]
    assert hastore("promote", "-c", str(pair[2].path)).returncode == 0
    assert pair[2].status()["epoch"] > epoch
    wait_until(lambda: "once" not in servers.read(2), 60, "the options stay in ZooKeeper")
    # The whole flip, with the file of one node: the roles of both are in the registry.
    pair[2].wait_in_sync(1)
    done = hastore("flip", "-c", str(pair[2].path), "--to", "1")
    assert done.returncode == 0, done.stderr
    assert "node 2 is a slave, also in the registry" in done.stdout
    assert (servers.read(1)["role"], servers.read(2)["role"]) == ("SYNC_MASTER", "SLAVE")


@pytest.mark.full
def test_blocked_replay_of_the_candidate_stops_nobody(pair, servers):
    in_the_way = pair[2].store / "consumequeue" / "t"
    in_the_way.parent.mkdir()
    in_the_way.write_bytes(b"")
    assert put(pair, b"blocks").status == "PUT_OK"
    pair[2].wait_status(lambda s: "replay stopped" in " ".join(s["problems"]), "blocked replay")
    epoch = pair[1].status()["epoch"]
    servers.set_role(2, "SYNC_MASTER")
    pair[2].wait_status(
        lambda s: "it asks for no promises" in str(s["reason"]), "a promotion that waits"
    )
    servers.set_role(2, "SLAVE")
    pair[2].wait_status(lambda s: s["role"] == "SLAVE", "called off")
    servers.set_role(2, "SYNC_MASTER")
    assert put(pair, b"during").status == "PUT_OK"
    assert pair[1].status()["promised_epoch"] == epoch
    in_the_way.unlink()
    pair[2].wait_writable()


@pytest.mark.full
def test_a_role_that_was_set_while_the_node_was_down_spares_a_later_master(pair, servers):
    pair[2].stop()
    servers.set_role(2, "SYNC_MASTER")
    done = hastore("promote", "-c", str(pair[1].path))  # a new epoch, that node 2 does not know
    assert done.returncode == 0, done.stderr
    epoch = pair[1].status()["epoch"]
    pair[2].start(wait=False)
    pair[2].wait_ready()
    told = f"node 1 has opened epoch {epoch} since this node was told"
    pair[2].wait_status(lambda s: s["role"] == "SLAVE" and told in str(s["reason"]), told)
    pair[1].wait_in_sync(2)
    assert put(pair, b"x").status == "PUT_OK" and pair[1].status()["epoch"] == epoch
    done = hastore("promote", "-c", str(pair[2].path))
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_options_are_used_once_though_zookeeper_shows_them_again(make_group, servers):
    three = registered(make_group(3), servers)
    three[1].kill()
    three[3].kill()
    refused = hastore("promote", "-c", str(three[2].path), "--patience", "1")
    assert refused.returncode == 1
    assert "waiting for node 1, 3" in refused.stderr
    assert "the registry keeps the role SYNC_MASTER" in refused.stderr
    done = hastore("promote", "-c", str(three[2].path), "--async", "--force-unclean")
    assert done.returncode == 0, done.stderr
    epoch = three[2].status()["epoch"]
    wait_until(lambda: "once" not in servers.read(2), 60, "the options stay in ZooKeeper")
    memory = json.loads((three[2].store / "hastore" / "registry.json").read_text())
    again = {**servers.read(2), "once": {
        "id": memory["once"], "command": "promote", "epoch": epoch,
        "wall_ms": int(time.time() * 1000), "force_unclean": True,
    }}  # fmt: skip
    servers.put(2, json.dumps(again).encode())
    wait_until(lambda: "once" not in servers.read(2), 60, "the node does not remove used options")
    assert three[2].status()["epoch"] == epoch


@pytest.mark.full
def test_options_of_another_epoch_are_refused(pair, servers):
    late = {**servers.read(1), "once": {
        "id": "x", "command": "promote", "epoch": 1, "wall_ms": int(time.time() * 1000),
    }}  # fmt: skip
    epoch = pair[1].status()["epoch"]
    servers.put(1, json.dumps(late).encode())
    pair[1].wait_log("written under epoch 1 (now 65537)")
    wait_until(lambda: "once" not in servers.read(1), 60, "the options stay in ZooKeeper")
    assert pair[1].status()["epoch"] == epoch


@pytest.mark.slow("a paused server is noticed by its silence only")
@pytest.mark.full
@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_without_zookeeper_roles_stay_and_the_master_serves(mortal_pair, mortal, fault):
    zookeeper = mortal.each[0]
    zookeeper.kill() if fault == "kill" else zookeeper.pause()
    for node in mortal_pair:
        node.wait_status(
            lambda s: not s["registry"]["connected"] and "out of reach" in " ".join(s["problems"]),
            "a problem",
        )
    assert put(mortal_pair, b"without").status == "PUT_OK"
    assert [role_of(node) for node in mortal_pair] == ["SYNC_MASTER", "SLAVE"]
    refused = hastore("promote", "-c", str(mortal_pair[2].path))
    assert refused.returncode == 1
    assert "is out of reach" in refused.stderr
    assert "nothing was changed" in refused.stderr
    # Restarted meanwhile, a node begins in its last role, and a stop takes no longer.
    began = time.monotonic()
    assert mortal_pair[2].stop() == 0
    assert mortal_pair[2].start().ready["role"] == "SLAVE"
    assert time.monotonic() - began < 30
    mortal.start() if fault == "kill" else zookeeper.resume()
    for node in mortal_pair:
        node.wait_status(lambda s: s["registry"]["connected"] and not s["problems"], "connected")
    assert hastore("promote", "-c", str(mortal_pair[2].path)).returncode == 0
    assert put(mortal_pair, b"flipped").status == "PUT_OK"


def test_a_flip_while_zookeeper_dies_in_the_middle(mortal_pair, mortal):
    """The role is written, and ZooKeeper is killed at once: the flip happens, now or afterwards."""
    # The slave has the epoch in its history, else its order seems to be older than that.
    assert put(mortal_pair, b"before").status == "PUT_OK"
    mortal_pair[1].wait_in_sync(2)
    mortal.set_role(2, "SYNC_MASTER")
    mortal.kill()
    assert mortal_pair[1].status() is not None
    mortal.start()
    mortal_pair[2].wait_writable()
    mortal_pair[1].wait_status(lambda s: s["role"] == "SLAVE", "slave")
    assert put(mortal_pair, b"flipped").status == "PUT_OK"


@pytest.mark.full
def test_a_promoted_node_restarts_as_master_without_zookeeper(mortal_pair, mortal):
    flip(mortal_pair[1], mortal_pair[2])
    mortal_pair[2].wait_in_sync(1)
    mortal.kill()
    for node in mortal_pair:
        node.kill()
    for node in mortal_pair:
        node.start(wait=False)
    assert [node.wait_ready()["role"] for node in mortal_pair] == ["SLAVE", "SYNC_MASTER"]
    mortal_pair[2].wait_writable()


@pytest.mark.full
def test_an_emptied_zookeeper_changes_no_role(mortal_pair, mortal):
    flip(mortal_pair[1], mortal_pair[2])
    epoch = mortal_pair[2].wait_in_sync(1)["epoch"]
    mortal.kill()
    mortal.each[0].wipe()
    mortal.start()
    for node, role in zip(mortal_pair, ("SLAVE", "SYNC_MASTER"), strict=True):
        node.wait_log("is missing: it is written with this node's role", since=0)
        node.wait_status(lambda s, role=role: s["registry"]["role"] == role, "its role there")
        wait_until(lambda n=node: mortal.read(n.number), 60, "no object")
        assert mortal.read(node.number)["role"] == role
    assert mortal_pair[2].status()["epoch"] == epoch
    # The emptied ZooKeeper is the registry as before.
    assert hastore("promote", "-c", str(mortal_pair[1].path)).returncode == 0


def promote_after_silence(node):
    """Promote a node that was without ZooKeeper.

    If it has not read its role again since another node's epoch began, it cannot know which came
    first, and says what to do: to give the command again.
    """
    done = hastore("promote", "-c", str(node.path))
    if "since this node was told to become master" in done.stderr:
        done = hastore("promote", "-c", str(node.path))
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_zookeeper_restored_from_an_older_copy_changes_no_role(mortal_pair, mortal, tmp_path):
    zookeeper = mortal.each[0]
    mortal.kill()
    shutil.copytree(zookeeper.folder / "data", tmp_path / "older")
    mortal.start()
    promote_after_silence(mortal_pair[2])
    assert hastore("demote", "-c", str(mortal_pair[1].path)).returncode == 0
    epoch = mortal_pair[2].wait_in_sync(1)["epoch"]
    mortal.restore(tmp_path / "older")
    for node in mortal_pair:
        node.wait_log("is older than one that was read before (restored?)")
    assert [role_of(node) for node in mortal_pair] == ["SLAVE", "SYNC_MASTER"]
    assert mortal_pair[2].status()["epoch"] == epoch
    wait_until(lambda: mortal.read(2)["role"] == "SYNC_MASTER", 60, "the object is not corrected")


@pytest.mark.full
def test_an_ensemble_goes_on_without_one_server(make_servers, make_group):
    servers = make_servers(3)
    pair = registered(make_group(), servers)
    servers.each[0].kill()
    promote_after_silence(pair[2])
    servers.each[1].kill()  # one of three is no majority: nothing changes
    for node in pair:
        node.wait_status(lambda s: not s["registry"]["connected"], "out of reach")
    assert put(pair, b"without").status == "PUT_OK"
    servers.start()
    for node in pair:
        node.wait_status(lambda s: s["registry"]["connected"], "connected")
    assert role_of(pair[2]) == "SYNC_MASTER"
    # All servers empty at once.
    servers.kill()
    for one in servers.each:
        one.wipe()
    servers.start()
    wait_until(lambda: (servers.read(2) or {}).get("role") == "SYNC_MASTER", 60, "not written")
    assert role_of(pair[2]) == "SYNC_MASTER"
    assert put(pair, b"emptied").status == "PUT_OK"


@pytest.mark.full
def test_a_node_that_is_cut_off_from_zookeeper_only(make_group, mortal):
    """The flip goes on without it: epochs fence the old master. Flapping changes nothing either."""
    servers, wire = mortal, Wire(mortal.each[0].port)
    pair = make_group()
    try:
        pair[1].write(registry=f"zk://{wire.address}")
        pair[2].write(registry=servers.registry)
        for node in pair:
            node.start(wait=False)
        pair[1].wait_writable()
        pair[1].wait_in_sync(2)
        wire.cut()
        pair[1].wait_status(lambda s: not s["registry"]["connected"], "cut off")
        assert put(pair, b"cut off").status == "PUT_OK"
        servers.set_role(2, "SYNC_MASTER")
        servers.set_role(1, "SLAVE")
        pair[2].wait_writable()
        pair[2].wait_in_sync(1)  # the old master follows, though it has not read its new role
        assert put(pair, b"flipped").status == "PUT_OK"
        epoch = pair[2].status()["epoch"]
        for _ in range(2):
            wire.restore()
            pair[1].wait_status(lambda s: s["registry"]["connected"], "connected")
            wire.cut()
            pair[1].wait_status(lambda s: not s["registry"]["connected"], "cut off")
        wire.restore()
        pair[1].wait_status(lambda s: s["registry"]["role"] == "SLAVE" and not s["problems"], "ok")
        assert pair[2].status()["epoch"] == epoch
        assert put(pair, b"flapped").status == "PUT_OK"
    finally:
        wire.close()


@pytest.mark.full
def test_the_commands_find_a_node_that_has_moved_from_the_other_nodes_files(pair, servers):
    two, ports = pair[2], Ports()
    two.stop()
    api, ha, http = (f"127.0.0.1:{ports.take()}" for _ in range(3))
    there = {"api": f"tcp://{api}", "ha": ha, "http": http}
    two.write(nodes={**two.settings["nodes"], 2: there})
    two.start()
    pair[1].wait_in_sync(2)
    wait_until(lambda: servers.read(2)["api"] == there["api"], 60, "its object has the old place")
    file = ("-c", str(pair[1].path))
    for command in (
        ("status",), ("can-stop",), ("doctor",), ("doctor", "--all"),
        ("flip", "--to", "2"), ("flip", "--to", "1"),
        ("promote", "--node", "2", "--remote"), ("demote", "--node", "1", "--remote"),
    ):  # fmt: skip
        done = hastore(command[0], *file, *command[1:])
        said = done.stdout + done.stderr
        assert command == ("can-stop",) or done.returncode == 0, (command, said)
        assert "not answer" not in said and "no slave is in sync" not in said, (command, said)
