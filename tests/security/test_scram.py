"""SCRAM-SHA-256: the vectors of RFC 7677, and everything that must be refused."""

import base64
import random
import secrets

import pytest

from hastore.errors import AuthenticationError
from hastore.security.scram import (
    DEFAULT_ITERATIONS,
    MAX_MESSAGE,
    SALT_BYTES,
    Credentials,
    ScramClient,
    ScramServer,
    derive,
    mock_credentials,
    verifies,
)

# RFC 7677, section 3.
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
CLIENT_NONCE, SERVER_NONCE = "rOprNGfwEbeRWgbNEkqO", "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
CLIENT_FIRST = f"n,,n=user,r={CLIENT_NONCE}"
SERVER_FIRST = f"r={CLIENT_NONCE}{SERVER_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
CLIENT_FINAL = (
    f"c=biws,r={CLIENT_NONCE}{SERVER_NONCE},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
USER = Credentials(SALT, 4096, (derive("pencil", SALT, 4096),))
MOCK = secrets.token_bytes(32)


def lookup(name):
    return USER if name == "user" else mock_credentials(MOCK, name)


def server(nonce=None):
    return ScramServer(lookup, nonce or secrets.token_urlsafe(18))


def client(name="user", key="pencil", nonce=None):
    return ScramClient(name, key, nonce or secrets.token_urlsafe(18))


def exchange(one, other):
    one.finish(other.prove(one.final(other.challenge(one.first()))))


def test_the_vectors_of_rfc_7677():
    theirs, ours = server(SERVER_NONCE), client(nonce=CLIENT_NONCE)
    assert ours.first() == CLIENT_FIRST
    assert theirs.challenge(CLIENT_FIRST) == SERVER_FIRST
    assert ours.final(SERVER_FIRST) == CLIENT_FINAL
    assert theirs.prove(CLIENT_FINAL) == SERVER_FINAL
    ours.finish(SERVER_FINAL)
    assert ours.done and theirs.name == "user" and theirs.verifier == USER.verifiers[0]


def test_a_wrong_key_and_an_unknown_name_get_the_same_answer():
    texts = []
    for name, key in (("user", "pen"), ("nobody", "pencil")):
        theirs, ours = server(), client(name, key)
        with pytest.raises(AuthenticationError) as refused:
            theirs.prove(ours.final(theirs.challenge(ours.first())))
        texts.append(str(refused.value).replace(name, "NAME"))
        assert theirs.name is None and theirs.verifier is None and key not in str(refused.value)
    assert texts[0] == texts[1]


def test_the_challenge_for_an_unknown_name_looks_like_one_for_a_known_name():
    salts = set()
    for _ in range(2):  # the same in each exchange, as for a name that exists
        text = server().challenge(client("nobody").first())
        _, salt, iterations = text.split(",")
        assert iterations == f"i={DEFAULT_ITERATIONS}"
        assert len(base64.b64decode(salt[2:])) == SALT_BYTES == len(SALT)
        salts.add(salt)
    assert len(salts) == 1
    salts.add(server().challenge(client("somebody").first()).split(",")[1])
    assert len(salts) == 2


def test_a_rotated_key_proves_the_same_identity_by_either_key():
    both = Credentials(SALT, 4096, (derive("old", SALT, 4096), derive("new", SALT, 4096)))
    for place, key in enumerate(("old", "new")):
        theirs, ours = ScramServer(lambda _name: both, secrets.token_urlsafe(18)), client(key=key)
        exchange(ours, theirs)
        assert ours.done and theirs.verifier == both.verifiers[place]
        assert verifies(key, both) == both.verifiers[place]
    assert verifies("other", both) is None
    assert verifies("other", mock_credentials(MOCK, "user")) is None


def test_a_replayed_proof_is_refused():
    theirs, ours = server(), client()
    final = ours.final(theirs.challenge(ours.first()))
    theirs.prove(final)
    with pytest.raises(AuthenticationError, match="without a challenge"):
        theirs.prove(final)  # in the same exchange
    again = server()
    again.challenge(ours.first())
    with pytest.raises(AuthenticationError, match="another nonce"):
        again.prove(final)
    # With the nonce changed to the new one, the signature no longer fits.
    again = server()
    nonce = again.challenge(ours.first()).split(",")[0]
    with pytest.raises(AuthenticationError, match="unknown here or has another key"):
        again.prove(f"c=biws,{nonce},p={final.partition(',p=')[2]}")
    assert again.name is None


def test_a_reflected_message_is_refused():
    ours = client()
    first = ours.first()
    for reflected in (first, first.removeprefix("n,,"), f"r={first.partition('r=')[2]},s=QUJD,i=1"):
        with pytest.raises(AuthenticationError):
            client(nonce=first.partition("r=")[2]).final(reflected)
    theirs = server()
    final = ours.final(theirs.challenge(first))
    with pytest.raises(AuthenticationError, match="not v=SIGNATURE"):
        ours.finish(final)
    # A server that gives back a client's own first message gets no proof for it.
    with pytest.raises(AuthenticationError, match="not n,,n=NAME"):
        server().challenge(server().challenge(client().first()))


def test_a_server_that_does_not_know_the_key_is_refused():
    ours = client()
    impostor = ScramServer(
        lambda _name: Credentials(SALT, 4096, (derive("guess", SALT, 4096),)), "x" * 18
    )
    ours.final(impostor.challenge(ours.first()))
    with pytest.raises(AuthenticationError, match="does not know this identity's key"):
        ours.finish(SERVER_FINAL)
    with pytest.raises(AuthenticationError, match="before its challenge"):
        ours.finish(SERVER_FINAL)
    assert not ours.done


@pytest.mark.parametrize(
    "challenge",
    [
        f"r={CLIENT_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",  # no nonce of the server's own
        SERVER_FIRST.replace("rOpr", "sOpr"),
        SERVER_FIRST.replace("i=4096", "i=4095"),  # a downgrade
        SERVER_FIRST.replace("i=4096", "i=99999999"),  # hours of computing
        SERVER_FIRST.replace("i=4096", "i=999999999999"),
        SERVER_FIRST.replace("i=4096", "i=-1"),
        SERVER_FIRST.replace("i=4096", "i=4096,x=1"),
        SERVER_FIRST.replace("i=4096", "i=\u0664096"),
        SERVER_FIRST.replace("s=W22", "s=!22"),
        SERVER_FIRST.replace("s=W22ZaJ0SNY7soEsUEjb6gQ==", "s="),
        SERVER_FIRST.replace("s=W22ZaJ0SNY7soEsUEjb6gQ==", "s=QUJD"),
        "m=ext," + SERVER_FIRST,
        SERVER_FIRST + "\n",
        "",
        "e=other-error",
        "r=" + "a" * (1 << 20),
    ],
)
def test_a_challenge_that_is_not_one_is_refused(challenge):
    with pytest.raises(AuthenticationError):
        client(nonce=CLIENT_NONCE).final(challenge)


@pytest.mark.parametrize(
    "first",
    [
        "",
        "n=user,r=abc",
        "n,,n=user",
        "n,,n=user,r=",
        "n,,n=,r=abc",
        "p=tls-unique,,n=user,r=abc",
        "n,a=admin,n=user,r=abc",
        "n,,m=ext,n=user,r=abc",
        "n,,n=user,r=abc,x=1",
        "n,,n=user,r=a\u00e9c",
        "n,,n=user,r=a c",
        "n,,n=us=2Cer,r=abc",
        "n,,n=user\0,r=abc",
        "n,,n=us\x1b[2Jer,r=abc",
        "n,,n=u\u017fer,r=abc",  # long s: NFKC makes it an s
        "n,,n=\uff55ser,r=abc",  # full width u
        "n,,n=us\u0065\u0301r,r=abc",
        "n,,n=\u0430dmin,r=abc",  # Cyrillic a
        "n,,n=" + "u" * 65 + ",r=abc",
        "n,,n=" + "u" * (1 << 20) + ",r=abc",
        "n,,n=user,r=" + "a" * 129,
        CLIENT_FIRST + "\n",
        CLIENT_FIRST + "\0",
    ],
)
def test_a_first_message_that_is_not_one_is_refused(first):
    theirs = server()
    with pytest.raises(AuthenticationError) as refused:
        theirs.challenge(first)
    assert len(str(refused.value)) < 200 and str(refused.value).isprintable()
    with pytest.raises(AuthenticationError):
        theirs.prove(CLIENT_FINAL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("c=biws", "c=eSws"),  # y,, where n,, was sent: somebody changed the first message
        ("c=biws", "c=cD10bHMtdW5pcXVlLCw="),
        ("c=biws,", ""),
        (",p=", ",p=A"),
        ("=dHzb", "=eHzb"),
        ("Ut", "U"),
        ("VQ=", "VR="),  # another spelling of the same bytes
        ("VQ=", "VQ"),
        (",p=", ",x=1,p="),
        (SERVER_NONCE, SERVER_NONCE[:-1]),
        (CLIENT_FINAL, ""),
        (CLIENT_FINAL, CLIENT_FINAL + "A" * MAX_MESSAGE),
        (CLIENT_FINAL, CLIENT_FINAL + "\n"),
    ],
)
def test_a_final_message_that_is_not_one_is_refused(old, new):
    theirs = server(SERVER_NONCE)
    theirs.challenge(CLIENT_FIRST)
    assert old in CLIENT_FINAL
    with pytest.raises(AuthenticationError):
        theirs.prove(CLIENT_FINAL.replace(old, new))
    with pytest.raises(AuthenticationError, match="without a challenge"):
        theirs.prove(CLIENT_FINAL)  # one attempt in one exchange
    assert theirs.name is None


