"""The demo with roles in ZooKeeper at 1/100 of its size, without Spark: two kills, all proofs."""

import pytest

from hastore.demo import zookeeper
from hastore.demo.requirements import missing_requirements
from hastore.errors import UsageError
from tests.demo.small import run_small_demo
from tests.process.harness import hastore
from tests.registry.servers import java_and_jars


@pytest.mark.full
@pytest.mark.timeout(900)
def test_zookeeper_is_killed_in_the_middle_of_the_flip_and_all_proofs_hold(tmp_path):
    java_and_jars()
    folder = tmp_path / "stores"
    facts, rows, _ = run_small_demo(folder, "--zookeeper")
    assert facts["levels"] == {"SYNC_MEM(1)": rows}
    assert facts["zookeeper"]["kills"] == 2
    assert facts["zookeeper"]["acknowledged_without"] >= rows // 10
    assert "role: SYNC_MASTER" in (folder / "node1.yaml").read_text()  # the roles are elsewhere


def test_what_is_missing_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(zookeeper, "pyspark_jars", lambda: None)
    monkeypatch.setattr(zookeeper, "debian_jars", lambda: None)
    found = list(missing_requirements(tmp_path, 100, with_spark=False, with_zookeeper=True))
    assert any("or apt-get install zookeeper" in text for text in found)

    monkeypatch.setattr(zookeeper, "MIN_JAVA", 1_000)
    with pytest.raises(UsageError, match=r"needs Java 1000 or later; .* pip install 'hastore\[j"):
        zookeeper.find_java()
    found = list(missing_requirements(tmp_path, 100, with_spark=False, with_zookeeper=True))
    assert any("a ZooKeeper server needs Java" in text for text in found)
    refused = hastore("demo", "--zookeeper", "--mode", "dledger")
    assert refused.returncode == 2
    assert "elects its leader has no roles in ZooKeeper" in refused.stderr
