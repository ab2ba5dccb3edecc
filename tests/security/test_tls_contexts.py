"""TlsContexts: files that are wrong, and files that change while they are in use."""

import datetime
import logging
import os
import pathlib

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ConfigError
from hastore.security import tls_contexts
from hastore.security.tls_contexts import SHARED_MAX, TlsContexts, TlsFiles, shared_contexts
from hastore.security.tls_engine import NodeName, TlsEngine, parse_node_uri
from tests.security.pki import NODE_1, NODE_2, Pki, now


class Time:
    def __init__(self):
        self.ms = 0.0
        self.wall = int(now().timestamp() * 1000)

    def monotonic_ms(self):
        return self.ms

    def wall_ms(self):
        return self.wall


@pytest.fixture
def pki(tmp_path):
    return Pki(tmp_path / "pki")


def test_a_node_name_is_a_uri():
    assert NODE_1.uri == "hastore:node/demo/g0/1"
    assert parse_node_uri(NODE_1.uri) == NODE_1
    for bad in ("hastore:node/demo/g0/0", "hastore:node/demo/g0/65536", "hastore:node/demo/g0/01",
                "hastore:node/demo/g0/1/", "hastore:node/de mo/g0/1", "hastore:node//g0/1",
                "http://hastore:node/demo/g0/1", NODE_1.uri + "\n"):  # fmt: skip
        assert parse_node_uri(bad) is None, bad


def refusal(files, node=NODE_1):
    with pytest.raises(ConfigError) as error:
        TlsContexts(files, node=node)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_each_wrong_file_is_named_with_what_to_do(pki, tmp_path):
    good = pki.node()
    TlsContexts(good, node=NODE_1)
    missing = str(tmp_path / "none")
    assert f"{missing}: cannot be read" in refusal(TlsFiles(missing, good.certificate, good.key))
    assert f"{missing}: cannot be read" in refusal(TlsFiles(pki.ca, missing, good.key))
    assert f"{missing}: cannot be read" in refusal(TlsFiles(pki.ca, good.certificate, missing))
    assert "is not a file" in refusal(TlsFiles(str(tmp_path), good.certificate, good.key))
    assert "is not a CA's certificate" in refusal(TlsFiles(good.key, good.certificate, good.key))
    assert "are not a certificate and its key" in refusal(TlsFiles(pki.ca, good.key, good.key))
    other = pki.node(NODE_2)
    text = refusal(TlsFiles(pki.ca, good.certificate, other.key))
    assert f"{other.key}: is not the key of {good.certificate}" in text
    for path in (pki.ca, good.certificate):
        os.chmod(path, 0o646)
        assert refusal(good) == f"{path}: can be changed by other users; run chmod o-w {path}"
        os.chmod(path, 0o644)
    os.chmod(good.key, 0o640)
    assert f"{good.key}: is open to other users; run chmod 600 {good.key}" == refusal(good)


def test_an_encrypted_key_does_not_ask_on_the_terminal(pki):
    from cryptography.hazmat.primitives import serialization

    good = pki.node()
    with open(good.key, "rb") as file:
        key = serialization.load_pem_private_key(file.read(), None)
    with open(good.key, "wb") as file:
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret word"),
            )
        )
    assert f"{good.key}: is encrypted with a password" in refusal(good)


def test_a_certificate_that_is_not_this_nodes_is_refused_at_once(pki, tmp_path):
    assert "is that of demo/g0 node 2, not that of demo/g0 node 1" in refusal(pki.node(NODE_2))
    assert "is that of demo/g1 node 1" in refusal(pki.node(NodeName("demo", "g1", 1)))
    assert "client" in refusal(pki.client())
    day_ago = now() - datetime.timedelta(days=2)
    assert "has expired" in refusal(pki.node(days=1, made=day_ago))
    later = now() + datetime.timedelta(days=2)
    assert "is not valid yet" in refusal(pki.node(made=later))
    foreign = Pki(tmp_path / "other").node()
    text = refusal(TlsFiles(pki.ca, foreign.certificate, foreign.key))
    assert "is not signed by the CA" in text


