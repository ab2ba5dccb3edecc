"""Alerts of a group: a real Prometheus sees each fire when nodes or links fail, and go again."""

from __future__ import annotations

import pathlib

import pytest

from hastore import Producer
from hastore.protocol.remoting import Code
from tests.deploy.faults import PASSING, TEST, WHY, fires, of, puts, run
from tests.deploy.prometheus import Prometheus
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until
from tests.process.link_proxy import LinkProxies
from tests.registry.servers import Servers, registered
from tests.server.remoting.kit import RemotingClient

pytestmark = [pytest.mark.full, pytest.mark.long]
SEND = {
    "a": "group", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1700000000123",
    "h": "0", "i": f"UNIQ_KEY\x01{1:032X}\x02WAIT\x01true\x02", "j": "0", "k": "false",
    "m": "false", "n": "g0",
}  # fmt: skip


@fires("HastoreNodeDown", "HastorePutsRefused", "HastoreForwardsRefused")
@pytest.mark.slow(WHY)
def test_a_master_that_hangs_and_one_that_is_killed(tmp_path: pathlib.Path) -> None:
    with Group(tmp_path) as group, Prometheus(tmp_path, group.start()) as prometheus:
        one, two = group
        with Producer(group.bootstrap) as producer:
            producer.send_sync("T", b"1")
        one.pause()
        prometheus.wait_firing("HastoreNodeDown", instance=one.http, job="hastore")
        prometheus.wait_firing("HastorePutsRefused", **TEST)
        one.resume()
        prometheus.wait_gone("HastoreNodeDown", "HastorePutsRefused")
        prometheus.wait_up()

        one.wait_in_sync(2)
        before = prometheus.series()
        one.kill()
        prometheus.wait_firing("HastoreNodeDown", instance=one.http)
        prometheus.wait_firing("HastorePutsRefused", **TEST)
        client = RemotingClient(two.api)
        assert client.ask(Code.SEND_MESSAGE_V2, SEND, b"no master").code != 0
        client.close()
        prometheus.wait_firing("HastoreForwardsRefused", **of(two))
        two.kill()
        prometheus.wait_firing("HastoreNodeDown", instance=two.http)
        prometheus.wait_firing("HastorePutsRefused", **TEST)  # though no node says so any more
        two.start("slave")
        one.start("master")
        one.wait_in_sync(2)
        with Producer(group.bootstrap) as producer:
            producer.send_sync("T", b"2")
        prometheus.wait_gone()
        wait_until(
            lambda: before <= prometheus.series(), 60,
            lambda: f"labels have changed: {before - prometheus.series()}",
        )  # fmt: skip
        prometheus.check_only(
            "HastoreNodeDown", "HastorePutsRefused", "HastoreForwardsRefused", also=PASSING
        )


@fires("HastoreTooFewInSync", "HastoreSlaveNotInSync", "HastoreNothingConfirmed")
@pytest.mark.slow(WHY)
def test_a_slave_that_was_killed(tmp_path: pathlib.Path) -> None:
    with Group(tmp_path) as group, Prometheus(tmp_path, group.start()) as prometheus:
        one, two = group
        two.kill()
        with puts([one.api], acks=1):
            prometheus.wait_firing("HastoreTooFewInSync", **of(one))
            prometheus.wait_firing("HastorePutsRefused", **TEST)
            prometheus.wait_firing("HastoreProblems", **of(one))
            prometheus.wait_firing("HastoreSlaveNotInSync", **of(one))
            prometheus.wait_firing("HastoreNothingConfirmed", **of(one))
            two.start("slave")
            prometheus.wait_gone("HastoreTooFewInSync", "HastorePutsRefused", "HastoreProblems")
            prometheus.wait_gone()
        prometheus.check_only(
            "HastoreNodeDown", "HastorePutsRefused", "HastoreTooFewInSync", "HastoreProblems",
            "HastoreSlaveNotInSync", "HastoreNothingConfirmed", also=PASSING,
        )  # fmt: skip


@fires("HastoreSeveralMasters", "HastoreMessagesCut")
@pytest.mark.slow(WHY)
def test_a_master_that_does_not_know_of_its_successor(tmp_path: pathlib.Path) -> None:
    with (
        LinkProxies(2) as network,
        Group(tmp_path, network=network, master_role="ASYNC_MASTER") as group,
        Prometheus(tmp_path, group.start()) as prometheus,
    ):
        one, two = group
        with Producer([one.api]) as producer:
            producer.send_sync("T", b"before")
        group.wait_equal()
        network.cut(1, 2)
        network.cut(2, 1)
        with Producer([one.api], idempotent=False) as producer:
            for number in range(3):
                producer.send_sync("T", b"cut off %d" % number)
        two.edit_role("ASYNC_MASTER")
        two.wait_writable()
        alert = prometheus.wait_firing("HastoreSeveralMasters", **TEST)
        assert alert["value"] == "2e+00"
        prometheus.wait_firing("HastoreSlaveNotInSync", **of(two))
        one.edit_role("SLAVE")
        network.heal()
        alert = prometheus.wait_firing("HastoreMessagesCut", **of(one))
        assert alert["value"] == "3e+00", alert
        prometheus.wait_gone("HastoreSeveralMasters", "HastoreSlaveNotInSync")
        prometheus.wait_firing("HastoreProblems", **of(one))
        run("rescued", "dismiss", "-c", str(one.path), "--all")
        prometheus.wait_gone()
        prometheus.check_only(
            "HastoreSeveralMasters", "HastoreSlaveNotInSync", "HastoreTooFewInSync",
            "HastoreMessagesCut", "HastoreProblems", also=PASSING,
        )  # fmt: skip


