"""The identities of a node: read again when the file changes, and who may still be who it was."""

import os
import secrets
import threading
import time

import pytest

import hastore.security.identities as identities_module
from hastore.errors import AuthenticationError, ConfigError
from hastore.security.identities import CHECK_MS, LARGE_BYTES, SETTLE_MS, Changes, Identities
from hastore.security.identity_file import format_time, parse_identities
from hastore.security.scram import ScramClient
from hastore.service import raise_failure

WAIT_S = 60


@pytest.fixture
def path(tmp_path):
    return tmp_path / "identities.yaml"


def prove(identities, name, key):
    ours, theirs = ScramClient(name, key, secrets.token_urlsafe(18)), identities.exchange()
    ours.finish(theirs.prove(ours.final(theirs.challenge(ours.first()))))
    return identities.proved(theirs)


def opened(path, clock):
    seen = []
    return Identities(str(path), clock=clock, on_change=seen.append), seen


def test_a_client_proves_its_key_and_gets_its_rights(path, clock, content, key):
    content.add("orders", key, produce="[orders]").write(path)
    identities, _ = opened(path, clock)
    proof = prove(identities, "orders", key)
    assert proof.identity.name == "orders" and proof.identity.may_produce("orders")
    assert identities.still(proof) == proof
    assert identities.by_certificate("orders") is None  # the file does not say so
    with pytest.raises(AuthenticationError, match="proved nothing"):
        identities.proved(identities.exchange())
    for name, wrong in (("orders", secrets.token_hex(32)), ("nobody", key)):
        with pytest.raises(AuthenticationError, match="unknown here or has another key"):
            prove(identities, name, wrong)


def test_nodes_with_the_same_identities_have_the_same_checksum(path, tmp_path, clock, content, key):
    content.add("orders", key, produce="[orders]").add("ops", key).write(path)
    identities, _ = opened(path, clock)
    before, other = identities.checksum, tmp_path / "other.yaml"
    assert identities.count == 2
    content.write(other)
    assert opened(other, clock)[0].checksum == before
    content.drop("ops").write(path)
    clock.pass_ms(CHECK_MS)
    identities.refresh()
    assert identities.checksum != before and identities.count == 1
    content.add("ops", key).write(path)
    clock.pass_ms(CHECK_MS)
    identities.refresh()
    assert identities.checksum == before


def test_a_revoked_identity_is_told_and_ends(path, clock, content, key):
    content.add("orders", key).add("ops", key, admin="true").write(path)
    identities, seen = opened(path, clock)
    proof, other = prove(identities, "orders", key), prove(identities, "ops", key)
    content.drop("orders").add("fresh", key).write(path)
    version = identities.version
    assert identities.refresh() == version and not seen  # not within the second
    clock.pass_ms(CHECK_MS)
    assert identities.refresh() == version + 1
    assert seen == [Changes(added=("fresh",), revoked=("orders",))]
    assert identities.still(proof) is None and identities.still(other) == other
    with pytest.raises(AuthenticationError, match="unknown here"):
        prove(identities, "orders", key)


def test_a_new_key_counts_at_once_and_a_revoked_one_no_more(path, clock, content, key):
    content.add("ops", key).write(path)
    identities, seen = opened(path, clock)
    for number in range(3):
        content.add("ops", *(secrets.token_hex(32) for _ in range(2)), key).add(f"n{number}", key)
        content.write(path)
        assert prove(identities, f"n{number}", key)
    content.drop("ops").write(path)
    with pytest.raises(AuthenticationError):
        prove(identities, "ops", key)
    content.add("cert", certificate="true").write(path)
    assert identities.by_certificate("cert") and len(seen) == 5


def test_changed_rights_reach_who_is_connected(path, clock, content, key):
    content.add("orders", key, produce="[a]").write(path)
    identities, seen = opened(path, clock)
    proof = prove(identities, "orders", key)
    content.add("orders", key, produce="[b]").write(path)
    clock.pass_ms(CHECK_MS)
    identities.refresh()
    now = identities.still(proof)
    assert now.identity.may_produce("b") and not now.identity.may_produce("a")
    assert seen == [Changes(changed=("orders",))]


def test_a_rotated_key_counts_until_its_end(path, clock, content, key):
    new = secrets.token_hex(32)
    until = {key: format_time(clock.wall + 5_000)}
    content.add("orders", key, new, until=until).write(path)
    identities, seen = opened(path, clock)
    by_old, by_new = prove(identities, "orders", key), prove(identities, "orders", new)
    version = identities.version
    clock.pass_ms(4_000)
    assert identities.refresh() == version and identities.still(by_old) is not None
    clock.pass_ms(1_000)
    assert identities.refresh() == version + 1 and seen == [Changes(changed=("orders",))]
    assert identities.still(by_old) is None and identities.still(by_new) is not None
    with pytest.raises(AuthenticationError):
        prove(identities, "orders", key)
    prove(identities, "orders", new)
    clock.pass_ms(60_000)
    assert identities.refresh() == version + 1  # once


