"""The HTTP port: its answers, and its bounds against untrusted clients."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ConfigError
from hastore.security.slots import KnownHosts
from hastore.server import http_server
from hastore.server.http_server import MAX_CONNECTIONS
from hastore.server.metrics.from_status import render_metrics
from hastore.service import raise_failure
from tests.ha.nodes import wait_for
from tests.server.http.kit import serve

STATUS = {
    "node": 1,
    "cluster": "demo",
    "group": "g0",
    "mode": "classic",
    "role": "SYNC_MASTER",
    "epoch": 65537,
    "max_offset": 123,
    "writable": True,
    "waiting_puts": 0,
    "forwarding": {
        "waiting": 2,
        "forwarded": 30,
        "received": 4,
        "held": 5,
        "refused": 6,
        "unknown": 7,
    },
    "acl": {"signed": 8, "unproved": 9, "forbidden": 10},
    "quotas": {
        "kept_out": 11,
        "identities": {"shop": {"requests": 12, "bytes": 13, "slowed": 14, "refused": 15}},
    },
    "transactions": {"open": 3, "committed": 20, "rolled_back": 4, "set_aside": 1},
    "delayed": {"waiting": 12, "levels": {"3": 10, "18": 2}, "delivered": 30, "lost": 1},
    "slaves": [
        {"node": 2, "address": "127.0.0.1:5", "ack_offset": 100, "lag_bytes": 23, "in_sync": True}
    ],
}


@pytest.fixture
def server():
    server = serve("127.0.0.1:0", lambda: STATUS, lambda: render_metrics(STATUS))
    server.start()
    yield server
    assert server.stop(60)


def get(server, path):
    with urllib.request.urlopen(f"http://{server.address}{path}", timeout=60) as answer:
        return answer.read()


def exchange(server, data):
    """Send `data` and return everything received."""
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(data)
        received = b""
        while piece := client.recv(65536):
            received += piece
        return received


def test_answers_status_metrics_and_health(server):
    assert json.loads(get(server, "/status")) == STATUS
    assert json.loads(get(server, "/status?x=1")) == STATUS
    assert get(server, "/healthz") == b"ok\n"
    text = get(server, "/metrics").decode()
    for line in (
        "hastore_max_offset{,} 123",
        'hastore_slave_lag_bytes{,slave="2"} 23',
        'hastore_node_info{,mode="classic",role="SYNC_MASTER"} 1',
        "hastore_requests_waiting{,} 2",
        'hastore_delayed_messages{,level="18"} 2',
        'hastore_delayed_messages{,level="3"} 10',
        "hastore_delayed_delivered_total{,} 30",
        "hastore_delayed_lost_total{,} 1",
        "hastore_open_transactions{,} 3",
        'hastore_transactions_total{,ended="committed"} 20',
        'hastore_transactions_total{,ended="set aside"} 1',
        "hastore_requests_forwarded_total{,} 30",
        "hastore_requests_received_total{,} 4",
        "hastore_requests_held_total{,} 5",
        "hastore_requests_unknown_total{,} 7",
    ):
        known = 'cluster="demo",group="g0",node="1"'
        written = line.replace("{,}", f"{{{known}}}").replace("{,", f"{{{known},")
        assert f"{written}\n" in text


def test_an_unknown_path_is_404(server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(server, "/etc/passwd")
    assert refused.value.code == 404
    refused.value.close()


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"POST /status HTTP/1.1\r\n\r\n", 405),
        (b"GET /status HTTP/2.0\r\n\r\n", 400),
        (b"\x80\x04\x95 garbage\r\n\r\n", 400),
        (b"GET /" + b"a" * 513 + b" HTTP/1.1\r\n\r\n", 414),
        (b"x" * 1_000_000, 414),
        (b"GET /status HTTP/1.1\r\n" + b"A: b\r\n" * 2_000, 431),
        (b"GET  HTTP/1.1\r\n\r\n", 404),
    ],
)
def test_bad_requests_are_refused_and_the_server_lives(server, request_bytes, code):
    try:
        answer = exchange(server, request_bytes)
    except ConnectionError:  # the server closed while a megabyte was still being sent
        answer = None
    if answer is not None:
        assert answer.startswith(f"HTTP/1.1 {code} ".encode())
    assert get(server, "/healthz") == b"ok\n"


def test_probes_say_why_not():
    reasons = {"/readyz": None, "/master": "node 2 is the master"}
    server = serve(
        "127.0.0.1:0", lambda: STATUS, lambda: b"",
        not_ready=lambda: reasons["/readyz"], not_master=lambda: reasons["/master"],
    )  # fmt: skip
    server.start()
    try:
        assert get(server, "/readyz") == b"ok\n"
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server, "/master")
        assert (refused.value.code, refused.value.read()) == (503, b"node 2 is the master\n")
        refused.value.close()
        reasons.update({"/readyz": "no link", "/master": None})
        assert exchange(server, b"HEAD /readyz HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503 ")
        assert get(server, "/master") == b"ok\n"
    finally:
        assert server.stop(60)


def test_head_has_no_body(server):
    answer = exchange(server, b"HEAD /status HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\n")


def test_a_request_may_come_one_byte_at_a_time(server):
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as client:
        for byte in b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n":
            client.sendall(bytes([byte]))
        assert b"200 OK" in client.recv(65536)


def test_slow_clients_never_keep_a_quick_one_out(server):
    host, port = server.address.rsplit(":", 1)
    slow = []
    try:
        for _ in range(200):
            client = socket.create_connection((host, int(port)), timeout=60)
            client.sendall(b"G")
            slow.append(client)
        for _ in range(20):
            assert get(server, "/healthz") == b"ok\n"
        assert len(server._connections) <= MAX_CONNECTIONS
    finally:
        for client in slow:
            client.close()


def connect(server, source):
    host, port = server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 60, (source, 0))


def test_a_flood_of_one_host_does_not_end_the_request_of_another(server):
    """Neither is the slow client's request the oldest that goes, nor does it wait for a slot."""
    slow = connect(server, "127.0.0.3")
    slow.sendall(b"GET /healthz HTT")
    wait_for(lambda: len(server._connections) == 1)
    flood = [connect(server, "127.0.0.2") for _ in range(3 * MAX_CONNECTIONS)]
    try:
        assert get(server, "/healthz") == b"ok\n"  # all of the flood before it were accepted
        assert len(server._connections) <= MAX_CONNECTIONS
        slow.sendall(b"P/1.1\r\n\r\n")
        assert b"200 OK" in slow.recv(65536)
    finally:
        for one in (slow, *flood):
            one.close()


