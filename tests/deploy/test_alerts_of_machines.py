"""Alerts of one machine and its clients: disks, descriptors, damage, keys, certificates, lag."""

from __future__ import annotations

import contextlib
import pathlib
import resource
import secrets
import threading

import pytest

from hastore import Admin, Consumer, OutgoingMessage, Producer
from hastore.errors import CorruptRecordError, NotAuthenticatedError
from hastore.protocol.remoting import Code
from tests.deploy.faults import PASSING, TEST, WHY, SmallDisk, fires, of, puts, small_disk_at
from tests.deploy.prometheus import Prometheus
from tests.deploy.secured import Secured
from tests.process import faulty_node
from tests.process.harness import Group
from tests.process.stores import read_log
from tests.server.remoting.kit import RemotingClient

pytestmark = [pytest.mark.full, pytest.mark.long]
MIB = 1 << 20
ALONE = {"master_role": "ASYNC_MASTER"}


@fires("HastorePutsSlow", "HastoreFlushSlow", "HastoreBusy", "HastorePutsUnconfirmed")
@pytest.mark.slow(WHY)
def test_a_slow_disk(tmp_path: pathlib.Path) -> None:
    """The node's own syncs take longer: a disk cannot be slowed without a device of its own."""
    with Group(tmp_path, 1, **ALONE, store={"flush": "sync"}) as group:
        control = tmp_path / "faults"
        faults, one = faulty_node.Faults(control), group[1]
        one.launcher = [str(faulty_node.__file__), str(control)]
        one.write(api={"max_pending_puts": 2})
        with (
            Prometheus(tmp_path, [one.start("master")]) as prometheus,
            puts([one.api], sync_flush=True),
            puts([one.api], sync_flush=True),
            puts([one.api], sync_flush=True),
        ):
            faults["sync_ms"] = 800
            prometheus.wait_firing("HastoreFlushSlow", **of(one))
            prometheus.wait_firing("HastorePutsSlow", **of(one))
            prometheus.wait_firing("HastoreBusy", **of(one))
            faults["sync_ms"] = 8_000  # longer than a put waits for it
            prometheus.wait_firing("HastorePutsUnconfirmed", **of(one))
            faults.heal()
            prometheus.wait_gone()
            names = ("HastoreFlushSlow", "HastorePutsSlow", "HastoreBusy", "HastorePutsUnconfirmed")
            prometheus.check_only(*names, also=["HastoreProblems", "HastoreTooFewInSync"])


@fires("HastoreRequestsFail", "HastoreLogDamaged")
@pytest.mark.slow(WHY)
def test_a_damaged_record(tmp_path: pathlib.Path) -> None:
    with Group(tmp_path, 1, **ALONE) as group:
        one = group[1].start("master")
        with Producer([one.api]) as producer:
            for number in range(3):
                producer.send_sync("T", b"%d" % number * 100, queue=0)
        group.wait_equal()
        record = read_log(one.store).records[1]
        (file,) = (one.store / "commitlog").iterdir()
        data = file.read_bytes()
        with open(file, "r+b") as damaged, Prometheus(tmp_path, [one]) as prometheus:
            damaged.seek(record.offset + 4)
            damaged.write(bytes(4))
            damaged.flush()
            with Consumer("T", [one.api], start="earliest", queues=[0]) as consumer:
                read = consumer.poll(timeout_s=60.0)
                assert len(read) == 1
                prometheus.wait_firing("HastoreRequestsFail", **of(one))
                # No other node has the bytes, so the node cannot repair them.
                prometheus.wait_firing("HastoreLogDamaged", **of(one))
                damaged.seek(record.offset)
                damaged.write(data[record.offset : record.offset + 8])
                damaged.flush()
                one.stop()
                one.start("master")  # looks at once at what was damaged
                while len(read) < 3:
                    # An answer that came before the restart may still say that it is damaged.
                    with contextlib.suppress(CorruptRecordError):
                        read += consumer.poll(timeout_s=60.0)
            prometheus.wait_gone()
            prometheus.check_only(
                "HastoreRequestsFail", "HastoreLogDamaged",
                also=["HastoreProblems", "HastoreNodeDown", "HastorePutsRefused"],
            )  # fmt: skip


@fires("HastoreDiskFillsUp", "HastoreDiskFull", "HastoreSlaveLags", "HastoreProblems")
@pytest.mark.slow("the lag of a slave counts from 60 s on")
def test_a_disk_that_fills_up(tmp_path: pathlib.Path, small_disk: pathlib.Path) -> None:
    with Group(tmp_path, store={"commitlog_file_size": "256KiB"}) as group:
        one, two = group
        two.write(store={"root": str(small_disk / "store")})
        disk = SmallDisk(small_disk)
        with (
            Prometheus(tmp_path, group.start()) as prometheus,
            puts([one.api], bytes(3_000)),
        ):
            stop = threading.Event()

            def fill() -> None:
                while not stop.wait(0.5) and disk.free_bytes > MIB:
                    disk.fill(128 * 1024)

            filler = threading.Thread(target=fill)
            filler.start()
            try:
                prometheus.wait_firing("HastoreDiskFillsUp", **of(two))
            finally:
                stop.set()
                filler.join()
            disk.fill(disk.free_bytes - 64 * 1024)
            prometheus.wait_firing("HastoreDiskFull", **of(two))
            prometheus.wait_firing("HastoreProblems", **of(two))
            prometheus.wait_firing("HastoreTooFewInSync", **of(one))
            prometheus.wait_firing("HastoreSlaveLags", **of(one), slave="2")
            disk.make_room()
            prometheus.wait_gone()
            prometheus.check_only(
                "HastoreDiskFillsUp", "HastoreDiskFull", "HastoreProblems", "HastoreSlaveLags",
                "HastoreTooFewInSync",
                also=(
                    *("HastorePutsRefused", "HastorePutsUnconfirmed", "HastoreNothingConfirmed"),
                    *("HastoreSlaveNotInSync", "HastoreBusy"),
                ),
            )  # fmt: skip