def test_a_key_that_is_revoked_between_challenge_and_proof_is_refused(path, clock, content, key):
    new = secrets.token_hex(32)
    content.add("orders", key).write(path)
    identities, _ = opened(path, clock)
    ours, theirs = ScramClient("orders", key, "n" * 18), identities.exchange()
    challenge = theirs.challenge(ours.first())
    content.add("orders", new).write(path)
    clock.pass_ms(CHECK_MS)
    identities.refresh()
    theirs.prove(ours.final(challenge))
    with pytest.raises(AuthenticationError, match="the key of identity orders was revoked"):
        identities.proved(theirs)


def test_a_certificate_proves_only_whom_the_file_names(path, clock, content, key):
    content.add("node", certificate="true", consume='["*"]').add("orders", key).write(path)
    identities, _ = opened(path, clock)
    proof = identities.by_certificate("node")
    assert proof.identity.may_consume("x") and proof.verifier is None
    for name in ("orders", "nobody", "NODE", "node\0", "", "n" * (1 << 20)):
        assert identities.by_certificate(name) is None
    with pytest.raises(AuthenticationError):
        prove(identities, "node", key)
    content.add("node", key, certificate="false").write(path)
    clock.pass_ms(CHECK_MS)
    identities.refresh()
    assert identities.still(proof) is None  # a key now proves it, no certificate


