"""`bind`: what a node binds where others reach it at another address."""

from __future__ import annotations

import pytest

from hastore.cli import own_node
from hastore.cli.certificates import _hosts
from hastore.cli.own_node import local_api
from hastore.client.connections.transport import NoAnswer, Quiet
from hastore.config.checks import config_notes, remoting_refusal
from hastore.config.file import load_config, parse_config
from hastore.config.model import BindConfig
from hastore.server.role_source import pending_changes
from tests.config.test_file import CONF, PAIR, refusal

ELSEWHERE = "bind: {api: 'tcp://127.0.0.2:1911', ha: '127.0.0.2:1912'}\n"
WILD = "bind: {api: 'tcp://0.0.0.0:10911', ha: '0.0.0.0:10912', http: '0.0.0.0:10913'}\n"
OPEN = "  allow_unauthenticated: true\napi: {allow_unauthenticated: true}\n"


def test_a_node_binds_its_own_addresses_unless_told_otherwise() -> None:
    config = parse_config(PAIR, "x.yaml")
    assert config.bind == BindConfig()
    assert config.bound("api") == config.nodes[1].api == "tcp://127.0.0.1:10911"
    config = parse_config(PAIR + ELSEWHERE, "x.yaml")
    bound = [config.bound(name) for name in ("api", "ha", "http")]
    assert bound == ["tcp://127.0.0.2:1911", "127.0.0.2:1912", "127.0.0.1:10913"]
    assert config.nodes == parse_config(PAIR, "x.yaml").nodes
    assert parse_config(PAIR, "x.yaml", {"bind.ha": "127.0.0.3:1"}).bound("ha") == "127.0.0.3:1"


@pytest.mark.parametrize("name", ["master.yaml", "slave.yaml", "dledger-n0.yaml"])
def test_the_files_of_conf_have_the_section_with_its_defaults(name: str) -> None:
    assert load_config(str(CONF / name)).bind == BindConfig()
    assert "\nbind:" in (CONF / name).read_text()


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("api: '1.2.3.4:5'", "x.yaml:14: bind.api: '1.2.3.4:5' is not an address"),
        ("ha: 'tcp://127.0.0.1:5'", "bind.ha: 'tcp://127.0.0.1:5' is not an address"),
        ("rpc: '127.0.0.1:5'", "bind.rpc: is unknown"),
        ("ha: '127.0.0.1:10911'", "127.0.0.1:10911 is also nodes.1.api"),
        ("ha: 'localhost:10922'", "localhost:10922 is also nodes.2.ha"),
        ("ha: '127.0.0.2:7', http: '127.0.0.2:7'", "127.0.0.2:7 is also bind.ha"),
        ("ha: '0.0.0.0:10911'", "0.0.0.0:10911 is also nodes.1.api"),
    ],
)
def test_refusals_name_the_key(bind: str, expected: str) -> None:
    assert expected in refusal(PAIR + OPEN + f"bind: {{{bind}}}\n")


def test_a_node_does_not_follow_what_it_binds() -> None:
    text = PAIR.replace("SYNC_MASTER", "SLAVE") + "  classic_master: '127.0.0.2:1912'\n"
    assert "127.0.0.2:1912 is bind.ha" in refusal(text + ELSEWHERE)


def test_what_is_bound_beyond_loopback_needs_protection() -> None:
    for name, port in (("api", "tcp://0.0.0.0:10911"), ("ha", "0.0.0.0:2"), ("http", "10.0.0.1:3")):
        text = PAIR + f"bind: {{{name}: '{port}'}}\n"
        assert f"bind.{name}: " in refusal(text) and "is beyond loopback" in refusal(text)
    assert parse_config(PAIR + OPEN + WILD, "x.yaml").bound("http") == "0.0.0.0:10913"
    # A proxy on this machine lets strangers in to what is bound on loopback.
    text = PAIR.replace("127.0.0.1:10912", "10.0.0.1:10912") + "bind: {ha: '127.0.0.1:10912'}\n"
    assert "nodes.1.ha: 10.0.0.1 is beyond loopback" in refusal(text)


