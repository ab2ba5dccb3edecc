"""Signatures of RocketMQ's clients: the same as AclClientRPCHook of 4.9.8 and 5.3.3 makes."""

from __future__ import annotations

import random

import pytest

from hastore.security.rocketmq_acl import SIGNATURE_BYTES, sign, signer

SECRET = "0123456789abcdef0123456789abcdef"
# Made by both versions' AclClientRPCHook, which agree.
JAVA = [
    ({}, b"", "7D5sa4xHHHyKIcwuze6M8jieTJI="),
    ({"topic": "Shop", "queueId": "3"}, b"", "0rB9qwMVurD9hQep3tGu/wWJRJs="),
    ({"b": "Größe", "a": "\U0001f34f", "c": ""}, b"\0\1\2\xff", "0At6QA/9i95+PG4H8dCTLHka12U="),
    # By UTF-16 units the first name comes before the second one, by code points behind it.
    ({"\U0001f34f": "1", "～": "2", "Z": "3", "a": "4"}, b"body",
     "pmphhyssIjW8WEOFtwJXuDqWrzw="),
    ({"Signature": "stale", "SecurityToken": "tok", "zone": "x"}, bytes(100_000),
     "qOKnvXBPw22flG5ZlYP9t1hVxa8="),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "body", "signature"), JAVA)
def test_a_signature_is_java_s(fields: dict[str, str], body: bytes, signature: str) -> None:
    given = {**fields, "AccessKey": "shop"}
    assert sign(SECRET, given, body) == signature and len(signature) == SIGNATURE_BYTES
    assert signer([SECRET], given, body, signature) == SECRET
    assert signer(["x" * 32, SECRET], given, body, signature) == SECRET, "one that is rotated in"


@pytest.mark.parametrize(("fields", "body", "signature"), JAVA)
def test_what_is_not_signed_so_is_nobody_s(
    fields: dict[str, str], body: bytes, signature: str
) -> None:
    given = {**fields, "AccessKey": "shop"}
    for secrets in ([], ["x" * 32]):
        assert signer(secrets, given, body, signature) is None
    assert signer([SECRET], {**given, "AccessKey": "shoq"}, body, signature) is None
    assert signer([SECRET], {**given, "more": "x"}, body, signature) is None
    assert signer([SECRET], given, body + b"x", signature) is None
    for wrong in ("", "x" * 28, signature[:-1], signature + " ", "é" * 28, "\ud800" * 28):
        assert signer([SECRET], given, body, wrong) is None
    assert signer([SECRET], {**given, "bad": "\ud800"}, body, signature) is None


def test_names_and_borders_of_fields_are_not_signed() -> None:
    """That is how RocketMQ signs; docs/rocketmq-clients.md says what it means."""
    assert sign(SECRET, {"a": "12", "b": "3"}, b"4") == sign(SECRET, {"x": "1", "y": "23"}, b"4")
    assert sign(SECRET, {"a": "1"}, b"23") == sign(SECRET, {"a": "12"}, b"3")


def test_no_change_of_what_is_signed_is_taken() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    letters = "abcXYZ019_%ü～\U0001f34f\0"

    def text() -> str:
        return "".join(rng.choices(letters, k=rng.randrange(6)))

    def covered(fields: dict[str, str], body: bytes) -> bytes:
        """Return what a signature covers; by characters, since all names here are of the BMP."""
        names = sorted(set(fields) - {"Signature"})
        return "".join(fields[name] for name in names).encode() + body

    for _ in range(3_000):
        fields = {rng.choice("abcdefgh") * rng.randrange(1, 3): text() for _ in range(5)}
        fields["AccessKey"], body = "shop", rng.randbytes(rng.randrange(20))
        signature = sign(SECRET, fields, body)
        assert signer([SECRET], fields, body, signature) == SECRET
        others, other_body = dict(fields), body
        for _ in range(rng.randrange(1, 3)):
            name = rng.choice(list(others))
            match rng.randrange(4):
                case 0:
                    others[name] = text()
                case 1:
                    others[rng.choice("abcdefgh")] = text()
                case 2:
                    others.pop(name, None)
                    others["z"] = ""
                case 3:
                    other_body = rng.randbytes(rng.randrange(20))
        same = covered(others, other_body) == covered(fields, body)
        taken = signer([SECRET], others, other_body, signature) is not None
        assert taken is same, (fields, body, others, other_body)
