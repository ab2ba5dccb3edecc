"""The audit on Spark: as a function, and as a command in the tests' session."""

import json

import click
import pytest

from hastore.errors import StoreError
from hastore.pipeline.audit import audit, job
from tests.pipeline.audit.kit import GOLDEN, copied, flip
from tests.pipeline.audit.test_folders import items
from tests.pipeline.audit.test_nodes import Running, copy


@pytest.mark.slow("the first case of a session pays for its JVM, and for the first Python workers")
def test_many_tasks_give_one_result(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "RANGE_BYTES", 8192)
    monkeypatch.setattr(job, "TASK_BYTES_MIN", 8192)
    monkeypatch.setattr(job, "TASK_BYTES_MAX", 8192)
    one, other = copied(tmp_path, "three-files")
    found = audit(spark, str(one), str(other))
    assert found.equal and found.complete and found.bytes == found.end
    assert found.ranges == -(-found.end // 8192)
    placed = [each for each in items(one) if not each[2].get("blank")]
    for number in (-1, 200, 60):
        flip(other, placed[number][0] + 90, 1)
    found = audit(spark, str(one), str(other))
    assert found.first is not None and found.first.offset == placed[60][0]
    assert found.differing_ranges == 3 and found.equal_until == placed[60][0] + 90
    only = audit(spark, str(one), str(other), stop_at_first=True)
    assert only.first == found.first
    with pytest.raises(StoreError, match="no such folder"):
        audit(spark, str(one), str(tmp_path / "missing"))


def test_the_command(run, tmp_path):
    one, other = copied(tmp_path, "three-files")
    code, out, err = run("audit", one, other)
    assert code == 0 and not err, (out, err)
    assert "1 range, " in out and out.splitlines()[-1].startswith("equal, digest ")
    begin, end, fields = items(one)[20]
    flip(other, begin + 120, 1)
    code, out, err = run("audit", other, one, "--algorithm", "sha256")
    assert code == 4
    assert f"byte {begin + 120:,}, in body of the record at offset {begin:,}" in out
    assert f"damaged at {other}: its body has a wrong CRC" in out
    assert "*  body  " in out and "KEYS=" in out and "TopicA" in out
    line = err.splitlines()[-1]
    assert line.startswith(f"error: {other} and {one} differ in 1 of 1 range; first in the record")
    code, out, err = run("audit", one, other, "--json", "--from", begin)
    told = json.loads(out)
    assert code == 4 and not told["equal"] and told["start"] == begin
    assert told["first"]["a"]["fields"]["queue_offset"] == fields["queue_offset"]
    assert told["first"]["b"]["problem"].startswith("its body has a wrong CRC")
    code, out, err = run("audit", one, tmp_path / "missing")
    assert code == 3 and "no such folder" in err and not out
    code, out, err = run("audit", one, GOLDEN / "three-files", "--algorithm", "md5")
    assert code == 2 and "'md5' is not one of 'xxh3-128', 'sha256'" in err
    assert click.get_current_context(silent=True) is None


def test_running_nodes_are_asked_by_the_tasks(spark, run, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "RANGE_BYTES", 16384)
    monkeypatch.setattr(job, "TASK_BYTES_MIN", 16384)
    one, other = Running(tmp_path / "one", range(200)), Running(tmp_path / "other", range(0))
    try:
        copy(one, other)
        found = audit(spark, one.where, other.where, algorithm="sha256")
        assert found.equal and found.complete and found.bytes == one.store.max_offset
        assert found.digest == audit(spark, one.root, other.where, algorithm="sha256").digest
        begin, _, fields = items(one.root)[77]
        flip(other.root, begin + 200, 4)
        code, out, err = run("audit", one.where, other.where)
        assert code == 4 and f"damaged at {other.where}: its body has a wrong CRC" in err, err
        assert f"record at offset {begin:,}" in out and fields["topic"] in out
        other.store.view = lambda *_: 1 // 0  # as a defect in the node would
        code, out, err = run("audit", one.where, other.where)
        assert code == 1 and err.startswith(f"error: {other.where}: InternalError: Zero"), err
    finally:
        one.close()
        other.close()
