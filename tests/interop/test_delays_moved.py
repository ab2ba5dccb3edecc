"""A store with delayed messages moves from a RocketMQ broker to hastore, which delivers them."""

import json
import shutil
from collections import Counter

import pytest

from hastore.protocol.remoting import Answer
from hastore.record.codec import decode_record
from tests.interop.rocketmq import Peer
from tests.interop.rocketmq_clients import HastoreSite, RocketSite
from tests.interop.test_migration import copy_log
from tests.interop.test_rocketmq_sends import SEND, STORE, UNIQUE, fields, log_of
from tests.process.harness import Group, Ports, wait_until
from tests.server.remoting.kit import RemotingClient

pytestmark = pytest.mark.full
TOPIC = "Moved"


def delivered(folder):
    """Return how often each body is in the topic."""
    records = [decode_record(raw) for raw in log_of(folder)]
    return Counter(one.body.decode() for one in records if one.topic == TOPIC)


def send(address, names, level):
    client = RemotingClient(address)
    for number, name in enumerate(names):
        given = fields(TOPIC, e=str(number % 4))
        given["i"] = UNIQUE.replace("AC1100010A2B18B4AAC27F2F0A2B0000", name)
        given["i"] += f"DELAY\x01{level}\x02"
        assert client.ask(SEND, given, name.encode()).code == Answer.SUCCESS
    client.close()


@pytest.mark.slow("a broker starts, and delays are waited for")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", ["the broker's", "of an earlier moment"])
def test_delayed_messages_move(rocketmq_5, tmp_path, file):
    ports = Ports()
    root = tmp_path / "rocketmq-store"
    peer = Peer(rocketmq_5, tmp_path, "before")
    site = RocketSite(peer, ports, root)
    client = RemotingClient(site.master)
    assert client.ask(SEND, fields(TOPIC), b"first").code == Answer.SUCCESS
    client.close()
    soon, later = [f"soon-{n}" for n in range(6)], [f"later-{n}" for n in range(6)]
    send(site.master, soon, 1)
    wait_until(lambda: set(soon) <= delivered(root / "commitlog").keys(), 60, "none is delivered")
    saved = root / "config" / "delayOffset.json"
    if file == "the broker's":
        wait_until(lambda: saved.exists() and ":6" in saved.read_text().replace(" ", ""), 60,
                   "the broker saves what it has delivered each 10 s")  # fmt: skip
    else:
        saved.parent.mkdir(exist_ok=True)
        saved.write_text(json.dumps({"offsetTable": {"1": 2}}))
    send(site.master, later, 4)
    peer.kill()

    group = Group(tmp_path, store=STORE)
    for node in group:
        node.store.mkdir(parents=True)
        (node.store / "config").mkdir()
        shutil.copy(saved, node.store / "config")
    copy_log(root, group[1].store)
    master = HastoreSite(group.start(), "pair").master
    own = ["own"]
    send(master, own, 1)
    wanted = {"first", *soon, *later, *own}
    log = group[1].store / "commitlog"
    wait_until(lambda: delivered(log).keys() == wanted, 120, lambda: str(delivered(log)))
    # A new master knows from its log what was delivered, whatever the file says.
    group.wait_equal()
    group[1].kill()
    group[2].edit_role("SYNC_MASTER")
    group[1].edit_role("SLAVE")
    group[1].start("slave", wait=False)
    group[2].wait_writable()
    group[2].wait_in_sync(1)
    send(HastoreSite(group, "pair").master, ["last"], 1)
    log = group[2].store / "commitlog"
    wait_until(lambda: "last" in delivered(log), 60, lambda: str(delivered(log)))
    assert delivered(log) == Counter({*wanted, "last"})
    group.close()
    ports.close()