def serial(contexts):
    """Return what tells the certificate that a server shows from another: its end."""
    caller = TlsEngine(contexts.node_client(), server_side=False)
    called = TlsEngine(contexts.server(require_certificate=True), server_side=True)
    for _ in range(4):
        called.receive(caller.take_outgoing())
        caller.receive(called.take_outgoing())
    return caller.peer.not_after_s


def test_new_files_count_without_a_restart_and_bad_ones_do_not(pki, caplog):
    caplog.set_level(logging.INFO)
    clock = Time()
    contexts = TlsContexts(pki.node(days=30), node=NODE_1, clock=clock)
    first = serial(contexts)
    pki.node(days=60)
    assert serial(contexts) == first  # the files are not looked at for each use
    clock.ms += 2_000
    second = serial(contexts)
    assert second > first and contexts.problems() == []

    pki.node(NODE_2, stem="node1")  # another node's files in place of this one's
    clock.ms += 2_000
    assert serial(contexts) == second
    (problem,) = contexts.problems()
    assert "stays in force" in problem and "not that of demo/g0 node 1" in problem
    clock.ms += 10_000
    assert serial(contexts) == second
    assert caplog.text.count("stays in force") == 1

    pki.node(days=70)
    with pytest.MonkeyPatch.context() as early:  # the same files are valid a little later

        def check(*_given):
            raise ConfigError("node1.pem: is not valid yet")

        early.setattr(contexts, "_check_own", check)
        clock.ms += 2_000
        assert serial(contexts) == second and "is not valid yet" in contexts.problems()[0]
    clock.ms += 2_000
    assert serial(contexts) == second
    clock.ms += 60_000
    third = serial(contexts)
    assert third > second and contexts.problems() == []
    second = third

    pki.node(days=75)
    os.chmod(contexts.files.key, 0o640)
    clock.ms += 2_000
    assert serial(contexts) == second
    assert "run chmod 600" in contexts.problems()[0]

    os.remove(contexts.files.key)
    clock.ms += 2_000
    assert serial(contexts) == second
    assert "node1.key: cannot be read" in contexts.problems()[0]
    pki.node(days=90)
    clock.ms += 2_000
    assert serial(contexts) > second and contexts.problems() == []


def test_the_ends_of_both_certificates_are_told(pki):
    contexts = TlsContexts(pki.node(days=20), node=NODE_1)
    ends_ms, now_ms = contexts.ends_ms(), SYSTEM_CLOCK.wall_ms()
    assert set(ends_ms) == {"node", "ca"}
    assert 19 * 86_400_000 < ends_ms["node"] - now_ms <= 20 * 86_400_000
    assert ends_ms["ca"] > now_ms


def test_an_end_that_comes_near_is_a_problem_of_the_status(pki):
    clock = Time()
    contexts = TlsContexts(pki.node(days=20), node=NODE_1, clock=clock)
    assert contexts.problems() == []
    clock.wall += 10 * 86_400_000
    assert "node1.pem expires in 2" in contexts.problems()[0]
    clock.wall += 20 * 86_400_000
    assert "node1.pem has expired" in contexts.problems()[0]


def test_a_clock_that_goes_back_is_a_problem_of_the_status(pki):
    """Both ends then refuse every certificate, and no link is made."""
    clock = Time()
    contexts = TlsContexts(pki.node(), node=NODE_1, clock=clock)
    clock.wall -= 86_400_000
    (problem,) = contexts.problems()
    assert "node1.pem is not valid yet by this machine's clock" in problem


def test_the_end_of_a_client_certificate_is_a_problem_only_if_it_is_watched(pki, tmp_path):
    """A node is a client of ZooKeeper, whose CA may have signed neither end's certificate."""
    clock, files = Time(), pki.client(days=20)
    foreign = TlsFiles(Pki(tmp_path / "other", days=30).ca, files.certificate, files.key)
    contexts = TlsContexts(foreign, watched=True, clock=clock)
    assert contexts.problems() == [] and set(contexts.ends_ms()) == {"node", "ca"}
    clock.wall += 10 * 86_400_000
    (problem,) = contexts.problems()
    assert "client-producer.pem expires in 2" in problem
    assert TlsContexts(files, clock=clock).problems() == []
    late = now() - datetime.timedelta(days=2)
    expired = TlsContexts(pki.client(days=1, made=late), watched=True)
    assert "client-producer.pem has expired" in expired.problems()[0]
    clock.wall += 15 * 86_400_000
    assert "ca.pem itself expires" in TlsContexts(
        TlsFiles(foreign.ca), watched=True, clock=clock
    ).problems()[0]


