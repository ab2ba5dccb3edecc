"""Histories of files and of ZooKeeper's data after which every role must be what it was."""

import json
import shutil

import pytest

from tests.process.harness import wait_until
from tests.registry.servers import flip, registered

pytestmark = pytest.mark.full


def test_an_edited_file_is_no_other_node_until_its_restart(pair, servers):
    """The node's own addresses in the file count from its restart on."""
    before = servers.read(1)
    nodes = {**pair[1].settings["nodes"]}
    nodes[1] = {**nodes[1], "api": f"tcp://127.0.0.1:{servers.ports.take()}"}
    pair[1].write(nodes=nodes)
    pair[1].send(1)  # SIGHUP
    with servers.client() as client:
        client.delete("/hastore/test/g0/1")  # the node writes what is in force
        wait_until(lambda: client.exists("/hastore/test/g0/1"), 60, "the znode stays deleted")
    assert servers.read(1) == before
    servers.set_role(2, "SYNC_MASTER")
    servers.set_role(1, "SLAVE")
    pair[1].wait_status(lambda s: s["registry"]["role"] == "SLAVE" and not s["problems"], "slave")
    assert servers.read(1)["api"] == before["api"]


@pytest.mark.slow("ZooKeeper starts anew, empty and then with older data")
def test_data_of_another_lineage_changes_no_role(mortal, make_group, tmp_path):
    """ZooKeeper was emptied and began to count anew; then the data from before are restored."""
    zookeeper = mortal.each[0]
    with mortal.client() as client:
        for _ in range(300):  # transactions, so that those of the emptied one are lower
            client.set("/zookeeper", b"")
    pair = registered(make_group(), mortal)
    mortal.kill()
    shutil.copytree(zookeeper.folder / "data", tmp_path / "older")
    zookeeper.wipe()
    mortal.start()
    for node in pair:  # a role that is set before the node has noticed would be overwritten
        wait_until(lambda n=node: mortal.read(n.number), 60, "the object stays missing")
    flip(pair[1], pair[2])
    epoch = pair[2].wait_in_sync(1)["epoch"]
    mortal.restore(tmp_path / "older")
    for node, role in zip(pair, ("SLAVE", "SYNC_MASTER"), strict=True):
        wait_until(lambda n=node, r=role: mortal.read(n.number)["role"] == r, 60,
                   lambda n=node: f"{mortal.read(n.number)}: {n.last_lines(5)}")  # fmt: skip
        node.wait_status(
            lambda s, r=role: s["role"] == r and s["registry"]["role"] == r and not s["problems"],
            "its role",
        )
    assert pair[2].status()["epoch"] == epoch
    # The restored one is the registry as before, for a plain object made by hand too.
    with mortal.client() as client:
        plain = {key: mortal.read(1)[key] for key in ("api", "ha", "http")}
        again = client.transaction()
        again.delete("/hastore/test/g0/1")
        again.create("/hastore/test/g0/1", json.dumps({**plain, "role": "SYNC_MASTER"}).encode())
        again.commit()
    pair[1].wait_writable()


def test_from_the_registry_to_the_file_and_back(pair, servers):
    """A node that has had a registry before begins with the role of its file."""
    for node in pair:
        node.stop()
        node.write(registry=None)
    (pair[1].store / "hastore" / "registry.json").write_bytes(b'{"once":"\xff"}')  # not read now
    pair[1].edit_role("SLAVE")
    pair[2].edit_role("SYNC_MASTER")
    for node in pair:
        node.start(wait=False)
    epoch = pair[2].wait_in_sync(1)["epoch"]
    for node in pair:
        node.stop()
        node.write(registry=servers.registry)
        node.start(wait=False)
    for node, role in zip(pair, ("SLAVE", "SYNC_MASTER"), strict=True):
        node.wait_ready()
        node.wait_status(lambda s, r=role: s["registry"]["role"] == r, f"{role} there")
        assert servers.read(node.number)["role"] == role
    assert pair[2].wait_in_sync(1)["epoch"] == epoch
    servers.set_role(1, "SYNC_MASTER")
    pair[1].wait_writable()
    node = pair[2]
    node.stop()
    (node.store / "hastore" / "registry.json").write_bytes(b'{"once":"\xff"}')
    node.start(wait=False)
    assert node.exit_code() != 0
    assert "registry.json is damaged" in node.log and "Traceback" not in node.log
