"""Who makes room on a port that anyone reaches, and which hosts have slots of their own."""

import random
import socket
import threading
from collections import Counter

import pytest

from hastore.clock import SystemClock
from hastore.security.slots import LOOKUP_MS, PROVED_MAX, KnownHosts, crowded_out, source_of
from hastore.service import raise_failure
from tests.ha.nodes import wait_for


class Clock(SystemClock):
    """A clock that a test sets."""

    now_ms = 0.0

    def monotonic_ms(self):
        return self.now_ms


def known(*addresses, clock=None):
    return KnownHosts(lambda: addresses, clock or Clock(), on_failure=raise_failure)


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("10.0.0.7", "10.0.0.7"), ("::1", "::1"), ("[::1]", "::1"),
        ("::ffff:10.0.0.7", "10.0.0.7"), ("2001:db8::7", "2001:db8::/64"),
        ("2001:db8:0:0:ffff::1", "2001:db8::/64"), ("fe80::7%eth0", "fe80::/64"),
        ("localhost", "localhost"),
    ],
)  # fmt: skip
def test_a_source_is_a_host_or_a_network_of_ipv6(host, source):
    assert source_of(host) == source


def test_the_source_with_most_gives_one_up():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed).choice
    held = ["a", "b", *["flood"] * 3, "c"]
    assert {crowded_out(held, str, draw) for _ in range(50)} == {"flood"}
    assert {crowded_out(held[:2], str, draw) for _ in range(50)} == {"a", "b"}


def test_one_of_many_stays_with_the_chance_of_its_share():
    """128 slots, 100 new connections of the same host: the first one stays in 46 of 100 cases."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed).choice
    stayed = 0
    for _ in range(200):
        held = list(range(128))
        for new in range(100):
            held.remove(crowded_out(held, lambda _one: "one host", draw))
            held.append(1_000 + new)
        stayed += 0 in held
    assert 50 <= stayed <= 140  # 91; the oldest never stayed


def test_hosts_of_the_group_are_known_and_strangers_are_not():
    hosts = known("10.0.0.1:10912", "[2001:db8::1]:10912")
    assert "10.0.0.1" in hosts and source_of("2001:db8::1") in hosts
    assert "10.0.0.2" not in hosts


def test_who_has_proved_himself_is_known_but_not_without_end():
    hosts = known()
    for number in range(PROVED_MAX + 1):
        hosts.learn(f"10.1.0.{number}")
        hosts.learn("10.0.0.9")
    assert "10.0.0.9" in hosts and f"10.1.0.{PROVED_MAX}" in hosts
    assert "10.1.0.0" not in hosts


def test_names_are_looked_up_beside_and_again_later(monkeypatch):
    found = {"node1": "10.0.0.1", "node2": None}
    asked = Counter()

    def getaddrinfo(name, _port, *, type):
        asked[name] += 1
        if found[name] is None:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, type, 0, "", (found[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    clock = Clock()
    hosts = known("node1:1", "node2:1", clock=clock)
    wait_for(lambda: "10.0.0.1" in hosts and asked["node2"], "the first look-up")
    wait_for(lambda: not any(one.alive for _, one in hosts._lookups.values()), "its end")
    assert "10.0.0.2" not in hosts and asked == {"node1": 1, "node2": 1}
    found.update(node1=None, node2="10.0.0.2")
    clock.now_ms += LOOKUP_MS
    wait_for(lambda: "10.0.0.2" in hosts, "the second look-up")
    assert "10.0.0.1" in hosts, "a name that is not found now keeps its host"


def test_a_name_that_dns_does_not_answer_keeps_no_other_waiting(monkeypatch):
    answered, asked = threading.Event(), Counter()

    def getaddrinfo(name, _port, *, type):
        asked[name] += 1
        if name == "slow":
            assert answered.wait(60)
        return [(socket.AF_INET, type, 0, "", ({"slow": "10.0.0.1", "node2": "10.0.0.2"}[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    clock = Clock()
    hosts = known("slow:1", "node2:1", clock=clock)
    try:
        wait_for(lambda: "10.0.0.2" in hosts, "the host that DNS knows")
        clock.now_ms += 2 * LOOKUP_MS
        assert "10.0.0.1" not in hosts and asked["slow"] == 1, "its look-up still runs"
    finally:
        answered.set()
    wait_for(lambda: "10.0.0.1" in hosts, "the slow one")