def test_rocketmqs_clients_are_served_by_themselves_on_loopback_only() -> None:
    assert remoting_refusal(parse_config(PAIR + ELSEWHERE, "x.yaml")) is None
    assert remoting_refusal(parse_config(PAIR + OPEN + WILD, "x.yaml")) is not None


def test_a_wildcard_that_others_are_told_is_noted() -> None:
    told = PAIR.replace("tcp://127.0.0.1:10911", "tcp://0.0.0.0:10911")
    notes = config_notes(parse_config(told + OPEN, "x.yaml"))
    (note,) = [one for one in notes if "nodes.1.api" in one]
    assert note.startswith("nodes.1.api is 0.0.0.0: clients would look") and "bind.api" in note
    assert not any("0.0.0.0:" in one for one in config_notes(parse_config(PAIR + OPEN + WILD, "x")))
    open_links = "ha.allow_unauthenticated: true: the links"
    assert any(open_links in one for one in config_notes(parse_config(PAIR + OPEN + WILD, "x")))


def test_a_change_counts_from_the_next_start() -> None:
    old, new = parse_config(PAIR, "x.yaml"), parse_config(PAIR + ELSEWHERE, "x.yaml")
    found = {one["key"]: one for one in pending_changes(old, new, ())}
    assert set(found) == {"bind.api", "bind.ha"}
    assert found["bind.ha"]["in_file"] == "127.0.0.2:1912"
    assert found["bind.ha"]["counts_from"] == "restart"


def test_the_own_machine_reaches_a_wildcard_by_loopback() -> None:
    assert local_api(parse_config(PAIR + OPEN + WILD, "x.yaml")) == "tcp://127.0.0.1:10911"
    wild = PAIR + OPEN + "bind: {api: 'tcp://[::]:1'}\n"
    assert local_api(parse_config(wild, "x.yaml")) == "tcp://[::1]:1"
    assert local_api(parse_config(PAIR + ELSEWHERE, "x.yaml")) == "tcp://127.0.0.2:1911"


def test_a_command_on_a_machine_that_cannot_reach_itself_where_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_config(PAIR + ELSEWHERE, "x.yaml")
    answers = {"tcp://127.0.0.2:1911": {"node": 1, "cluster": "demo", "group": "g0"}}
    gone, hangs = NoAnswer(Quiet.REFUSED, "refused"), NoAnswer(Quiet.TIMED_OUT, "hangs")
    silent: dict[str, NoAnswer] = {}
    monkeypatch.setattr(
        own_node, "ask_or_why", lambda at, *_: answers.get(at) or silent.get(at, gone)
    )
    assert own_node.ask_node(config) == answers["tcp://127.0.0.2:1911"]
    assert own_node.ask_own_status(config, 2, 1.0) is None
    # Ports of several containers may be published on one machine.
    answers["tcp://127.0.0.2:1911"]["node"] = 2
    assert own_node.ask_node(config) is None
    assert own_node.ask_own(config, 1, 1.0).kind is Quiet.FAILED
    answers.clear()
    assert own_node.ask_own(config, 1, 1.0) == gone
    for address in (config.nodes[1].api, "tcp://127.0.0.2:1911"):  # only both together say so
        silent = {address: hangs}
        assert own_node.ask_own(config, 1, 1.0) == hangs


def test_a_certificate_names_where_others_and_the_own_machine_reach_the_node() -> None:
    text = PAIR.replace("127.0.0.1:109", "n1.example:109") + OPEN
    assert _hosts(parse_config(text, "x.yaml"), []) == ["n1.example"]
    loopback = ["localhost", "127.0.0.1", "::1"]
    assert _hosts(parse_config(text + WILD, "x.yaml"), []) == ["n1.example", *loopback]
    bound = _hosts(parse_config(text + "bind: {ha: '10.0.0.7:1'}\n", "x.yaml"), [])
    assert bound == ["n1.example", "10.0.0.7"]