def test_hosts_of_the_group_have_slots_of_their_own(monkeypatch):
    hosts = KnownHosts(lambda: ["127.0.0.3:1"], SYSTEM_CLOCK, on_failure=raise_failure)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    server = serve("127.0.0.1:0", lambda: STATUS, lambda: b"", hosts=hosts)
    server.start()
    mine = [connect(server, "127.0.0.3") for _ in range(5)]
    try:
        wait_for(lambda: len(server._connections) == 5)
        strangers = [connect(server, f"127.0.1.{n}") for n in range(1, 9)]
        assert get(server, "/healthz") == b"ok\n"
        assert len(server._connections) <= 7
        for one in mine:
            one.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert b"200 OK" in one.recv(65536)
        for one in (*mine, *strangers):
            one.close()
    finally:
        assert server.stop(60)


def test_a_silent_connection_ends_at_its_deadline():
    server = serve("127.0.0.1:0", lambda: STATUS, lambda: b"", deadline_ms=200)
    server.start()
    try:
        host, port = server.address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=60) as client:
            assert client.recv(1) == b""
    finally:
        assert server.stop(60)


def test_a_client_that_never_closes_costs_no_cpu(server):
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert b"ok" in client.recv(65536)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.15


def test_a_large_answer_arrives_whole():
    body = b"m" * 5_000_000
    server = serve("127.0.0.1:0", lambda: STATUS, lambda: body)
    server.start()
    try:
        assert get(server, "/metrics") == body
    finally:
        assert server.stop(60)


def test_a_failing_node_is_500_and_the_server_lives():
    def fail():
        raise RuntimeError("broken")

    server = serve("127.0.0.1:0", fail, lambda: b"fine")
    server.start()
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server, "/status")
        assert refused.value.code == 500
        refused.value.close()
        assert get(server, "/metrics") == b"fine"
    finally:
        assert server.stop(60)


def test_a_port_in_use_is_refused_with_its_name(server):
    with pytest.raises(ConfigError, match=server.address):
        serve(server.address, lambda: STATUS, lambda: b"")


def test_a_bad_address_is_refused():
    with pytest.raises(ConfigError, match="is not an address"):
        serve("127.0.0.1", lambda: STATUS, lambda: b"")


def test_stop_without_start_frees_the_port():
    before = set(threading.enumerate())
    server = serve("127.0.0.1:0", lambda: STATUS, lambda: b"")
    address = server.address
    assert server.stop(60)
    again = serve(address, lambda: STATUS, lambda: b"")
    assert again.stop(60)
    assert set(threading.enumerate()) <= before


def test_invalid_http_gets_400_and_the_connection_ends(server):
    answer = exchange(server, b"GET /status HTTP/1.1\r\nno colon\r\n\r\nGET /status HTTP/1.1\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert head.endswith(b"\r\nConnection: close")
    assert body == b"this is not a valid HTTP request\n"
    assert get(server, "/healthz") == b"ok\n"