@fires("HastoreManyPromotions", "HastoreLinksBreak")
@pytest.mark.slow(WHY)
def test_links_that_break_and_masters_that_change(tmp_path: pathlib.Path) -> None:
    with (
        LinkProxies(2) as network,
        Group(tmp_path, network=network) as group,
        Prometheus(tmp_path, group.start()) as prometheus,
    ):
        for _ in range(6):
            network.unplug(2)
            group[1].wait_status(lambda s: not s["slaves"], "the link has ended")
            network.plug(2)
            group[1].wait_in_sync(2)
        prometheus.wait_firing("HastoreLinksBreak", **of(group[1]), peer="2")
        for number in (2, 1, 2, 1):
            run("flip", "-c", str(group[1].path), "--to", str(number))
        prometheus.wait_firing("HastoreManyPromotions", **TEST)
        prometheus.wait_gone()
        prometheus.check_only("HastoreLinksBreak", "HastoreManyPromotions", also=PASSING)


@fires("HastoreUnclean")
@pytest.mark.slow(WHY)
def test_a_slave_that_has_lost_a_file_and_has_no_master(tmp_path: pathlib.Path) -> None:
    with Group(tmp_path) as group, Prometheus(tmp_path, group.start()) as prometheus:
        one, two = group
        with Producer(group.bootstrap) as producer:
            producer.send_sync("T", b"1")
        two.kill()
        one.kill()
        (two.store / "hastore" / "limits").unlink()
        two.start("slave")
        prometheus.wait_firing("HastoreUnclean", **of(two))
        one.start("master")
        one.wait_in_sync(2)
        prometheus.wait_gone()
        names = ("HastoreUnclean", "HastorePutsRefused", "HastoreNodeDown")
        prometheus.check_only(*names, also=PASSING)


@pytest.mark.slow(WHY)
def test_a_group_that_elects_and_has_no_majority(tmp_path: pathlib.Path) -> None:
    with (
        DLedgerGroup(tmp_path, faulty=True) as group,
        Prometheus(tmp_path, group.start()) as prometheus,
    ):
        leader = group.wait_leader()
        lost, last = group.followers(leader)
        lost.kill()
        labels = {**of(leader), "slave": str(lost.number)}
        prometheus.wait_firing("HastoreSlaveNotInSync", **labels)
        prometheus.wait_firing("HastoreNodeDown", instance=lost.http)
        group.faults[last.number]["full"] = 1
        with puts(group.bootstrap, bytes(3_000)):
            prometheus.wait_firing("HastoreTooFewInSync", **of(leader))
        group.faults[last.number].heal()
        prometheus.wait_gone("HastoreTooFewInSync")

        last.pause()
        prometheus.wait_firing("HastorePutsRefused", **TEST)
        # A leader without a majority steps down: it is no leader that lacks nodes in sync.
        prometheus.wait_gone("HastoreTooFewInSync", "HastoreSlaveNotInSync")
        last.resume()
        lost.start("dledger")
        group.wait_leader()
        prometheus.wait_gone()
        full = ("HastoreDiskFull", "HastoreDiskFillsUp", "HastorePutsUnconfirmed")
        prometheus.check_only(
            "HastoreSlaveNotInSync", "HastoreNodeDown", "HastoreTooFewInSync", "HastorePutsRefused",
            also=(*full, *PASSING, "HastoreNothingConfirmed"),
        )  # fmt: skip


@pytest.mark.slow(WHY)
def test_a_registry_that_is_gone(tmp_path: pathlib.Path) -> None:
    servers = Servers(tmp_path, 1, "maxSessionTimeout=3000\n")
    try:
        with Group(tmp_path) as group:
            registered(group, servers.start())
            with Prometheus(tmp_path, group) as prometheus:
                servers.kill()
                for node in group:
                    prometheus.wait_firing("HastoreProblems", **of(node))
                connected = prometheus.query("hastore_registry_connected")
                assert [value for _, value in connected] == [0, 0]
                servers.start()
                prometheus.wait_gone()
                prometheus.check_only("HastoreProblems")
    finally:
        servers.close()
