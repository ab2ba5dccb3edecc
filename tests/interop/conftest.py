"""JVMs and hastore groups; all are killed and reaped with their test."""

import contextlib

import pytest

from tests.interop.build import (
    CLIENTS_4,
    CLIENTS_5,
    JEROMQ,
    OLD_BROKER,
    ROCKETMQ_4,
    ROCKETMQ_5,
    command,
)
from tests.interop.java_process import JavaProcess
from tests.interop.rocketmq import Peer
from tests.interop.rocketmq_clients import Clients
from tests.process.harness import Group, Ports


@pytest.fixture(scope="session")
def rocketmq_5():
    return command(ROCKETMQ_5)


@pytest.fixture(scope="session")
def rocketmq_4():
    return command(ROCKETMQ_4)


@pytest.fixture(scope="session")
def jeromq_program():
    return command(JEROMQ)


@pytest.fixture
def ports():
    """Free ports of loopback."""
    held = Ports()
    yield held
    held.close()


@pytest.fixture
def make_peer(rocketmq_5, tmp_path, request):
    """Return a function that starts JVMs with RocketMQ 5's classes."""
    yield from making(rocketmq_5, tmp_path, request)


@pytest.fixture
def make_old_peer(rocketmq_4, tmp_path, request):
    """Return a function that starts JVMs with the store of RocketMQ 4."""
    yield from making(rocketmq_4, tmp_path, request, name="rocketmq_4_")


@pytest.fixture
def make_old_broker(tmp_path, request):
    """Return a function that starts JVMs with a whole broker of RocketMQ 4.9."""
    yield from making(command(OLD_BROKER), tmp_path, request, name="rocketmq_4_broker")


@pytest.fixture
def make_jvm(tmp_path):
    """Return a function that starts JVMs with RocketMQ's clients of a version."""
    with contextlib.ExitStack() as ends:

        def make(name, version, *options):
            program = command(CLIENTS_5 if version == "5.3.3" else CLIENTS_4)
            jvm = Clients(program, tmp_path, name, options)
            ends.callback(jvm.kill)
            return jvm

        yield make


def making(program, tmp_path, request, name="rocketmq"):
    peers = []

    def make(**options):
        peers.append(Peer(program, tmp_path, f"{name}{len(peers)}", **options))
        return peers[-1]

    yield make
    for peer in peers:
        peer.kill()
    if failed(request):
        for peer in peers:
            print(f"---- {peer.name}: the last of stderr\n{peer.last_words(40)}")


@pytest.fixture
def jeromq(jeromq_program, tmp_path, request):
    """A JVM with JeroMQ's classes."""
    peer = JavaProcess(jeromq_program, tmp_path, "jeromq", ["-Xmx256m"])
    yield peer
    peer.kill()
    if failed(request):
        print(f"---- {peer.name}: the last of stderr\n{peer.last_words(40)}")


@pytest.fixture
def make_group(tmp_path, request):
    """Return a function that makes groups of hastore nodes."""
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
