"""A master that is cut off from its slaves confirms nothing, and follows the new one later."""

import pytest

from hastore.client.producer.producer import Producer
from hastore.errors import DurabilityError, OutcomeUnknown
from tests.process.harness import Group
from tests.process.link_proxy import LinkProxies
from tests.process.stores import assert_equal_stores, rescued_records


def test_a_master_that_is_cut_off_confirms_nothing(tmp_path):
    """tests/torture/test_partitions.py has all kinds of faults, in namespaces too."""
    with LinkProxies(3) as network, Group(tmp_path, 3, network=network) as group:
        group.start()
        with Producer(group.bootstrap) as producer:
            producer.send_sync("T", b"before")
        end = group.wait_equal()
        for other in (2, 3):
            network.cut(1, other)
            network.cut(other, 1)
        with Producer([group[1].api], delivery_timeout_s=1.0, idempotent=False) as producer:
            with pytest.raises((OutcomeUnknown, DurabilityError)):
                producer.send_sync("T", b"cut off")
        group[2].edit_role("SYNC_MASTER")
        group[2].wait_writable()
        group[2].wait_in_sync(3)
        old = group[1].status()
        assert old["readable_offset"] == old["confirmed_offset"] == end < old["max_offset"]
        with Producer([group[2].api, group[3].api]) as producer:
            after = producer.send_sync("T", b"after")
        assert (after.level, after.epoch) == ("SYNC_MEM(1)", 2 << 16 | 2)
        network.heal()
        group[1].wait_status(lambda s: s["role"] == "SLAVE" and not s["writable"], "superseded")
        group[2].wait_in_sync(1, 3)
        group.wait_equal()
        group.stop()
        for number in (1, 3):
            log = assert_equal_stores(group[2].store, group[number].store)
        assert [found.body for found in log.records] == [b"before", b"after"]
        rescued = [found.body for found in rescued_records(group[1].store)]
        # A client that asks node 1 first sends "after" to it too, before it learns of node 2.
        assert rescued[0] == b"cut off" and set(rescued) <= {b"cut off", b"after"}
