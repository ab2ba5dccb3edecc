"""RocketMQ's own clients, 5.3.3 and 4.9.8, do the same with a hastore group as with RocketMQ.

The scenes are in rocketmq_scenes.py. HASTORE_CLIENTS_SITES=rocketmq runs them against RocketMQ
alone, and prints what it answers.
"""

import functools
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.interop.build import CLIENTS_4, CLIENTS_5, command
from tests.interop.rocketmq import Peer
from tests.interop.rocketmq_clients import Clients, HastoreSite, RocketSite
from tests.interop.rocketmq_scenes import SCENES
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, Ports

pytestmark = pytest.mark.full
SITES = os.environ.get("HASTORE_CLIENTS_SITES", "pair,dledger").split(",")
CASES = [(scene, version) for version in ("5.3.3", "4.9.8") for scene in SCENES]
STORE = {
    "commitlog_file_size": "16MiB",
    "consume_queue_units": 3000,
    "index_slots": 10_000,
    "index_entries": 40_000,
}


class World:
    """The JVMs and the places of this module, each started when it is first used."""

    def __init__(self, program, folder):
        self._program, self._folder = program, folder
        self._ports = Ports()
        self._ends = []
        self.jvm = functools.cache(self._jvm)
        self.site = functools.cache(self._site)
        self.expected = functools.cache(self._expected)

    def _jvm(self, version):
        program = command(CLIENTS_5 if version == "5.3.3" else CLIENTS_4)
        jvm = Clients(program, self._folder, f"clients-{version}")
        self._ends.append(jvm.kill)
        return jvm

    def _site(self, name):
        if name == "rocketmq":
            peer = Peer(self._program, self._folder, "rocketmq")
            self._ends.append(peer.kill)
            return RocketSite(peer, self._ports, self._folder / "rocketmq-store")
        folder = self._folder / name
        folder.mkdir()
        group = (Group if name == "pair" else DLedgerGroup)(folder, store=STORE)
        self._ends.append(group.close)
        return HastoreSite(group.start(), name)

    def _expected(self, scene, version):
        return SCENES[scene](self.jvm(version), self.site("rocketmq"))

    def close(self):
        for end in reversed(self._ends):
            end()
        self._ports.close()


@pytest.fixture(scope="module")
def world(rocketmq_5, tmp_path_factory):
    made = World(rocketmq_5, tmp_path_factory.mktemp("clients"))
    yield made
    made.close()


@pytest.mark.slow("clients wait for their share of the queues, and for delays")
@pytest.mark.parametrize(("scene", "version"), CASES)
@pytest.mark.parametrize("place", SITES)
def test_the_same_as_with_rocketmq(world, place, scene, version):
    jvm, _, site = world.jvm(version), world.site("rocketmq"), world.site(place)
    with ThreadPoolExecutor(1) as thread:  # most of a scene is waiting
        expected = thread.submit(world.expected, scene, version)
        if place == "rocketmq":
            print(json.dumps(expected.result(), indent=1, ensure_ascii=False))
            return
        found = SCENES[scene](jvm, site)
        assert found == expected.result()
