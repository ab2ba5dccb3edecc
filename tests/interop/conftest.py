"""RocketMQ processes and hastore groups; all are killed and reaped with their test."""

import pytest

from tests.interop.build import class_path
from tests.interop.rocketmq import Peer
from tests.process.harness import Group, Ports


@pytest.fixture(scope="session")
def rocketmq_class_path():
    return class_path()


@pytest.fixture
def ports():
    """Free ports of loopback; a broker takes its port, the next and the one two below."""
    held = Ports()
    yield held
    held.close()


@pytest.fixture
def make_peer(rocketmq_class_path, tmp_path, request):
    """Start JVMs with RocketMQ's classes."""
    peers = []

    def make(name="rocketmq", **options):
        peers.append(Peer(rocketmq_class_path, tmp_path, f"{name}{len(peers)}", **options))
        return peers[-1]

    yield make
    for peer in peers:
        peer.kill()
    if failed(request):
        for peer in peers:
            print(f"---- {peer.name}: the last of stderr\n{peer.last_words(40)}")


@pytest.fixture
def make_group(tmp_path, request):
    """Make groups of hastore nodes."""
    groups = []

    def make(count=2, **options):
        folder = tmp_path / f"group{len(groups)}"
        folder.mkdir()
        groups.append(Group(folder, count, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
    if failed(request):
        for group in groups:
            for node in group:
                print(f"---- node {node.number}: the last of stderr\n{node.last_lines(25)}")


def failed(request):
    report = getattr(request.node, "report_call", None)
    return report is not None and report.failed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.report_call = report
    return report
