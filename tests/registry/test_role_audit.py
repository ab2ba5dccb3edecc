"""The audit log's lines of role changes through ZooKeeper."""

import json

import pytest

from tests.process.harness import audit_lines, hastore, wait_until

pytestmark = pytest.mark.full


def lines_of(node):
    """Return (action, outcome, reason) of each line about a role."""
    found = audit_lines(node.store)
    assert all(one["node"] == node.number for one in found)
    return [
        (one["action"], one["outcome"], one.get("reason", ""))
        for one in found
        if one["action"] in ("promote", "demote", "role", "resume")
    ]


def wait_line(node, *line):
    wait_until(lambda: line in lines_of(node), 60, lambda: f"no {line} in {lines_of(node)}")


def test_each_change_of_a_role_through_zookeeper_is_in_the_audit_log(pair, servers):
    wait_line(pair[1], "promote", "asked", "the first start, by ZooKeeper")
    assert lines_of(pair[2]) == []
    servers.set_role(2, "SYNC_MASTER")
    pair[2].wait_writable()
    wait_line(pair[2], "promote", "asked", "SLAVE to SYNC_MASTER, by ZooKeeper")
    start = pair[2].status()["history"][-1]["start_offset"]
    wait_line(pair[2], "promote", "done", f"SYNC_MASTER in epoch 131074 from {start} on")
    servers.set_role(1, "SLAVE")
    wait_line(pair[1], "demote", "asked", "SYNC_MASTER to SLAVE, by ZooKeeper")
    wait_line(pair[1], "demote", "superseded", "by node 2, epoch 131074")
    servers.set_role(2, "ASYNC_MASTER")
    wait_line(pair[2], "role", "asked", "SYNC_MASTER to ASYNC_MASTER, by ZooKeeper")
    done = hastore("promote", "-c", str(pair[2].path), "--async")
    assert done.returncode == 0, done.stderr
    wait_line(pair[2], "promote", "asked", "hastore promote, by ZooKeeper")
    before = lines_of(pair[1])
    servers.put(1, b"{}")  # refused, so no change
    pair[1].wait_status(lambda s: s["problems"], "a problem")
    assert lines_of(pair[1]) == before
    # Changed while the node was down.
    pair[1].stop()
    entry = {key: pair[1].settings["nodes"][1][key] for key in ("api", "ha", "http")}
    servers.put(1, json.dumps({"role": "SYNC_MASTER", **entry}).encode())
    pair[1].start(wait=False)
    pair[1].wait_ready()
    pair[1].wait_writable()
    while_down = "the role was changed while the node was down, by ZooKeeper"
    wait_line(pair[1], "promote", "asked", while_down)
