"""Connecting to a name: its look-up and all of its addresses together have one limit."""

import socket
import threading

import pytest

from hastore.ha.hello import peer

WAIT_S = 60.0
NAME = "slow.example"


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def infos(*hosts):
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]


def test_a_look_up_that_hangs_holds_nobody_up(monkeypatch, listener):
    real, released, looked = socket.getaddrinfo, threading.Event(), []

    def look(host, port, *given, **named):
        if host != NAME:
            return real(host, port, *given, **named)
        looked.append(threading.current_thread())
        assert released.wait(20)
        return infos("127.0.0.1")

    monkeypatch.setattr(socket, "getaddrinfo", look)
    endpoint = NAME, listener.getsockname()[1]
    for _ in range(3):
        with pytest.raises(TimeoutError, match=f"{NAME}.*name server"):
            peer.connect(endpoint, 0.05)
    assert len(looked) == 1 and not released.is_set(), "one look-up is under way, not three"
    released.set()
    looked[0].join(WAIT_S)
    peer.connect(endpoint, WAIT_S).close()
    assert len(looked) == 2, "each is looked up anew"


def test_the_addresses_of_a_name_share_its_time(monkeypatch, listener):
    asked = []

    def connect(endpoint, timeout_s):
        asked.append((endpoint[0], timeout_s))
        if endpoint[0] != "127.0.0.1":
            raise TimeoutError("timed out")
        made = socket.socket()
        made.connect(endpoint)
        return made

    monkeypatch.setattr(socket, "create_connection", connect)
    found = infos("192.0.2.1", "192.0.2.2", "127.0.0.1", "192.0.2.1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    peer.connect((NAME, listener.getsockname()[1]), 30.0).close()
    assert [host for host, _ in asked] == ["192.0.2.1", "192.0.2.2", "127.0.0.1"]
    assert asked[0][1] <= 10.0 and asked[1][1] <= 15.0 and asked[2][1] <= 30.0


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_name_that_no_host_can_have_is_an_error_of_the_connection(host):
    with pytest.raises(OSError, match="is no name of a host"):
        peer.connect((host, 1), WAIT_S)


def test_a_name_that_is_not_known_says_so(monkeypatch):
    def look(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look)
    with pytest.raises(socket.gaierror, match="not known"):
        peer.connect((NAME, 1), WAIT_S)
