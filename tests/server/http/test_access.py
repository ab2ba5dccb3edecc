"""Who may read /status and /metrics on a node with identities, and how others are refused."""

import base64
import random
import secrets
import socket

import pytest

from hastore.clock import SYSTEM_CLOCK, SystemClock
from hastore.security import identities
from hastore.security.identities import ALL_PER_S, Identities
from hastore.security.identity import Identity
from hastore.security.identity_editor import IdentityEditor
from hastore.server import http_server
from hastore.server.http_server import WAIT_MS, HttpAccess, HttpServer
from hastore.service import raise_failure
from tests.ha.nodes import wait_for
from tests.server.http.kit import serve

KEY = secrets.token_hex(32)


@pytest.fixture
def ids(tmp_path):
    path = str(tmp_path / "ids.yaml")
    editor = IdentityEditor(path, create=True)
    editor.add(Identity("prometheus"), KEY, 0)
    editor.save()
    editor = IdentityEditor(path)
    editor.add(Identity("ops", by_certificate=True), None, 0)
    editor.save()
    return path


@pytest.fixture
def noted():
    return []


@pytest.fixture
def checks(monkeypatch):
    """The keys that were derived, which is what costs."""
    seen = []
    real = identities.verifies

    def verifies(key, credentials):
        seen.append(key)
        return real(key, credentials)

    monkeypatch.setattr(identities, "verifies", verifies)
    return seen


@pytest.fixture
def access(ids, noted):
    def note(action, **fields):
        noted.append((action, fields))

    return HttpAccess(Identities(ids), note, SYSTEM_CLOCK)


class Clock(SystemClock):
    """A clock that the test sets forward."""

    now_ms = 0.0

    def monotonic_ms(self):
        return self.now_ms


@pytest.fixture
def paced(ids):
    """A server, and the clock that counts its checks of keys."""
    clock = Clock()
    access = HttpAccess(Identities(ids), lambda _action, **_fields: None, clock)
    server = serve(
        "127.0.0.1:0", lambda: {"node": 1}, lambda: b"m\n", access=access, clock=clock
    )
    server.start()
    yield server, clock
    assert server.stop(60)


@pytest.fixture
def server(access):
    server = serve("127.0.0.1:0", lambda: {"node": 1}, lambda: b"m\n", access=access)
    server.start()
    yield server
    assert server.stop(60)


