"""A soak of a few seconds, and leaks planted in real nodes: the sampler must see each of them."""

import contextlib
import random
import threading
from collections import Counter

import pytest

from hastore.client.connections.bulk_link import BulkLink
from hastore.protocol import api
from tests.process.harness import Group, wait_until
from tests.soak import __main__ as command
from tests.soak import watched_node
from tests.soak.sampler import Sampler
from tests.soak.watched_node import LEAKS

SAMPLES, EVERY_S = 48, 0.08  # of each node: fewer give no trend
VISITS = 500  # of each node
PAUSE_S = 0.005  # between two of them
LIMIT_S = 120.0
# Which series each leak must move. A thread also has a stack, and a connection that is kept its
# objects.
SEEN = {"memory": "memory", "descriptors": "other sockets", "threads": "threads", "-": None}


def visit(node, ended, visits):
    """Connect, ask and leave, again and again."""
    while not ended.wait(PAUSE_S):
        link = BulkLink(node.api, 60.0)
        link.send(api.AskMap(1))
        link.receive()
        link.close()
        visits[node] += 1


@pytest.mark.long
@pytest.mark.full
def test_planted_leaks_are_seen_and_a_healthy_node_has_none(tmp_path):
    """Four nodes at the same time, each a group of its own."""
    with contextlib.ExitStack() as stack:
        nodes = {}
        for place, leak in enumerate(("-", *LEAKS), 1):
            folder = tmp_path / leak
            folder.mkdir()
            group = stack.enter_context(Group(folder, 1, master_role="ASYNC_MASTER"))
            node = nodes[place] = group[1]
            node.launcher = [watched_node.__file__, str(folder / "gauges"), leak]
            node.start("master").wait_writable()
        sampler = Sampler(lambda: nodes, lambda node: node.store.parent / "gauges", EVERY_S)
        for place in nodes:
            command._looked(sampler, place)
        ended = threading.Event()
        visits = Counter()
        visitors = [
            threading.Thread(target=visit, args=(one, ended, visits)) for one in nodes.values()
        ]
        for one in visitors:
            one.start()
        sampler.start()
        wait_until(
            lambda: (
                min(len(sampler.series("threads", place)) for place in nodes) >= SAMPLES
                and min(visits[node] for node in nodes.values()) >= VISITS
            ),
            LIMIT_S,
            lambda: f"{len(sampler.samples)} samples, {visits}",
        )
        ended.set()
        for one in visitors:
            one.join(60)
        sampler.stop()
        growing = {
            leak: {one.name for one in sampler.verdicts() if one.node == place and one.grows}
            for place, leak in enumerate(("-", *LEAKS), 1)
        }
        print(growing, visits)
        for leak, name in SEEN.items():
            assert name in growing[leak] if name else not growing[leak], growing


@pytest.mark.long
@pytest.mark.full
@pytest.mark.slow("three nodes and five processes of clients, a restart and a flip among them")
def test_a_soak_for_a_moment(tmp_path):
    """What comes and goes, comes and goes; nothing is lost, and the nodes are idle afterwards."""
    seed = random.SystemRandom().getrandbits(32)
    words = ["--seconds", "3", "--connections", "40", "--groups", "12", "--no-fill"]
    words += ["--seed", str(seed)]
    print("python -m tests.soak", *words)
    outcome = command.soak(tmp_path, command.parsed(words))
    print(command.report(outcome))
    assert outcome.wrong == []
    assert outcome.looked and outcome.counts["come_and_go"] and outcome.counts["hand_over"]
    assert {one.node for one in outcome.samples} == {1, 2, 3}
