import pytest

from hastore.addresses import address_text, is_loopback, parse_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:65535", ("::1", 65_535)),
        ("a-b.example.:1", ("a-b.example.", 1)),
        ("a:65536", None),
        ("a:1x", None),
        (":1", None),
        ("-a:1", None),
        ("a", None),
        ("1.2.3.999:1", None),
        ("[::1:1", None),
        ("a." * 126 + "b:1", ("a." * 126 + "b", 1)),
        ("a." * 126 + "bc:1", None),
        ("a" * 63 + ".b:1", ("a" * 63 + ".b", 1)),
        ("a" * 64 + ".b:1", None),
        ("a..b:1", None),
        ("a.b..:1", None),
    ],
)
def test_an_address_is_host_and_port(text, expected):
    assert parse_address(text) == expected
    if expected is not None:
        assert address_text(*expected) == text


@pytest.mark.parametrize("host", ["a." * 126 + "b", "a" * 63 + ".b", "a.b."])
def test_a_host_that_is_accepted_can_be_looked_up(host):
    """Python's sockets raise UnicodeError, which is no OSError, for a name that can be none."""
    host.encode("idna")


def test_a_long_host_with_a_wrong_character_is_refused_at_once():
    assert parse_address("broker-of-production-in-a-long-name" * 6 + "_1:10911") is None


def test_loopback_is_an_address_or_localhost():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "localhost.example", "")))
