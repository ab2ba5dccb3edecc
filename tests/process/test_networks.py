"""The simulated networks of the partition tests work as described, and leave nothing behind."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.process import namespaces
from tests.process.harness import ROOT, wait_until
from tests.process.link_proxy import LinkProxies
from tests.process.namespaces import Namespaces
from tests.process.networks import open_network

# test_partition.py shows in `make test` that a group behind the proxies is partitioned.
pytestmark = pytest.mark.full
WAIT_S = 60.0
ABSENT_S = 0.3  # wait for bytes that must not arrive: a slow machine only weakens this check


def _split(address):
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


@contextlib.contextmanager
def on_host(network, number):
    """Enter the namespace of a node; sockets that are created there stay in it."""
    if not isinstance(network, Namespaces):
        yield
        return
    holder, back = (
        os.open(path, os.O_RDONLY)
        for path in (network.namespace(number), "/proc/thread-self/ns/net")
    )
    namespaces.enter(holder)
    try:
        yield
    finally:
        namespaces.enter(back)
        os.close(holder)
        os.close(back)


@contextlib.contextmanager
def linked(network, source, target):
    """Connect two nodes; yield the connecting and the accepting end."""
    with on_host(network, target):
        listener = socket.create_server(_split(network.addresses[target]["ha"]))
    with listener, on_host(network, source):
        near = socket.create_connection(_split(network.seen_by(source)[target]["ha"]), WAIT_S)
        with near:
            listener.settimeout(WAIT_S)
            far, _ = listener.accept()
            with far:
                far.settimeout(WAIT_S)
                for end in (near, far):  # else TCP delays a piece until the previous one is acked
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                near.sendall(b"!")
                assert far.recv(1) == b"!"
                yield near, far


def take(sock, count):
    """Return exactly `count` bytes."""
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, f"ended after {len(data)} of {count} bytes"
        data += piece
    return data


def silent(sock):
    sock.settimeout(ABSENT_S)
    try:
        with pytest.raises(TimeoutError):
            sock.recv(1)
    finally:
        sock.settimeout(WAIT_S)


@pytest.fixture(params=["best", "proxies"])
def network(request):
    """The best network that this machine allows, and the proxies, which work everywhere."""
    with open_network(3, "" if request.param == "best" else "proxies") as made:
        yield made


@pytest.mark.parametrize("caller", [1, 2])
def test_a_cut_affects_one_direction_and_loses_nothing_once_restored(network, caller):
    with linked(network, caller, 3 - caller) as ends:
        one, two = ends if caller == 1 else reversed(ends)
        network.cut(1, 2)
        one.sendall(b"abc")
        two.sendall(b"back")
        assert take(one, 4) == b"back"
        silent(two)
        network.restore(1, 2)
        assert take(two, 3) == b"abc"


def test_other_links_and_clients_are_not_cut(network):
    for other in (2, 3):
        network.cut(1, other)
        network.cut(other, 1)
    with linked(network, 2, 3) as (near, far):
        near.sendall(b"well")
        assert take(far, 4) == b"well"
    with on_host(network, 1):
        listener = socket.create_server(_split(network.addresses[1]["api"]))
    with listener, socket.create_connection(_split(network.addresses[1]["api"]), WAIT_S) as client:
        node, _ = listener.accept()
        with node:
            client.sendall(b"put")
            assert take(node, 3) == b"put"
            node.sendall(b"done")
            assert take(client, 4) == b"done"


def test_loss_and_low_bandwidth_only_delay_the_bytes(network):
    data = os.urandom(48 * 1024)
    with linked(network, 1, 2) as (near, far):
        network.lose(1, 2, 0.2)
        sender = threading.Thread(target=near.sendall, args=(data,))
        sender.start()
        assert take(far, len(data)) == data
        sender.join()
        network.heal()
        network.slow(1)
        began_s = time.monotonic()
        sender = threading.Thread(target=near.sendall, args=(data,))
        sender.start()
        assert take(far, len(data)) == data
        sender.join()
        assert time.monotonic() - began_s > 0.1


def test_a_pulled_cable_interrupts_connections(network):
    with linked(network, 1, 2) as (near, far):
        network.unplug(2)
        if isinstance(network, Namespaces):
            near.sendall(b"x")
            silent(far)
        else:
            with contextlib.suppress(ConnectionResetError):
                assert near.recv(1) == b""
        network.plug(2)
    with linked(network, 1, 2) as (near, far):
        near.sendall(b"again")
        assert take(far, 5) == b"again"


def _namespace():
    return os.readlink("/proc/thread-self/ns/net")


def test_proxies_leave_no_thread_and_no_descriptor():
    def counts():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = counts()  # other tests' threads may still end
    with pytest.raises(KeyboardInterrupt), LinkProxies(3) as network, linked(network, 1, 2):
        network.cut(1, 2)
        with socket.create_connection(_split(network.seen_by(1)[3]["ha"])):
            raise KeyboardInterrupt
    wait_until(
        lambda: all(now <= then for now, then in zip(counts(), before, strict=True)),
        WAIT_S, lambda: f"threads and descriptors: {counts()}, before {before}",
    )  # fmt: skip


def test_without_the_tools_there_are_proxies_and_a_reason(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("HASTORE_TEST_NETWORK", raising=False)
    with open_network(2) as network:
        assert isinstance(network, LinkProxies)
    said = capsys.readouterr().out
    assert "using proxies instead" in said and "unshare" in said
    with pytest.raises(OSError):
        open_network(2, "namespaces")


def test_a_failure_half_way_ends_the_namespaces_that_were_made(monkeypatch):
    begun = []

    def hold(self, number):
        if len(begun) == 2:
            raise PermissionError("no more namespaces")
        pipe = subprocess.PIPE
        begun.append(subprocess.Popen(["cat"], stdin=pipe, stdout=pipe))
        self._holders[number] = begun[-1]

    monkeypatch.setattr(Namespaces, "_hold", hold)
    with open_network(3) as network:
        assert isinstance(network, LinkProxies)
    assert [holder.returncode for holder in begun] == [0, 0]


KILLED = """
import signal, sys, time
from tests.process.networks import open_network
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
with open_network(2) as network:
    print(network.name, *(holder.pid for holder in getattr(network, "_holders", {}).values()))
    sys.stdout.flush()
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing_behind(number):
    before = _namespace()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as run:
        lines = iter(lambda: run.stdout.readline().decode().split(), [])
        words = next(line for line in lines if line[0] in ("namespaces", "proxies"))
        run.send_signal(number)
        run.wait(WAIT_S)
    assert run.returncode != 0
    assert len(words) in (1, 4)
    for pid in words[1:]:
        # The process ends with its pipe; the kernel then removes the namespace and its interfaces.
        gone = pathlib.Path(f"/proc/{pid}")
        wait_until(lambda gone=gone: not gone.exists(), WAIT_S, f"process {pid} is left")
    assert _namespace() == before


def test_the_clients_return_to_their_own_namespace():
    before = _namespace()
    with pytest.raises(KeyboardInterrupt), open_network(2) as network:
        assert (_namespace() != before) == isinstance(network, Namespaces)
        raise KeyboardInterrupt
    assert _namespace() == before
