"""The identities file: what it says, and every mistake in it, with line, key and remedy."""

import json
import os
import random

import pytest

from hastore.errors import ConfigError
from hastore.fs.private_files import MAX_KEY_FILE_BYTES, read_private
from hastore.security.identity import Quota
from hastore.security.identity_file import (
    MAX_FILE_BYTES,
    format_time,
    parse_identities,
    parse_time,
)

UNTIL_MS = parse_time("2026-11-23T18:30:00Z")


def parse(text):
    return parse_identities(text.encode() if isinstance(text, str) else text, "ids.yaml")


def refusal(text):
    with pytest.raises(ConfigError) as refused:
        parse(text)
    line = str(refused.value)
    assert "\n" not in line and line.startswith("ids.yaml") and len(line) < 500
    return line


def test_what_a_file_says(content, key):
    content.add("orders", key, produce='["orders-*"]', consume="[a, b]", until={key: UNTIL})
    content.add("ops", admin="true", certificate="true")
    found = parse(content.text()).identities
    orders, ops = found["orders"], found["ops"]
    assert (orders.produce, orders.consume, orders.is_admin) == (("orders-*",), ("a", "b"), False)
    assert orders.keys[0].until_ms == parse_time(UNTIL) and not orders.by_certificate
    rights = {"produce": ["orders-*"], "consume": ["a", "b"], "groups": None, "admin": False}
    assert orders.rights == rights
    assert ops.is_admin and ops.by_certificate and ops.keys == () and ops.credentials(0) is None
    assert orders.credentials(parse_time(UNTIL) - 1).verifiers == (orders.keys[0].verifier,)
    assert orders.credentials(parse_time(UNTIL)) is None


UNTIL = "2026-11-23T18:30:00Z"


def test_a_file_in_json_is_a_file_too():
    secret = "A" * 43 + "="
    value = {"challenge_secret": secret, "identities": {"a": {"certificate": True}}}
    assert parse(json.dumps(value)).identities["a"].by_certificate


def test_times_go_both_ways():
    for text in ("1970-01-01T00:00:00Z", UNTIL, "9999-12-31T23:59:59Z"):
        assert format_time(parse_time(text)) == text
    for text in (
        "",
        "2026-11-23",
        "2026-11-23T18:30:00",
        "2026-13-01T00:00:00Z",
        "1969-12-31T23:59:59Z",
        "2026-11-23T18:30:00+01:00",
        "2026-1-23T018:30:00Z",
    ):
        assert parse_time(text) is None


GOOD = """challenge_secret: {secret}
identities:
  orders:
    produce: ["orders-*"]
    admin: false
    keys:
      - verifier: "{verifier}"
        made: "2026-11-22T18:30:00Z"
"""


