"""`hastore pipeline index` and `audit` on the stores and nodes of a group in mode dledger."""

import shutil

import pytest

from hastore.client.consumer.admin import Admin
from hastore.client.producer.producer import Producer
from tests.pipeline.audit.kit import audit
from tests.process.dledger_group import DLedgerGroup
from tests.process.test_dledger_faults import served
from tests.process.test_dledger_rot import flip

pytestmark = pytest.mark.full

BODIES = [b"%05d" % number * 100 for number in range(300)]


@pytest.mark.slow("a group of three nodes and Spark jobs over each")
def test_index_and_audit_of_a_group(run, tmp_path):
    with DLedgerGroup(tmp_path) as group:
        group.start()
        with Producer(group.bootstrap) as producer:
            for body in BODIES:
                producer.send("t", body, key=body[:5])
            producer.flush()
        end = group.wait_same()["confirmed_offset"]
        one, other, third = group
        code, out, err = run("audit", one.api, other.api)
        assert code == 0 and not err, (out, err)
        assert f"[0, {end:,})" in out and out.splitlines()[-1].startswith("equal, digest ")
        assert audit(third.api, one.store, algorithm="sha256").equal

        code, out, err = run("index", "--path", one.store)
        assert code == 3 and "another process has the store open" in err, (out, err)
        assert one.stop() == 0
        for name in ("consumequeue", "index"):
            shutil.rmtree(one.store / name)
        code, out, err = run("index", "--path", one.store)
        assert code == 0, (out, err)
        group.start(one.number)
        group.wait_same()
        assert set(served(one, *BODIES)) == set(BODIES)
        with Admin(one.api) as admin:
            assert [each.body for each in admin.query_key("t", "00077")] == [BODIES[77]]

        # Damage in a log is named, with the message that has it.
        flip(other, BODIES[200])
        first = audit(one.api, other.api).first
        assert first is not None and first.a.fields["properties"][0] == ["KEYS", "00200"]
        assert first.part == "body" and f"damaged at {other.api}" in first.verdict