def break_it(kind, path, text):
    if kind == "gone":
        path.unlink()
    elif kind == "open":
        os.chmod(path, 0o644)
    elif kind == "cut":
        path.write_text(text[: len(text) // 2])
    elif kind == "empty":
        path.write_text("")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "huge":
        path.write_bytes(b"#" * (1 << 21))


@pytest.mark.parametrize("kind", ["gone", "open", "cut", "empty", "folder", "huge"])
def test_a_broken_file_keeps_the_last_good_identities(path, clock, content, key, kind):
    content.add("orders", key).add("ops", key, admin="true").write(path)
    identities, seen = opened(path, clock)
    proof = prove(identities, "orders", key)
    break_it(kind, path, content.text())
    for _ in range(3):
        clock.pass_ms(CHECK_MS)
        assert identities.refresh() == 1
    assert identities.problem.startswith(str(path)) and "; " in identities.problem
    assert seen == [Changes(problem=identities.problem)]  # told once
    assert identities.still(proof) == proof and prove(identities, "orders", key)
    with pytest.raises(ConfigError, match="identities.yaml"):
        Identities(str(path))  # but a node does not start with it
    if path.is_dir():
        path.rmdir()
    content.drop("orders").write(path)
    clock.pass_ms(CHECK_MS)
    identities.refresh()
    assert identities.problem is None and identities.still(proof) is None


def test_a_half_written_file_takes_nothing_away(path, clock, content, key):
    """Each prefix of the file is met for less than a second, and some prefixes are valid."""
    other, until = secrets.token_hex(32), format_time(clock.wall + 3_600_000)
    content.add("orders", key, other, until={other: until}, produce="[a, b]")
    content.add("cert", certificate="true").add("ops", key, admin="true")
    path.write_text(content.text())
    os.chmod(path, 0o600)
    identities, seen = opened(path, clock)
    proofs = [prove(identities, name, key) for name in ("orders", "ops")]
    proofs += [prove(identities, "orders", other), identities.by_certificate("cert")]
    whole, valid = content.text(), 0
    for end in range(len(whole)):
        path.write_text(whole[:end])
        clock.pass_ms(CHECK_MS / 2)
        identities.refresh(0)
        identities.refresh(0)
        valid += identities.problem is None
        assert all(identities.still(proof) == proof for proof in proofs), whole[:end]
    assert valid > 5
    path.write_text(whole)
    identities.refresh(0)
    assert identities.problem is None and identities.version == 1
    assert all(changes.problem is not None for changes in seen)


def test_what_is_taken_away_in_place_counts_once_it_has_stayed(path, clock, content, key):
    content.add("orders", key).add("ops", key)
    content.write(path)
    identities, seen = opened(path, clock)
    proof = prove(identities, "orders", key)
    path.write_text(content.drop("orders").text())
    clock.pass_ms(CHECK_MS)
    assert identities.refresh() == 1 and identities.still(proof) is not None
    clock.pass_ms(SETTLE_MS)
    assert identities.refresh() == 2 and identities.still(proof) is None
    assert seen == [Changes(revoked=("orders",))]
    path.write_text(content.add("fresh", key).text())  # what is added counts at once
    assert prove(identities, "fresh", key)
    path.write_text(content.drop("fresh").text())
    identities.refresh(0)
    assert identities.find("fresh")
    content.write(path)  # the same, replaced: it is whole
    identities.refresh(0)
    assert not identities.find("fresh") and len(seen) == 3


def test_another_comment_changes_nothing(path, clock, content, key):
    content.add("orders", key).write(path)
    identities, seen = opened(path, clock)
    for comment in ("# one\n", "# two\n"):
        path.write_text(comment + content.text())
        for _ in range(3):
            clock.pass_ms(CHECK_MS)
            assert identities.refresh() == 1 and identities.problem is None
    assert seen == []


def test_a_file_that_is_not_valid_is_parsed_once(path, clock, content, key, monkeypatch):
    """Each client that begins a proof causes a look, and a large file takes half a second."""
    content.add("orders", key).write(path)
    identities, _ = opened(path, clock)
    path.write_text(content.text() + "more: 1\n")
    with pytest.raises(AuthenticationError):
        prove(identities, "nobody", key)
    assert "more" in identities.problem
    monkeypatch.setattr(identities, "_read", None)
    for _ in range(3):
        assert prove(identities, "orders", key) and "more" in identities.problem


def test_many_threads_may_ask_while_the_file_changes(path, content, key):
    class Always:
        def __init__(self):
            self.count = 0.0

        def monotonic_ms(self):
            self.count += CHECK_MS
            return self.count

        def wall_ms(self):
            return 1_800_000_000_000

    content.add("orders", key).write(path)
    identities, seen = opened(path, Always())
    proof, failures, stop = prove(identities, "orders", key), [], threading.Event()

    def ask():
        while not stop.is_set():
            identities.refresh()
            if identities.still(proof) is None:
                failures.append("lost")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for one in threads:
        one.start()
    for number in range(30):
        content.add(f"more{number}", key)
        temporary = path.with_suffix(".new")
        content.write(temporary)
        os.replace(temporary, path)
    stop.set()
    for one in threads:
        one.join()
    identities.refresh()
    assert failures == [] and identities.problem is None and identities.find("more29") is not None
    added = [name for changes in seen for name in changes.added]
    assert sorted(added) == sorted(f"more{number}" for number in range(30))  # each told once


def test_nothing_shows_what_is_secret(path, clock, content, key):
    content.add("orders", key).write(path)
    identities, _ = opened(path, clock)
    proof = prove(identities, "orders", key)
    shown = repr((identities, proof, identities._state, identities.find("orders")))
    parts = content.entries["orders"].split("$")[-1].split('"')[0].split(":")
    for secret in (key, content.secret, *parts):
        assert secret not in shown and secret[:10] not in shown
    assert "stored_key" not in shown


def test_a_large_file_is_parsed_on_another_thread(path, clock, content, key, monkeypatch):
    """Meanwhile the caller, the thread of the client API, goes on with what is in force."""
    many = LARGE_BYTES // 100
    for number in range(many):
        content.add(f"n{number}", key, produce="[a]")
    content.write(path)
    assert path.stat().st_size >= LARGE_BYTES
    identities, seen = opened(path, clock)
    proof = prove(identities, "n0", key)
    may_parse, parsing, parsed_by = threading.Event(), threading.Event(), []

    def parse(data, name):
        parsed_by.append(threading.current_thread().name)
        parsing.set()
        assert may_parse.wait(WAIT_S)
        return parse_identities(data, name)

    monkeypatch.setattr(identities_module, "parse_identities", parse)
    reader = identities.reader(on_failure=raise_failure)
    reader.start()
    try:
        another = path.with_suffix(".new")
        content.drop("n0").add("fresh", key).write(another)
        another.rename(path)
        version = identities.version
        assert identities.refresh(0) == version
        assert parsing.wait(WAIT_S)
        assert prove(identities, "n1", key) and identities.still(proof) == proof
        may_parse.set()
        while not seen:
            assert reader.alive
            time.sleep(0.01)
        assert prove(identities, "fresh", key) and identities.still(proof) is None
        assert seen == [Changes(added=("fresh",), revoked=("n0",))]
        another.write_bytes(path.read_bytes() + b"what: 1\n")  # not valid
        another.chmod(0o600)
        another.rename(path)  # in one step: the reader looks by itself, and would see half a file
        identities.refresh(0)
        while len(seen) < 2:
            assert reader.alive
            time.sleep(0.01)
        assert "what" in identities.problem and prove(identities, "fresh", key)
        assert set(parsed_by) == {"IdentityReader"}
    finally:
        may_parse.set()
        assert reader.stop(WAIT_S)
    assert len(seen) == 2 and seen[1].problem == identities.problem


def test_a_file_that_replaces_another_counts_at_once_though_it_gets_its_number(
    path, clock, content, key
):
    """A file system gives the number of a removed file to the next one: rotate, then revoke."""
    content.add("shop", key).write(path)
    identities, _ = opened(path, clock)
    another = path.with_suffix(".new")
    for _ in range(10):
        fresh = secrets.token_hex(32)
        for keys in ((key, fresh), (fresh,)):
            content.add("shop", *keys).write(another)
            another.rename(path)
        assert prove(identities, "shop", fresh)
        with pytest.raises(AuthenticationError):
            prove(identities, "shop", key)
        key = fresh


class ByHand:
    """A reader whose thread has parsed nothing until the test says so."""

    def __init__(self, identities):
        self._parse, self._done, self.wanted = identities._parse, {}, None
        identities._reader = self

    def result_of(self, data):
        self.wanted = data
        return self._done.get(data)

    def finish(self, data):
        self._done[data] = self._parse(data)


def of_any_size(identities, monkeypatch):
    monkeypatch.setattr(identities_module, "LARGE_BYTES", 0)
    return ByHand(identities)


def test_what_was_half_written_never_counts_while_the_rest_is_parsed(
    path, clock, content, key, monkeypatch
):
    """A slow copy of a large file: the file never stays the same for SETTLE_MS."""
    content.add("orders", key).add("ops", key)
    content.write(path)
    whole = content.text()
    identities, seen = opened(path, clock)
    reader = of_any_size(identities, monkeypatch)
    half = content.drop("orders").text()
    for comment in range(4):
        path.write_text(half + f"# {comment}\n")
        identities.refresh(0)  # asks for it
        reader.finish(reader.wanted)
        clock.pass_ms(SETTLE_MS / 2)
        identities.refresh(0)  # has it; it must stay the same from now on
    path.write_text(whole + "# the rest\n")
    for _ in range(3):
        clock.pass_ms(SETTLE_MS)
        identities.refresh(0)
        assert identities.find("orders") is not None, "the file says that it is there"
    reader.finish(reader.wanted)
    identities.refresh(0)
    clock.pass_ms(SETTLE_MS)
    identities.refresh(0)
    assert identities.find("orders") is not None and seen == [] and identities.problem is None


def test_a_file_that_is_replaced_and_then_written_in_place_settles(
    path, clock, content, key, monkeypatch
):
    content.add("orders", key).add("ops", key)
    content.write(path)
    identities, _ = opened(path, clock)
    reader = of_any_size(identities, monkeypatch)
    another = path.with_suffix(".new")
    content.add("fresh", key).write(another)
    another.rename(path)
    identities.refresh(0)  # asks for the new file, and it is changed before it is parsed
    path.write_text(content.drop("orders").text())
    identities.refresh(0)
    reader.finish(reader.wanted)
    identities.refresh(0)
    assert identities.find("orders") is not None
    clock.pass_ms(SETTLE_MS)
    identities.refresh(0)
    assert identities.find("orders") is None and identities.find("fresh") is not None


def test_a_problem_stays_until_the_mended_file_is_parsed(path, clock, content, key, monkeypatch):
    content.add("orders", key)
    content.write(path)
    identities, seen = opened(path, clock)
    reader = of_any_size(identities, monkeypatch)
    path.write_text("broken")
    identities.refresh(0)
    reader.finish(reader.wanted)
    identities.refresh(0)
    problem = identities.problem
    assert problem is not None
    path.write_text(content.add("fresh", key).text())
    identities.refresh(0)
    assert identities.problem == problem and len(seen) == 1
    reader.finish(reader.wanted)
    identities.refresh(0)
    assert identities.problem is None and identities.find("fresh") is not None


def test_a_key_ends_at_its_time_after_the_clock_was_set_back(path, clock, content, key):
    """A clock that is a day fast ends the key; set right, the key counts again, until its end."""
    other = secrets.token_hex(32)
    until = {other: format_time(clock.wall + 60_000)}
    content.add("orders", key, other, until=until).write(path)
    identities, _ = opened(path, clock)
    clock.wall += 86_400_000
    clock.pass_ms(CHECK_MS)
    ended = identities.refresh()
    assert ended == 2
    clock.wall -= 86_400_000
    clock.pass_ms(CHECK_MS)
    identities.refresh()
    proof = prove(identities, "orders", other)
    version = identities.version
    clock.pass_ms(60_000)
    assert identities.refresh() == version + 1, "whoever keeps the proof must ask again"
    assert identities.still(proof) is None
