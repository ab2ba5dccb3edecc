"""Audits of a group of processes while a producer writes, a master dies, and another takes over."""

import threading

import pytest

from hastore.client.producer.producer import Producer
from hastore.errors import UnreachableError
from hastore.pipeline.audit import node_side
from tests.pipeline.audit.kit import audit, flip
from tests.process.stores import read_log


def test_a_live_pair_is_audited_through_a_failover(pair, monkeypatch):
    stop, failures = threading.Event(), []

    def produce():
        try:
            with Producer(pair.bootstrap, delivery_timeout_s=300) as producer:
                number = 0
                while not stop.is_set():
                    producer.send("T", b"%d" % number * 100, key=str(number))
                    number += 1
                    stop.wait(0.001)
                assert producer.flush(120)
        except Exception as failure:
            failures.append(failure)

    one, other = pair[1].api, pair[2].api
    writer = threading.Thread(target=produce)
    writer.start()
    try:
        end = 0
        for _ in range(3):
            pair[1].wait_status(lambda s, end=end: s["confirmed_offset"] > end + 20_000, "it grows")
            found = audit(one, other)
            assert found.equal and found.complete and found.end > end, found
            end = found.end
        monkeypatch.setattr(node_side, "CONNECT_S", 1.0)
        pair[1].kill()
        with pytest.raises(UnreachableError, match=f"^{one} is not reachable within 1 s"):
            audit(one, other)
        monkeypatch.undo()
        assert audit(pair[1].store, other).equal  # a dead node's folder against the survivor
        pair[2].edit_role("SYNC_MASTER")
        pair[1].edit_role("SLAVE")
        pair[1].start("slave")
        pair[2].wait_writable()
        pair[2].wait_in_sync(1)
        found = audit(one, other)
        assert found.equal and found.end > end, found
    finally:
        stop.set()
        writer.join()
    assert not failures
    end = pair.wait_equal()
    found = audit(one, other, algorithm="sha256")
    assert found.equal and found.complete and found.bytes == found.end == end
    assert found.not_compared == []
    record = read_log(pair[1].store).records[50]
    flip(pair[1].store, record.offset + 100, 1)
    first = audit(one, other).first
    assert first is not None and first.offset == record.offset
    assert f"damaged at {one}: its body has a wrong CRC" in first.verdict
    flip(pair[1].store, record.offset + 100, 1)