@pytest.fixture
def good(content, key):
    from tests.security.conftest import verifier_of

    return GOOD.format(secret=content.secret, verifier=verifier_of(key))


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("orders:", "or ders:", 3, "use 1 to 64 of A-Z"),
        ("orders:", '"or\\x1b[2Jders":', 3, "use 1 to 64 of A-Z"),
        ("orders:", "\u043erders:", 3, "use 1 to 64 of A-Z"),
        ("orders:", "? [a]\n  :", 3, "write the name in quotes"),
        ("orders:", "~:", 3, "write the name in quotes"),
        ("orders:", "007:", 3, "'007' is no text in YAML; write the name in quotes"),
        ("orders:", "no:", 3, "write the name in quotes"),
        ("orders:", "<<:", 3, "write the name in quotes"),
        ("orders:", "x" * 65 + ":", 3, "rename it"),
        ("produce:", "produces:", 4, "identities.orders.produces: is unknown; the keys here are"),
        ('["orders-*"]', "orders-*", 4, "produce: must be a list"),
        ('["orders-*"]', '["orders.*"]', 4, "orders.*' is not a pattern of topics; use"),
        ('["orders-*"]', "[[a]]", 4, "single plain value"),
        ('["orders-*"]', "[~]", 4, "single plain value"),
        ('["orders-*"]', "[!!python/object:os.system a]", 4, "single plain value"),
        ('["orders-*"]', '[a, "b\\0"]', 4, "is not a pattern"),
        ('["orders-*"]', str(["a"] * 257), 4, "at most 256"),
        ("false", "no", 5, "identities.orders.admin: 'no' is neither true nor false"),
        ("false", "1", 5, "neither true nor false"),
        ("false", "[true]", 5, "single plain value"),
        ("$4096:", "$1:", 7, "1 iterations are out of range; use 4096 to 65536"),
        ("$4096:", "$999999:", 7, "out of range"),
        ("SCRAM-SHA-256$", "SCRAM-SHA-1$", 7, "made by `hastore keys new`"),
        ("MDEyMzQ1Njc4OWFiY2RlZg==", "MDEy", 7, "has 3 bytes where 16 belong"),
        ("MDEyMzQ1Njc4OWFiY2RlZg==", "M!!y", 7, "is not base64"),
        ("MDEyMzQ1Njc4OWFiY2RlZg==", "\u043c", 7, "is not base64"),
        ("2026-11-22T18:30:00Z", "yesterday", 8, "'yesterday' is not a time; write one in UTC"),
        ("made:", "expires:", 8, "expires: is unknown"),
        ("challenge_secret: ", "challenge_secret: AAAA\nx: ", 1, "has 3 bytes where 32 belong"),
        ("identities:", "people:", 2, "people: is unknown"),
        ("    keys:\n", "", 6, "is not valid YAML"),
        ("  orders:", "\torders:", 3, "is not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_a_remedy(good, old, new, line, says):
    assert old in good
    text = good.replace(old, new, 1)
    found = refusal(text)
    if old == "challenge_secret: ":  # an unknown key below it is met first
        assert "x: is unknown" in found
        return
    assert says in found, found
    assert found.startswith((f"ids.yaml:{line}:", f"ids.yaml:{line + 1}:")), found


def test_secrets_that_are_too_short_or_missing(good, content):
    assert "has 3 bytes where 32 belong" in refusal(good.replace(content.secret, "QUJD"))
    assert "challenge_secret: is missing" in refusal("identities: {}")
    assert "identities: is missing" in refusal(f"challenge_secret: {content.secret}\n")


def test_two_identities_with_one_name(good):
    entry = good.partition("identities:\n")[2]
    found = refusal(good + entry)
    assert "ids.yaml:9: identities.orders: is given twice (also line 3); keep one" in found
    found = refusal(good + entry.replace("orders:", "Orders:", 1))
    assert "ids.yaml:9: identities.Orders: differs from orders only by capitals" in found


def test_keys_of_one_identity_share_their_salt_and_differ(good):
    line = good.splitlines()[6]
    assert "is given twice" in refusal(good + line + "\n")
    other = line.replace("MDEyMzQ1", "MDEyMzQ2")
    assert "another salt" in refusal(good + other + "\n")
    assert "at most 8" in refusal(good + (line + "\n") * 8)


def test_an_alias_is_refused(good):
    anchored = good.replace("    keys:\n", "    keys: &k\n")
    assert "keys: is an alias" in refusal(anchored + "  other:\n    keys: *k\n")
    anchored = good.replace("  orders:\n", "  orders: &o\n")
    assert "other: is an alias" in refusal(anchored + "  other: *o\n")


def test_an_identity_that_nobody_can_prove(content):
    content.add("ghost", produce="[a]")
    found = refusal(content.text())
    assert "ids.yaml:3: identities.ghost: has neither a key nor certificate: true" in found


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\n", b"# only a comment\n", b"[]", b"null", b"text", b"\xff\xfe\0", b"\0" * 100),
        *(b"a: *nothing", b"- " * 3000, b"[" * 5000, b"{" * 5000, b"&a [*a]", b"%YAML 9"),
        *(b"a: 1\n---\nb: 2\n", b"a: !!binary x", b"!!python/object/apply:os.system [ls]"),
        (b"0123456789abcdef" * 4) + b"\n",
    ],
)
def test_what_is_no_identities_file(data):
    found = refusal(data)
    assert "0123456789abcdef" not in found  # a key file in the wrong place


