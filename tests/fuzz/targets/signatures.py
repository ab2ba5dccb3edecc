"""Proofs of identities: RocketMQ's signatures, and both ends of SCRAM."""

from __future__ import annotations

from hastore.errors import AuthenticationError, ProtocolError
from hastore.protocol.remoting import Frame, decode_frame, encode_frame
from hastore.security.rocketmq_acl import ACCESS_KEY, SIGNATURE, sign, signer
from hastore.security.scram import (
    MIN_ITERATIONS,
    Credentials,
    ScramClient,
    ScramServer,
    derive,
)
from tests.fuzz import kit

SECRETS = ("0123456789abcdef", "another secret of 1")
KEY, SALT = "ab" * 32, b"s" * 16
NONCE, OTHER = "client-nonce-client-nonce", "server-nonce-server-nonce"
WHO = Credentials(SALT, MIN_ITERATIONS, (derive(KEY, SALT, MIN_ITERATIONS),))
REACHES = (signer, sign, ScramServer.challenge, ScramServer.prove, ScramClient.finish)
LEAST = kit.Least(0.12, 10)
TOKENS = (b"n,,n=", b",r=", b",s=", b",i=4096", b"c=biws,r=", b",p=", b"v=", b"y,,", b"p=tls")


def seeds() -> list[bytes]:
    """Return signed requests, and each message of an exchange."""
    fields = {"a": "g", "b": "T", ACCESS_KEY: "app"}
    signed = Frame(310, 1, 0, {**fields, SIGNATURE: sign(SECRETS[1], fields, b"body")}, b"body")
    odd = {"\U0001f600": "x", "\uffff": "y", ACCESS_KEY: "app"}
    unicode = Frame(310, 1, 0, {**odd, SIGNATURE: sign(SECRETS[0], odd, b"")}, b"")
    client, server = ScramClient("app", KEY, NONCE), ScramServer(lambda _name: WHO, OTHER)
    first = client.first()
    challenge = server.challenge(first)
    final = client.final(challenge)
    said = [("f", first), ("c", challenge), ("p", final), ("v", server.prove(final))]
    said += [("f", "p=tls,,n=app,r=x"), ("f", f"n,,n={'0' * 64},r=x"), ("p", "c=biws,r=x,p=y")]
    said += [("c", f"r={NONCE}x,s=AAAAAAAAAAA=,i=1"), ("v", "e=no"), ("f", "x" * 1_025)]
    said += [("p", final.replace("biws", "eSws")), ("c", f"r=x{NONCE},s=AAAA,i=5000")]
    return [
        *(b"s" + encode_frame(one)[4:] for one in (signed, unicode)),
        *(kind.encode() + text.encode() for kind, text in said),
    ]


def one(data: bytes) -> None:
    """Read one message of an exchange whose others were right, or a signed request."""
    kind, text = data[:1], kit.text_of(data[1:])
    if kind == b"s":
        with kit.documented(ProtocolError):
            frame = decode_frame(data[1:])
        given = frame.fields.get(SIGNATURE, "")
        found = signer(SECRETS, frame.fields, frame.body, given)
        assert found is None or sign(found, frame.fields, frame.body) == given
        assert signer((), frame.fields, frame.body, given) is None
        kit.refuse(found, "nobody's signature")
        return
    client, server = ScramClient("app", KEY, NONCE), ScramServer(lambda _name: WHO, OTHER)
    with kit.documented(AuthenticationError):
        if kind == b"f":
            server.challenge(text)
            return
        challenge = server.challenge(client.first())
        if kind == b"c":
            kit.refuse(len(text) < 200 or ",i=4096" in text, "many iterations take long")
            client.final(text)
            return
        final = client.final(challenge)
        if kind == b"p":
            server.prove(text)
            assert text == final, "one proof is right"
            return
        right = server.prove(final)
        client.finish(text)
        assert text == right and client.done
