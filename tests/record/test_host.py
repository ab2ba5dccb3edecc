"""Hosts and message ids, from text and back."""

import pytest

from hastore.errors import UsageError
from hastore.record.codec import Host, message_id, parse_message_id

IPV4 = Host.parse("127.0.0.1:10911")
IPV6 = Host.parse("[::1]:10911")


@pytest.mark.parametrize("host", [IPV4, IPV6])
def test_message_ids_go_both_ways(host: Host) -> None:
    text = message_id(host, 2**40)
    assert len(text) == (56 if host.is_ipv6 else 32)
    assert text == text.upper()
    assert parse_message_id(text) == (host, 2**40)


@pytest.mark.parametrize("text", ["", "xx", "7F", "Z" * 32, "0" * 33, "00 " * 11 + "0"])
def test_a_broken_message_id_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_message_id(text)


@pytest.mark.parametrize("text", ["", "1.2.3.4", "1.2.3:1", "1.2.3.4:70000", "::1:1", "h:1"])
def test_hosts_are_addresses_with_a_port(text: str) -> None:
    with pytest.raises(UsageError):
        Host.parse(text)
    assert Host.parse("[::1]:80").text == "[::1]:80"
