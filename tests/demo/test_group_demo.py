"""The demo of mode dledger at 1/100 of its size, without Spark: two kills, all proofs."""

import json

import pytest

from hastore.demo.data import count_rows
from hastore.demo.requirements import missing_requirements, needed_bytes
from tests.process.harness import hastore

SCALE = "0.01"


@pytest.mark.timeout(900)
def test_the_leader_is_killed_twice_and_all_proofs_hold(tmp_path):
    folder = tmp_path / "stores"
    done = hastore(
        *("demo", "--mode", "dledger", "--json", "--scale", SCALE, "--no-spark"),
        *("--folder", str(folder)),
        timeout_s=800,
    )
    assert done.returncode == 0, done.stderr
    facts, rows = json.loads(done.stdout), count_rows(float(SCALE))
    assert facts["messages"] == facts["queue_units_identical"] == rows
    assert facts["levels"] == {"QUORUM_DISK": rows}
    assert facts["log_bytes_identical"] > rows * 300
    first, second = facts["failover"]["kills"]
    assert first["killed"] != first["leader"] == second["killed"] != second["leader"]
    assert 1 < first["term"] < second["term"]
    for number in range(1, 7):
        assert f"{number}/6 " in done.stderr
    assert len(list(folder.glob("node*/dledger-*/data"))) == 3


def test_three_nodes_need_more_room_than_two(tmp_path):
    assert list(missing_requirements(tmp_path, 100, with_spark=False, nodes=3)) == []
    assert needed_bytes(100, 3) * 2 == needed_bytes(100) * 3