@fires("HastoreReplayBehind")
@pytest.mark.slow("replay is 256 MiB behind")
def test_queues_without_room(tmp_path: pathlib.Path) -> None:
    """The log has room; its queues are on a disk of their own, which has none."""
    with Group(tmp_path, 1, **ALONE, store={"commitlog_file_size": "64MiB"}) as group:
        one = group[1]
        with small_disk_at(one.store / "consumequeue", MIB) as disk:
            one.start("master")
            with Prometheus(tmp_path, [one]) as prometheus, Producer([one.api]) as producer:
                producer.send_sync("T", b"1")
                group.wait_equal()
                disk.fill(disk.free_bytes)
                for number in range(70):
                    producer.send_sync(f"T{number}", secrets.token_bytes(4 * MIB - 1_000))
                prometheus.wait_firing("HastoreReplayBehind", **of(one))
                prometheus.wait_firing("HastoreProblems", **of(one))
                disk.make_room()
                prometheus.wait_gone()
                prometheus.check_only("HastoreReplayBehind", "HastoreProblems")
        one.kill()


@fires("HastoreDescriptorsUsedUp", "HastoreConnectionsUsedUp")
@pytest.mark.slow(WHY)
def test_connections_that_nobody_uses(tmp_path: pathlib.Path) -> None:
    with Group(tmp_path, 1, **ALONE) as group:
        one = group[1]
        one.write(api={"max_connections": 40, "evict_idle": "1s"})
        with Prometheus(tmp_path, [one.start("master")]) as prometheus:
            ((_, before),) = prometheus.query("process_open_fds")
            _, hard = resource.prlimit(one.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (int(before) + 45, hard))
            opened = [RemotingClient(one.api) for _ in range(40)]
            for each in opened:  # a connection that says nothing is ended soon
                each.ask(Code.GET_BROKER_CLUSTER_INFO)
            RemotingClient(one.api).close()
            prometheus.wait_firing("HastoreConnectionsUsedUp", **of(one))
            prometheus.wait_firing("HastoreDescriptorsUsedUp", **of(one))
            for each in opened:
                each.close()
            prometheus.wait_gone()
            prometheus.check_only("HastoreConnectionsUsedUp", "HastoreDescriptorsUsedUp")


@fires("HastoreConsumerLag")
@pytest.mark.slow(WHY)
def test_a_consumer_group_that_does_not_consume(tmp_path: pathlib.Path) -> None:
    with Group(tmp_path, 1, **ALONE, store={"commitlog_file_size": "64MiB"}) as group:
        one = group[1].start("master")
        part = [OutgoingMessage(b"x") for _ in range(1_000)]
        with (
            Prometheus(tmp_path, [one]) as prometheus,
            Producer([one.api], linger_ms=1.0) as producer,
        ):
            producer.send_batch("T", part).result(60)
            with Consumer("T", [one.api], group="shop", start="latest") as consumer:
                consumer.poll(timeout_s=0.1)
                consumer.commit()
                for _ in range(101):
                    producer.send_batch("T", part).result(60)
                labels = {**TEST, "consumer_group": "shop", "topic": "T"}
                with puts([one.api]):
                    prometheus.wait_firing("HastoreConsumerLag", **labels)
                consumer.seek_to_latest()
                consumer.commit()
                prometheus.wait_gone()
            prometheus.check_only("HastoreConsumerLag")


@fires("HastoreLoginsRefused", "HastoreIdentitiesDiffer", "HastoreCertificateEnds")
@pytest.mark.slow(WHY)
def test_keys_and_certificates(tmp_path: pathlib.Path) -> None:
    with Group(tmp_path) as group:
        secured = Secured(tmp_path, group, days=10)
        wrong = tmp_path / "wrong.key"
        wrong.write_text(secrets.token_hex(32))
        wrong.chmod(0o600)
        stranger = {"tls_ca": str(secured.ca), "identity": "ops", "key_file": str(wrong)}
        one, two = group
        with Prometheus(tmp_path, secured.start(), ca=secured.ca, key=secured.key) as prometheus:
            prometheus.wait_for("hastore_takes_default == 1")
            for node in group:
                prometheus.wait_firing("HastoreCertificateEnds", **of(node), certificate="node")
            secured.renew()
            prometheus.wait_gone()

            for _ in range(25):
                with Admin([one.api], security=stranger) as admin:
                    with pytest.raises(NotAuthenticatedError):
                        admin.topics()
            prometheus.wait_firing("HastoreLoginsRefused", **of(one), outcome="refused")
            secured.new("other", out=tmp_path / "other.key", file=secured.file(two))
            prometheus.wait_firing("HastoreIdentitiesDiffer", **TEST)
            secured.file(one).write_bytes(secured.file(two).read_bytes())
            prometheus.wait_gone()
            identities = two.settings["security"].pop("identities")
            for changed in ({}, {"identities": identities}):
                two.stop()
                two.write(security=changed)
                two.start("slave")
                if not changed:
                    prometheus.wait_firing("HastoreIdentitiesDiffer", **TEST)
            prometheus.wait_gone()
            prometheus.check_only(
                "HastoreCertificateEnds", "HastoreLoginsRefused", "HastoreIdentitiesDiffer",
                also=PASSING,
            )  # fmt: skip
