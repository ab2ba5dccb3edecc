"""Tokens NAME:KEY: proved once, remembered, bounded."""

import secrets

import pytest

from hastore.security import identities as module
from hastore.security.identities import (
    ALL_PER_S,
    CHECK_MS,
    MAX_REMEMBERED,
    SOURCE_PER_S,
    Denied,
    Identities,
    Proof,
    Tokens,
)


@pytest.fixture
def checks(monkeypatch):
    """The names of the keys that were derived, which is what costs."""
    seen = []
    real = module.verifies

    def verifies(key, credentials):
        seen.append(key)
        return real(key, credentials)

    monkeypatch.setattr(module, "verifies", verifies)
    return seen


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ids.yaml"


def opened(path, clock):
    return Tokens(Identities(str(path), clock=clock), clock)


def test_a_good_token_costs_once(path, clock, content, key, checks):
    content.add("prometheus", key).write(path)
    tokens = opened(path, clock)
    for _ in range(100):
        proof = tokens.prove(f"prometheus:{key}", "127.0.0.1")
        assert isinstance(proof, Proof) and proof.identity.name == "prometheus"
    assert checks == [key]
    assert key not in repr(vars(tokens))


def test_wrong_tokens_are_refused(path, clock, content, key):
    content.add("prometheus", key).add("cert", certificate="true").write(path)
    tokens = opened(path, clock)
    for wrong in (
        *("", ":", "prometheus", "prometheus:", f":{key}", f"prometheus:{key[:-1]}"),
        *(f"prometheus:{key.upper()}", f"prometheus:{key}\n", f" prometheus:{key}"),
        *(f"prometheus:{key}:{key}", "prometheus:" + "0" * (1 << 20), f"{'n' * 65}:{key}"),
        *(f"prom\0:{key}", f"prom\u0435theus:{key}"),
    ):
        denied = tokens.prove(wrong, "127.0.0.1")
        assert isinstance(denied, Denied) and "not NAME:KEY" in denied.reason
        assert denied.claimed is None and key not in denied.reason
    texts = set()
    for name, other in (("prometheus", "0" * 64), ("nobody", key), ("cert", key)):
        clock.pass_ms(1_000)
        denied = tokens.prove(f"{name}:{other}", "127.0.0.1")
        assert denied.claimed == name and not denied.again and other not in denied.reason
        texts.add(denied.reason.replace(name, "NAME"))
    assert len(texts) == 1  # nobody learns which names there are


def test_a_revoked_key_and_an_ended_key_count_no_longer(path, clock, content, key):
    new = secrets.token_hex(32)
    content.add("a", key).write(path)
    tokens = opened(path, clock)
    assert isinstance(tokens.prove(f"a:{key}", "h"), Proof)
    content.add("a", new).write(path)
    clock.pass_ms(CHECK_MS)
    assert isinstance(tokens.prove(f"a:{key}", "h"), Denied)
    assert isinstance(tokens.prove(f"a:{new}", "h"), Proof)
    content.drop("a").write(path)
    clock.pass_ms(CHECK_MS)
    assert isinstance(tokens.prove(f"a:{new}", "h"), Denied)


def test_a_flood_of_wrong_tokens_costs_a_bounded_number_of_checks(
    path, clock, content, key, checks
):
    content.add("a", key).write(path)
    tokens = opened(path, clock)
    assert isinstance(tokens.prove(f"a:{key}", "good"), Proof)
    for second in range(3):
        clock.pass_ms(1_000)
        del checks[:]
        for number in range(200):
            tokens.prove(f"a:{number:064x}", "one source")
        assert len(checks) == SOURCE_PER_S
        for number in range(500):
            denied = tokens.prove(f"n{number}:{second:064x}", f"source {number}")
        assert len(checks) == ALL_PER_S and denied.again
        assert isinstance(tokens.prove(f"a:{key}", "one source"), Proof)  # remembered: no wait
    assert len(tokens._checked) <= ALL_PER_S + 1


def test_what_is_remembered_is_bounded(path, clock, content, monkeypatch):
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    keys = [secrets.token_hex(32) for _ in range(6)]
    for number, key in enumerate(keys):
        content.add(f"a{number}", key)
    content.write(path)
    tokens = opened(path, clock)
    for _ in range(2):
        for number, key in enumerate(keys):
            clock.pass_ms(1_000)
            assert isinstance(tokens.prove(f"a{number}:{key}", "h"), Proof)
            assert len(tokens._remembered) <= 3 < MAX_REMEMBERED
