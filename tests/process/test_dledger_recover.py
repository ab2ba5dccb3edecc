"""A majority of the disks is lost for good: the drill of docs/dledger.md, with real processes."""

from __future__ import annotations

import json
import pathlib
import shutil

from hastore.client.consumer.consumer import Consumer
from tests.cli.kit import hastore
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import wait_until
from tests.process.test_dledger import TOPIC, put


def read_all(group: DLedgerGroup, count: int) -> list[bytes]:
    """Read so many messages."""
    found: list[bytes] = []
    with Consumer(TOPIC, group.bootstrap) as consumer:
        while len(found) < count:
            messages = consumer.poll(1_000, timeout_s=120)
            assert messages, f"{count - len(found)} messages are missing"
            found += [one.body for one in messages]
    return found


def test_the_drill_after_two_of_three_disks_are_lost(tmp_path: pathlib.Path) -> None:
    with DLedgerGroup(tmp_path) as group:
        group.start()
        bodies = [b"before %d" % number for number in range(20)]
        for body in bodies:
            assert put(group, body).level == "QUORUM_DISK"
        group.wait_same()
        survivor, old, lost = group[1], group[2], group[3]
        file = str(survivor.path)
        refused = hastore("dledger", "recover", "-c", file, "--unsafe")
        assert refused.returncode == 1, "two groups would acknowledge puts"
        assert "node 2, 3 of the group answers, and nothing was changed" in refused.stderr
        for node in (old, lost):
            node.kill()
        refused = hastore("dledger", "recover", "-c", file, "--unsafe")
        assert refused.returncode != 0 and "has the store open" in refused.stderr
        survivor.kill()
        away = tmp_path / "old member"
        shutil.move(old.store, away)
        shutil.rmtree(lost.store)

        asked = hastore("dledger", "recover", "-c", file)
        assert asked.returncode != 0 and "nothing was changed" in asked.stderr
        assert "left behind: node 2, 3" in asked.stdout, asked.stdout
        done = hastore("dledger", "recover", "-c", file, "--unsafe", "--json")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["left_behind"] == [2, 3] and told["done"] and told["kept_beyond"] >= 0

        survivor.start("dledger")
        group.wait_leader()
        bodies.append(b"alone")
        assert put(group, b"alone").level == "QUORUM_DISK"
        old.start("dledger", wait=False)
        lost.start("dledger", wait=False)
        for node in (old, lost):
            survivor.wait_status(
                lambda s, n=node.number: n in {o["node"] for o in s["links"] if o["linked"]},
                "the link",
            )
            number = str(node.number)
            added = hastore("dledger", "add", "-c", file, "--node", number, "--wait", "60")
            assert added.returncode == 0, added.stderr
        status = group.wait_same()
        assert status["members"] == [1, 2, 3]
        bodies.append(b"together")
        assert put(group, b"together").level == "QUORUM_DISK"
        group.wait_same()
        assert sorted(read_all(group, len(bodies))) == sorted(bodies)

        old.kill()  # and the old member comes back
        shutil.rmtree(old.store)
        shutil.move(away, old.store)
        old.start("dledger", wait=False)

        def told_so() -> bool:
            statuses = [node.status() for node in group if node.running]
            texts = [str(one["problems"]) for one in statuses if one is not None]
            return any("belongs to another group" in text for text in texts)

        wait_until(told_so, 60, lambda: f"nobody says so: {[n.status() for n in group]}")
        leader = group.wait_leader(but=old)
        status = leader.status()
        assert status is not None
        assert [one["linked"] for one in status["links"] if one["node"] == 2] == [False]
        assert put(group, b"without the old member").level == "QUORUM_DISK"
