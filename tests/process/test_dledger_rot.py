"""A flipped bit in a node's log: never served or taken, and mended as the errors say."""

from __future__ import annotations

import pathlib
import shutil
from functools import partial

import pytest

from hastore.client.connections.requester import Requester
from hastore.client.producer.producer import Producer
from hastore.clock import SYSTEM_CLOCK
from hastore.protocol import api
from tests.cli.kit import hastore
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Node
from tests.process.test_dledger_faults import served

TOPIC = "t"


def put(group: DLedgerGroup, *bodies: bytes) -> None:
    with Producer(group.bootstrap) as producer:
        for body in bodies:
            assert producer.send_sync(TOPIC, body).level == "QUORUM_DISK"


def data_of(store: pathlib.Path) -> dict[str, bytes]:
    """Return the files of a node's log, its term and its vote."""
    (folder,) = store.glob("dledger-*")
    names = [*(folder / "data").iterdir(), folder / "currterm", store / "hastore" / "votes.json"]
    return {str(path.relative_to(store)): path.read_bytes() for path in names}


def flip(node: Node, body: bytes) -> None:
    """Change the first byte of a body in a node's log."""
    (folder,) = node.store.glob("dledger-*/data")
    for path in folder.iterdir():
        at = path.read_bytes().find(body)
        if at >= 0:
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(bytes([body[0] ^ 1]))
            return
    raise AssertionError(f"{body!r} is not in the log")


def pull_at(node: Node) -> None:
    """Pull at this node itself: a consumer prefers others to a leader."""
    requester = Requester((node.api,), SYSTEM_CLOCK)
    try:
        for queue in range(4):
            ask = partial(api.Pull, topic=TOPIC, queue_id=queue, position=api.Position(0))
            requester.run_steps(requester.ask(node.api, ask, 60))
    finally:
        requester.close()


@pytest.mark.full
def test_rot_on_the_leader_is_repaired_and_at_its_start_as_the_errors_say(
    tmp_path: pathlib.Path,
) -> None:
    with DLedgerGroup(tmp_path) as group:
        group.start()
        bodies = [b"%04d" % number * 100 for number in range(5)]
        put(group, *bodies)
        group.wait_same()
        hurt = group.wait_leader()
        empty, _whole = group.followers(hurt)
        flip(hurt, bodies[2])

        # A follower that has to copy the log gets the damaged entry, and does not take it.
        empty.kill()
        shutil.rmtree(empty.store)
        empty.start("dledger", wait=False)
        empty.wait_log("came damaged")
        status = empty.wait_status(
            lambda s: any("damaged in the leader's log" in one for one in s["problems"]),
            "it names the leader's damage",
        )
        assert not status["remembers"] and status["committed_index"] == -1

        # A reader meets it: the rest comes from another node, and the leader repairs its log.
        assert set(served(hurt, *bodies)) == set(bodies)
        pull_at(hurt)
        status = hurt.wait_status(lambda s: s["scrub"]["repaired_bytes"] > 0, "the repair")
        assert status["scrub"]["damages"] == []
        hurt.wait_log("are repaired from node")
        empty.wait_status(lambda s: s["remembers"], "it has copied the log from the same leader")
        put(group, b"goes on")
        group.wait_same()
        assert set(served(empty, *bodies, b"goes on")) == {*bodies, b"goes on"}

        # A node that is damaged while it is down does not start, and changes nothing.
        hurt.kill()
        flip(hurt, bodies[3])
        before = data_of(hurt.store)
        hurt.start("dledger", wait=False)
        assert hurt.exit_code() == 3
        said = hurt.last_words()
        assert "were synced" in said and "nothing was cut" in said, said
        assert "while the other nodes run, move the store away and start the node again" in said
        assert data_of(hurt.store) == before
        put(group, b"without it")

        # The remedy.
        assert "`hastore log repair -c FILE`" in said
        done = hastore("log", "repair", "-c", str(hurt.path))
        assert done.returncode == 0 and "repaired from" in done.stdout, done.stderr
        group.start(hurt.number)
        end = group.wait_same()["max_offset"]
        assert len({group.log_bytes(node, end) for node in group}) == 1
        every = {*bodies, b"goes on", b"without it"}
        assert set(served(hurt, *every)) == every
        audit = hastore("log", "verify", "--store", str(hurt.store))
        assert audit.returncode == 0, audit.stdout + audit.stderr
