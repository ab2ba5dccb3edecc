"""The demo of mode dledger at 1/100 of its size, without Spark: two kills, all proofs."""

import pytest

from hastore.demo.requirements import missing_requirements, needed_bytes
from tests.cli.kit import hastore
from tests.demo.small import run_small_demo


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_leader_is_killed_twice_and_all_proofs_hold(tmp_path):
    folder = tmp_path / "stores"
    facts, rows, told = run_small_demo(folder, "--mode", "dledger")
    assert facts["levels"] == {"QUORUM_DISK": rows}
    assert facts["log_bytes_identical"] > rows * 300
    first, second = facts["failover"]["kills"]
    assert first["killed"] != first["leader"] == second["killed"] != second["leader"]
    assert 1 < first["term"] < second["term"]
    for number in range(1, 7):
        assert f"{number}/6 " in told
    assert len(list(folder.glob("node*/dledger-*/data"))) == 3
    nodes = sorted(folder.glob("node?"))
    done = hastore("check", facts["history"], "--store", str(nodes[2]), "--expect", "flip,kill")
    assert done.returncode == 0 and "faults: kill 2\n" in done.stdout, done.stderr


def test_three_nodes_need_more_room_than_two(tmp_path):
    assert list(missing_requirements(tmp_path, 100, with_spark=False, nodes=3)) == []
    stores = needed_bytes(0)
    assert needed_bytes(0, 3) * 2 == stores * 3 < needed_bytes(100_000, 3) * 2