@pytest.mark.parametrize("deep", ["[", "{a: ", "- ", "? ", "x: ["])
def test_a_file_that_is_nested_too_deeply_does_not_end_the_process(good, deep):
    """The composer of libyaml recurses: without a bound the interpreter itself crashes."""
    for text in (deep * (MAX_FILE_BYTES // len(deep)), good + "more: " + deep * 100_000):
        with pytest.raises(ConfigError, match="is nested too deeply|is not valid YAML"):
            parse_identities(text.encode(), "ids.yaml")


def test_a_file_of_random_bytes_is_refused_in_one_line(good):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    data = bytearray(good.encode())
    for _ in range(500):
        broken = bytearray(data)
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(broken))
            broken[place : place + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        try:
            parse(bytes(broken))
        except ConfigError as refused:
            assert str(refused).isprintable(), str(refused)


def test_a_mistake_never_quotes_what_is_secret(good, content, key):
    from tests.security.conftest import verifier_of

    secrets = [content.secret, *verifier_of(key).replace("$", ":").split(":")[2:]]
    for number, line in enumerate(good.splitlines()):
        for wrong in (line + "!", line[:-3], line.replace(":", "", 1), line.replace('"', "'", 1)):
            text = "\n".join([*good.splitlines()[:number], wrong, *good.splitlines()[number + 1 :]])
            try:
                parse(text)
            except ConfigError as refused:
                assert not [one for one in secrets if one[:12] in str(refused)], str(refused)


def test_files_that_cannot_be_private(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"key: cannot be read: No such file.*; check path"):
        read_private(str(path), 10)
    path.write_bytes(b"0123456789")
    for mode in (0o640, 0o604, 0o660, 0o644, 0o620, 0o601):
        os.chmod(path, mode)
        with pytest.raises(ConfigError, match="open to other users; run chmod 600"):
            read_private(str(path), 10)
    os.chmod(path, 0o400)
    assert read_private(str(path), 10) == b"0123456789"
    with pytest.raises(ConfigError, match="larger than 9 bytes"):
        read_private(str(path), 9)
    with pytest.raises(ConfigError, match="not a regular file|cannot be read"):
        read_private(str(tmp_path), 10)
    with pytest.raises(ConfigError, match="NUL"):
        read_private("a\0b", 10)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_private(str(tmp_path / "fifo"), 10)  # and does not wait for a writer
    with pytest.raises(ConfigError, match="not a regular file"):
        read_private("/dev/zero", MAX_KEY_FILE_BYTES)
    os.symlink(path, tmp_path / "link")
    assert read_private(str(tmp_path / "link"), 10) == b"0123456789"
    os.symlink("loop", tmp_path / "loop")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_private(str(tmp_path / "loop"), 10)
    assert MAX_FILE_BYTES >= 1024 * 1024


SECRETS = """
    groups: ["g*", "CID_a.b"]
    secrets:
      - secret: "{0}"
        until: "2026-11-23T18:30:00Z"
      - secret: second-secret-of-a-client
"""


def test_secrets_and_groups(content):
    """An identity of RocketMQ's clients needs no key."""
    good = content.text().replace("  {}\n", "") + "  shop:" + SECRETS.format("s" * 16)
    shop = parse(good).identities["shop"]
    assert [one.text for one in shop.secrets] == ["s" * 16, "second-secret-of-a-client"]
    assert shop.groups == ("g*", "CID_a.b") and shop.may_join("g1") and not shop.may_join("CID_aXb")
    assert not shop.secrets[0].counts(UNTIL_MS) and shop.secrets[1].counts(UNTIL_MS)
    for bad in ("short", "with a blank in it", "ä" * 20, "x" * 129):
        found = refusal(good.replace("s" * 16, bad))
        assert "secrets.1.secret: is no secret" in found and bad not in found
    assert "is given twice" in refusal(good.replace("second-secret-of-a-client", "s" * 16))
    assert "at most 8" in refusal(good + "      - secret: x\n" * 7)
    assert "is not a pattern of groups" in refusal(good.replace("CID_a.b", "a b"))
    assert parse(good.replace('["g*", "CID_a.b"]', "[]")).identities["shop"].groups == ()


def test_a_quota(content):
    content.add("some", produce='["t"]', certificate="true", quota="{bytes_per_s: 2MiB, topics: 0}")
    content.add("none", certificate="true", quota="")
    found = parse(content.text()).identities
    assert found["some"].quota == Quota(bytes_per_s=2 * 1024 * 1024, topics=0)
    good = content.text()
    for bad, says in (
        ("0B", "0 bytes is out of range"),
        ("x", "is not a size"),
        ("[1]", "must be a single value"),
    ):
        assert says in refusal(good.replace("2MiB", bad)), bad
    assert "bytes: is unknown; the keys here are requests_per_s" in refusal(
        good.replace("bytes_per_s", "bytes")
    )
