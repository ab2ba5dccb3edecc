"""The ports of a node, bound to all addresses of a machine, or to a name."""

import contextlib
import queue
import socket

import pytest

from hastore.ha.hello.accepting import AcceptSocketService
from hastore.listeners import listen
from hastore.server import http_server
from hastore.server.api import server as api_server
from hastore.service import raise_failure

NAME = "node.example"
WAIT_S = 60.0
V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
LISTENS = {
    "api": lambda host: api_server._listen(f"tcp://{host}:0"),
    "http": lambda host: http_server._listen(f"{host}:0"),
}


def has_ipv6():
    try:
        with contextlib.closing(socket.socket(socket.AF_INET6)) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@contextlib.contextmanager
def accepting(address):
    """Yield the bound address of an HA port, and the queue of the callers' addresses."""
    called = queue.SimpleQueue()

    def take(sock, peer):
        sock.close()
        called.put(peer)

    service = AcceptSocketService(take, on_failure=raise_failure)
    bound = service.bind(address)
    service.start()
    try:
        yield bound, called
    finally:
        service.stop()


@needs_ipv6
def test_an_ha_port_on_all_addresses_takes_callers_of_both_families():
    """It took those of IPv6 only, unlike the other ports: no slave over IPv4 could follow."""
    with accepting("[::]:0") as (bound, called):
        port = int(bound.rpartition(":")[2])
        assert bound == f"[::]:{port}"
        for host, seen in (("127.0.0.1", "127.0.0.1"), ("::1", "::1")):
            with socket.create_connection((host, port), WAIT_S) as caller:
                assert called.get(timeout=WAIT_S) == f"{seen}:{caller.getsockname()[1]}"


@needs_ipv6
@pytest.mark.parametrize("port", LISTENS)
def test_the_other_ports_take_both_families_too(port):
    with LISTENS[port]("[::]") as listener:
        number = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, number), WAIT_S).close()


@needs_ipv6
def test_a_name_that_has_an_ipv6_address_only(monkeypatch):
    """The ports for nodes and for HTTP could not be bound to it."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [V6])
    with listen(NAME, 0, 1) as listener:
        assert listener.getsockname()[0] == "::1"
    with LISTENS["http"](NAME) as listener:
        assert listener.getsockname()[0] == "::1"
    service = AcceptSocketService(lambda *_: None, on_failure=raise_failure)
    assert service.bind(f"{NAME}:0").startswith(f"{NAME}:")
    service.stop()


@pytest.mark.parametrize("ipv4_first", [True, False])
def test_the_order_of_a_name_with_both(monkeypatch, ipv4_first):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [V6, V4])
    with listen(NAME, 0, 1, ipv4_first=ipv4_first) as listener:
        families = (socket.AF_INET,) if ipv4_first or not has_ipv6() else (socket.AF_INET6,)
        assert listener.family in families


def test_a_name_without_an_address_that_can_be_bound(monkeypatch):
    elsewhere = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere])
    with pytest.raises(OSError, match="assign"):
        listen(NAME, 0, 1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    with pytest.raises(OSError, match="no address"):
        listen(NAME, 0, 1)