@pytest.mark.parametrize("outlives", [False, True])
def test_a_ca_that_ends_is_not_a_certificate_to_renew(tmp_path, outlives):
    """A certificate of hastore ends with its CA, one of other tools perhaps later."""
    clock, pki = Time(), Pki(tmp_path / "pki", days=20)
    files = pki.node()
    if outlives:
        files = pki.node(days=40, beyond_the_ca=True)
    contexts = TlsContexts(files, node=NODE_1, clock=clock)
    assert contexts.problems() == []
    clock.wall += 10 * 86_400_000
    (problem,) = contexts.problems()
    assert "ca.pem itself expires in 2" in problem and "replace the CA in three steps" in problem
    assert "renew" not in problem
    clock.wall += 10 * 86_400_000
    assert "ca.pem itself has expired" in contexts.problems()[0]


@pytest.mark.parametrize("alike", [False, True])
def test_a_certificate_ends_with_the_one_of_two_cas_that_has_signed_it(tmp_path, alike):
    """While a CA is replaced, a certificate of other tools may be forgotten, and outlive the old
    one: the status had no problem, and from its end on no link could be made.
    """
    clock, old = Time(), Pki(tmp_path / "old", days=20)
    new = Pki(tmp_path / "new", name="test CA" if alike else "another CA")
    files = old.node(days=365, beyond_the_ca=True)
    both = tmp_path / "both.pem"
    both.write_bytes(pathlib.Path(old.ca).read_bytes() + pathlib.Path(new.ca).read_bytes())
    contexts = TlsContexts(TlsFiles(str(both), files.certificate, files.key), node=NODE_1,
                           clock=clock)  # fmt: skip
    assert contexts.problems() == []
    clock.wall += 10 * 86_400_000
    (problem,) = contexts.problems()
    assert "node1.pem expires in 2" in problem and "with the CA that has signed it" in problem
    assert contexts.ends_ms()["node"] - clock.wall < 11 * 86_400_000
    clock.wall += 11 * 86_400_000
    assert "node1.pem has expired, with the CA that has signed it" in contexts.problems()[0]
    fresh = new.node(days=365)
    for before, after in ((files.certificate, fresh.certificate), (files.key, fresh.key)):
        os.replace(after, before)
    clock.ms += 2_000
    clock.wall -= 21 * 86_400_000
    assert contexts.problems() == []
    clock.wall += 21 * 86_400_000
    assert contexts.problems() == []


def test_a_server_needs_a_certificate(pki):
    with pytest.raises(ConfigError, match="needs a certificate"):
        TlsContexts(TlsFiles(pki.ca)).server(require_certificate=False)


def test_clients_with_the_same_files_share_their_contexts(pki):
    files = pki.client("shop")
    first = shared_contexts(files)
    assert shared_contexts(TlsFiles(files.ca, files.certificate, files.key)) is first
    assert shared_contexts(TlsFiles(files.ca)) is not first
    pki.client("shop")  # anew, in the same files
    second = shared_contexts(files)
    assert second is not first and shared_contexts(files) is second
    os.chmod(files.key, 0o644)  # a new client is refused, as if it were the first
    with pytest.raises(ConfigError, match="is open to other users"):
        shared_contexts(files)
    os.chmod(files.key, 0o600)
    for number in range(2 * SHARED_MAX):
        shared_contexts(pki.client(f"client-{number}"))
    assert len(tls_contexts._shared) <= SHARED_MAX
    child = os.fork()
    if not child:
        os._exit(bool(tls_contexts._shared))
    assert os.waitpid(child, 0)[1] == 0
