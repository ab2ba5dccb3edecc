"""A store of RocketMQ on DLedger with delayed messages becomes hastore's, which delivers them."""

import json
import shutil
import time
from collections import Counter

import pytest

from hastore.protocol.remoting import Answer, Code
from hastore.record.delays import DELAYS_MS
from hastore.store.offline.reader import StoreReader
from tests.interop.rocketmq import Peer
from tests.interop.rocketmq_clients import RocketSite
from tests.interop.test_delays_moved import TOPIC, send
from tests.interop.test_rocketmq_sends import SEND, fields
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Ports, wait_until
from tests.server.remoting.kit import RemotingClient

pytestmark = pytest.mark.full
FILE_BYTES = 16 * 1024 * 1024


class Ledger(Peer):
    """A broker that is alone in a group of DLedger."""

    port = 0

    def call(self, op, **arguments):
        if op == "broker.start":
            arguments["store"] = {
                **arguments["store"],
                "enableDLegerCommitLog": True, "dLegerGroup": "g0", "dLegerSelfId": "n0",
                "dLegerPeers": f"n0-127.0.0.1:{self.port}",
            }  # fmt: skip
        return super().call(op, **arguments)


def in_topic(address):
    """Return how many messages a broker has in the topic."""
    client = RemotingClient(address)
    answers = [
        client.ask(Code.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": str(n)}) for n in range(4)
    ]
    client.close()
    return sum(int(one.fields["offset"]) for one in answers if one.code == Answer.SUCCESS)


def delivered(node):
    with StoreReader(str(node.store)) as reader:
        bodies = [one.body.decode() for one in reader.records() if one.topic == TOPIC]
    return Counter(bodies)


@pytest.mark.slow("a broker starts, and delays are waited for")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("with_file", [True, False])
def test_delayed_messages_move(rocketmq_5, tmp_path, with_file):
    ports, root = Ports(), tmp_path / "rocketmq-store"
    peer = Ledger(rocketmq_5, tmp_path, "before")
    peer.port = ports.take()
    site = RocketSite(peer, ports, root)

    def first():
        client = RemotingClient(site.master)
        answer = client.ask(SEND, fields(TOPIC), b"first")
        client.close()
        return answer.code == Answer.SUCCESS

    wait_until(first, 60, "the broker does not lead")
    soon, later = [f"soon-{n}" for n in range(6)], [f"later-{n}" for n in range(6)]
    send(site.master, soon, 1)
    wait_until(lambda: in_topic(site.master) == 7, 60, "not all are delivered")
    send(site.master, later, 4)
    due = time.monotonic() + DELAYS_MS[3] / 1000
    peer.kill()

    group = DLedgerGroup(tmp_path, store={"commitlog_file_size": FILE_BYTES})
    saved = root / "config" / "delayOffset.json"
    saved.unlink(missing_ok=True)
    if with_file:  # of an earlier moment: the log says that six are delivered
        saved.parent.mkdir(exist_ok=True)
        saved.write_text(json.dumps({"offsetTable": {"1": 2}}))
    for node in group:  # or two empty nodes would elect one of them
        shutil.copytree(root, node.store)
        (node.store / "dledger-n0").rename(node.store / f"dledger-n{node.number}")
    try:
        group.start()
        leader = group.wait_leader()
        send(leader.api.removeprefix("tcp://"), ["own"], 1)
        wanted = {"first", *soon, "own", *(later if with_file else ())}
        wait_until(
            lambda: delivered(group.wait_leader()).keys() >= wanted, 120,
            lambda: str(delivered(group.wait_leader())),
        )  # fmt: skip
        time.sleep(max(0.0, due + 2 - time.monotonic()))  # those of the broker could come by now
        # A new leader knows from its log what was delivered, and whose messages they are.
        leader.kill()
        follower = group.wait_leader(but=leader)
        leader.start(wait=False)
        send(follower.api.removeprefix("tcp://"), ["last"], 1)
        wait_until(lambda: "last" in delivered(group.wait_leader()), 60, "not delivered")
        group.wait_same()
        for node in group:
            assert delivered(node) == Counter({*wanted, "last"})
    finally:
        group.close()
        ports.close()