def test_every_truncation_and_every_changed_character_is_refused():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for size in range(len(CLIENT_FINAL)):
        cut = server(SERVER_NONCE)
        cut.challenge(CLIENT_FIRST)
        with pytest.raises(AuthenticationError):
            cut.prove(CLIENT_FINAL[:size])
    for size in range(len(SERVER_FINAL)):
        ours = client(nonce=CLIENT_NONCE)
        ours.final(SERVER_FIRST)
        with pytest.raises(AuthenticationError):
            ours.finish(SERVER_FINAL[:size])
        ours = client(nonce=CLIENT_NONCE)
        ours.final(SERVER_FIRST)
        other = chr((ord(SERVER_FINAL[size]) + chance.randrange(1, 90) - 33) % 90 + 33)
        changed = SERVER_FINAL[:size] + other + SERVER_FINAL[size + 1 :]
        if changed != SERVER_FINAL:
            with pytest.raises(AuthenticationError):
                ours.finish(changed)
    for place in range(len(CLIENT_FINAL)):
        theirs = server(SERVER_NONCE)
        theirs.challenge(CLIENT_FIRST)
        other = chance.choice([c for c in map(chr, range(33, 126)) if c != CLIENT_FINAL[place]])
        with pytest.raises(AuthenticationError):
            theirs.prove(CLIENT_FINAL[:place] + other + CLIENT_FINAL[place + 1 :])


def test_nothing_shows_what_is_secret():
    ours, theirs = client(), server()
    exchange(ours, theirs)
    for one in (ours, theirs, USER, USER.verifiers[0]):
        text = repr(one)
        assert "pencil" not in text and "stored_key" not in text and "server_key" not in text