def ask(server, path, *headers):
    """Return the code, the headers and the body of the answer."""
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = "".join(f"{one}\r\n" for one in headers)
        client.sendall(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
        received = b""
        while piece := client.recv(65536):
            received += piece
    head, _, body = received.decode().partition("\r\n\r\n")
    return int(head.split()[1]), head, body


def basic(text):
    return "Authorization: Basic " + base64.b64encode(text.encode()).decode()


def test_healthz_is_open_and_everything_else_needs_a_proof(server, noted):
    assert ask(server, "/healthz")[0] == 200 and noted == []
    for path in ("/status", "/metrics", "/", "/healthz/../status", "/healthz%2f", "//healthz"):
        code, head, body = ask(server, path)
        assert code == 401 and "WWW-Authenticate: Bearer" in head and "NAME:KEY" in body
    action, fields = noted[0]
    assert action == "http" and fields["outcome"] == "refused"
    assert fields["address"].startswith("127.0.0.1:")


def test_probes_are_open_and_do_not_say_why(access, noted):
    server = serve(
        "127.0.0.1:0", lambda: {"node": 1}, lambda: b"m\n",
        access=access, not_master=lambda: "node 2, 10.0.0.2:10911, is the master",
    )  # fmt: skip
    server.start()
    try:
        assert ask(server, "/readyz")[::2] == (200, "ok\n")
        assert ask(server, "/master")[::2] == (503, "no; /status says why\n")
        assert ask(server, "/master/")[0] == 401 and len(noted) == 1
    finally:
        assert server.stop(60)


def test_a_token_of_any_identity_opens_status_and_metrics(server):
    for header in (
        f"Authorization: Bearer prometheus:{KEY}",
        f"authorization:   bearer   prometheus:{KEY}  ",
        basic(f"prometheus:{KEY}"),
    ):
        assert ask(server, "/status", header)[0] == 200
        assert ask(server, "/metrics", header)[2] == "m\n"
    assert ask(server, "/nothing", basic(f"prometheus:{KEY}"))[0] == 404


def test_the_metrics_are_those_of_the_identity_that_asks(access):
    """They name topics and groups, which are not for everybody (NodeMetrics)."""
    asked = []
    server = HttpServer(
        "127.0.0.1:0", lambda: {}, lambda whose: asked.append(whose) or b"m\n", access=access,
        not_ready=lambda: None, not_master=lambda: None, on_failure=raise_failure,
    )  # fmt: skip
    server.start()
    try:
        assert ask(server, "/metrics", f"Authorization: Bearer prometheus:{KEY}")[0] == 200
    finally:
        assert server.stop(60)
    assert [one.name for one in asked] == ["prometheus"]


def test_wrong_tokens_are_refused_and_shown_nowhere(server, noted, caplog):
    good = f"Authorization: Bearer prometheus:{KEY}"
    wrong = secrets.token_hex(32)
    for headers in (
        (f"Authorization: Bearer prometheus:{wrong}",),
        (f"Authorization: Bearer nobody:{KEY}",),
        (f"Authorization: Digest prometheus:{KEY}",),
        (f"Authorization: {KEY}",),
        ("Authorization:",),
        ("Authorization: Basic !!!",),
        ("Authorization: Basic /////w==",),
        (basic(f"prometheus:{wrong}"),),
        (good, good),
        (good.replace("prometheus", "prom\x01"),),
    ):
        code, head, body = ask(server, "/status", *headers)
        assert code in (400, 401, 429), (headers, code)
        assert KEY not in head + body and wrong not in head + body
    assert KEY not in repr(noted) + caplog.text and wrong not in repr(noted) + caplog.text
    assert noted[0][1]["identity"] == "prometheus"


def test_a_flood_of_wrong_tokens_is_told_to_wait_and_hinders_no_known_token(server, monkeypatch):
    monkeypatch.setattr(http_server, "WAIT_MS", 0.0)
    good = f"Authorization: Bearer prometheus:{KEY}"
    assert ask(server, "/status", good)[0] == 200
    codes = []
    for number in range(60):
        codes.append(ask(server, "/status", f"Authorization: Bearer prometheus:{number:064x}")[0])
        assert ask(server, "/status", good)[0] == 200
    assert set(codes) <= {401, 429} and 429 in codes


def begin(server, source, token):
    """Send a request from a host, and do not wait for its answer."""
    host, port = server.address.rsplit(":", 1)
    client = socket.create_connection((host, int(port)), 60, (source, 0))
    client.sendall(f"GET /status HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    return client


def code(client):
    received = b""
    while piece := client.recv(65536):
        received += piece
    client.close()
    return int(received.split()[1])


def waiting(server):
    """How many requests wait for the check of their token."""
    return sum(one.waiting is not None for one in list(server._connections.values()))


@pytest.mark.parametrize("sources", [("127.0.0.2",), [f"127.0.1.{n}" for n in range(1, 31)]])
def test_wrong_tokens_of_other_hosts_keep_no_right_one_out(paced, checks, sources):
    """Though it was never seen before, and they came first: all keys of this second were checked.

    It has its turn once its source is the one with the fewest, so after as many checks as there are
    other sources.
    """
    server, clock = paced
    flood = [begin(server, sources[n % len(sources)], f"prometheus:{n:064x}") for n in range(50)]
    wait_for(lambda: len(checks) == ALL_PER_S and waiting(server) == 50 - ALL_PER_S)
    mine = begin(server, "127.0.0.9", f"prometheus:{KEY}")
    wait_for(lambda: waiting(server) == 51 - ALL_PER_S)
    clock.now_ms += 1_000
    assert code(mine) == 200
    assert checks.index(KEY) <= ALL_PER_S + len(sources)
    for one in flood:
        one.close()


def test_hosts_that_come_back_at_once_do_not_get_ahead_of_one_that_waits(
    paced, checks, monkeypatch
):
    """The flood's hosts win each draw; whose request was checked a second ago comes later."""
    server, clock = paced
    monkeypatch.setattr(random, "choice", max_of)
    hosts = [f"127.0.1.{n}" for n in range(1, 31)]
    flood = [begin(server, host, f"prometheus:{n:064x}") for n, host in enumerate(hosts)]
    wait_for(lambda: len(checks) == ALL_PER_S and waiting(server) == 30 - ALL_PER_S)
    mine = begin(server, "127.0.0.9", f"prometheus:{KEY}")
    flood += [begin(server, host, f"prometheus:{n:063x}f") for n, host in enumerate(hosts)]
    wait_for(lambda: waiting(server) == 61 - ALL_PER_S)
    clock.now_ms += 1_000
    wait_for(lambda: len(checks) == 2 * ALL_PER_S)
    assert code(mine) == 200
    for one in flood:
        one.close()


def max_of(sequence):
    """What is greatest among hosts, and the first of connections."""
    return max(sequence) if isinstance(sequence[0], str) else sequence[0]


def test_wrong_tokens_of_the_same_host_keep_no_right_one_out(paced, checks):
    """Each waits for its turn, instead of being told to come again while others are checked."""
    server, clock = paced
    flood = [begin(server, "127.0.0.1", f"prometheus:{n:064x}") for n in range(30)]
    wait_for(lambda: len(checks) == ALL_PER_S and waiting(server) == 30 - ALL_PER_S)
    mine = begin(server, "127.0.0.1", f"prometheus:{KEY}")
    wait_for(lambda: waiting(server) == 31 - ALL_PER_S)
    clock.now_ms += 1_000
    assert code(mine) == 200
    assert {code(one) for one in flood} == {401} and len(checks) == 31


def test_who_waits_for_a_check_and_leaves_costs_none(paced, checks):
    server, clock = paced
    flood = [begin(server, "127.0.0.1", f"prometheus:{n:064x}") for n in range(40)]
    wait_for(lambda: waiting(server) == 40 - ALL_PER_S)
    for one in flood:
        one.close()
    wait_for(lambda: not server._connections, "the end of the flood")
    clock.now_ms += 1_000
    assert code(begin(server, "127.0.0.1", f"prometheus:{KEY}")) == 200
    assert len(checks) == ALL_PER_S + 1


def test_who_waits_too_long_is_told_to_come_again(paced, checks):
    server, clock = paced
    flood = [begin(server, "127.0.0.1", f"prometheus:{n:064x}") for n in range(ALL_PER_S + 5)]
    wait_for(lambda: len(checks) == ALL_PER_S and waiting(server) == 5)
    server._access._tokens._since_ms = clock.now_ms + WAIT_MS  # others use up what may be checked
    clock.now_ms += WAIT_MS
    codes = [code(one) for one in flood]
    assert codes.count(401) == ALL_PER_S and codes.count(429) == 5


def test_a_token_goes_over_tls_or_loopback_only(access, noted):
    bearer = f"Bearer prometheus:{KEY}".encode()
    for address in ("127.0.0.1:1", "[::1]:1", "127.9.9.9:1", "[::ffff:127.0.0.1]:1"):
        assert access.refusal(b"/status", bearer, address) is None
    for address in ("10.0.0.7:1", "[2001:db8::1]:1", "[::ffff:10.0.0.7]:1"):
        refused = access.refusal(b"/status", bearer, address)
        assert refused.code == 403 and b"over TLS only" in refused.text
        assert access.refusal(b"/status", bearer, address, encrypted=True) is None
        assert access.refusal(b"/healthz", None, address) is None
    assert [fields["reason"] for _, fields in noted] == ["a token in the clear"] * 3


def test_a_certificate_of_an_identity_needs_no_token(access, noted):
    def ask(name, authorization=None):
        return access.refusal(
            b"/status", authorization, "10.0.0.7:1", encrypted=True, common_name=name
        )

    assert ask("ops") is None and noted == []
    for name in ("prometheus", "OPS", "nobody", "", "ops\0"):
        assert ask(name).code == 401
    assert ask("nobody", f"Bearer prometheus:{KEY}".encode()) is None
    assert noted[0][1]["identity"] == "certificate prometheus"
