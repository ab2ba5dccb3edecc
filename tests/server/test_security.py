"""A node with identities and an audit log: what it notes, refuses and shows."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import socket
import ssl
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from hastore.cli.common import run_code
from hastore.cli.main import cli
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import load_config
from hastore.config.model import (
    Config,
    DLedgerConfig,
    HAConfig,
    Mode,
    NodeAddress,
    Role,
    SecurityConfig,
    Wire,
)
from hastore.dledger.core.events import Settled
from hastore.dledger.driver.requests import AdminRequest, write_request
from hastore.errors import ConfigError
from hastore.fs.filesystem import REAL
from hastore.ha.hello import answering, peer
from hastore.ha.hello.peer import split_address
from hastore.protocol.hello import Hello
from hastore.protocol.remoting import Code
from hastore.record.codec import NO_HOST, build_record
from hastore.security.identity import Identity
from hastore.security.identity_editor import IdentityEditor
from hastore.security.tls_engine import NodeName
from hastore.security.tls_socket import TlsSocket
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from tests.ha.nodes import wait_for
from tests.process.harness import Ports
from tests.process.harness import audit_lines as lines
from tests.security.pki import Pki
from tests.server.kit import config_in_group, config_of, running
from tests.server.remoting.kit import RemotingClient
from tests.server.remoting.signing import send_fields, signed

replace = msgspec.structs.replace


def with_identities(tmp_path: pathlib.Path, config: Config) -> tuple[Config, str, str]:
    """Return the configuration with identities, their file, and the key of `ops`."""
    path, key = str(tmp_path / "ids.yaml"), secrets.token_hex(32)
    editor = IdentityEditor(path, create=True)
    editor.add(Identity("ops", is_admin=True), key, SYSTEM_CLOCK.wall_ms())
    editor.save()
    return replace(config, security=SecurityConfig(identities=path)), path, key


def test_each_change_of_the_role_is_noted(tmp_path: pathlib.Path) -> None:
    root, news = tmp_path / "s", []
    config = config_of(root)
    node = Node(config, lambda: news.pop() if news else None)
    with running(node):
        found = wait_for(lambda: len(lines(root, "promote")) >= 2 and lines(root, "promote"))
        assert [one["outcome"] for one in found] == ["asked", "done"]
        assert found[1]["reason"].startswith("ASYNC_MASTER in epoch 65537")
        news.append(replace(config, role=Role.SLAVE))
        found = wait_for(lambda: len(lines(root, "demote")) == 2 and lines(root, "demote"))
        assert [one["outcome"] for one in found] == ["asked", "done"]
        assert (
            found[0]["reason"] == "ASYNC_MASTER to SLAVE, by the node's file"
            and found[0]["node"] == 1
        )
        news.append(config)
        found = wait_for(lambda: len(lines(root, "promote")) == 4 and lines(root, "promote"))
        assert found[2]["reason"] == "SLAVE to ASYNC_MASTER, by the node's file"
    with running(Node(config, lambda: None)):
        wait_for(lambda: lines(root, "resume"))


def modes(root: pathlib.Path) -> dict[pathlib.Path, int]:
    """Return the mode of each file and folder below `root`, and its own.

    A node that runs replaces its files: a temporary one may be gone before its mode is asked for.
    """
    found = {}
    for path in (root, *root.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode):
                found[path] = stat.S_IMODE(status.st_mode)
    return found


def open_to_others(root: pathlib.Path) -> dict[str, str]:
    """Return what other users may reach below `root`, with the modes."""
    found = modes(root)

    def reached(path: pathlib.Path) -> bool:
        return path == root or (found.get(path, 0o077) & 0o077 != 0 and reached(path.parent))

    return {
        str(path.relative_to(root)): f"{mode:o}"
        for path, mode in found.items()
        if path != root and reached(path)
    }


@pytest.mark.parametrize("mode", [Mode.CLASSIC, Mode.DLEDGER])
def test_what_a_node_writes_is_for_its_user_alone(tmp_path: pathlib.Path, mode: Mode) -> None:
    """From its birth, whatever the umask; what an earlier version left open is closed."""
    root = tmp_path / "s"
    config = config_of(root)
    make: type[Node | DLedgerNode] = Node
    if mode is Mode.DLEDGER:
        config, make = replace(config, mode=mode, role=None), DLedgerNode
    before = os.umask(0)
    try:
        with running(make(config, lambda: None)):
            everything = modes(root)
            assert len(everything) > 6
            assert {path: f"{mode:o}" for path, mode in everything.items() if mode & 0o077} == {}
        for path in (root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (root / "notes").write_text("an operator's")
        assert "hastore/node.json" in open_to_others(root)
        with running(make(config, lambda: None)):
            assert open_to_others(root) == {"notes": "666"}
    finally:
        os.umask(before)


def secret_file(path: pathlib.Path) -> str:
    path.write_bytes(secrets.token_bytes(32))
    os.chmod(path, 0o600)
    return str(path)


@pytest.fixture
def nodes() -> Iterator[dict[int, NodeAddress]]:
    """The addresses of two nodes, whose ports nobody else takes."""
    with contextlib.closing(Ports()) as ports:
        yield {number: NodeAddress(**each) for number, each in ports.addresses(2).items()}


@pytest.mark.parametrize("mode", [Mode.CLASSIC, Mode.DLEDGER])
@pytest.mark.parametrize("wrong", ["secret", "cluster", "bytes"])
def test_callers_who_do_not_belong_are_noted(
    tmp_path: pathlib.Path, nodes: dict[int, NodeAddress], mode: Mode, wrong: str
) -> None:
    mine = secret_file(tmp_path / "mine")
    base = replace(config_of(tmp_path / "1"), nodes=nodes, ha=HAConfig(secret_file=mine), mode=mode)
    theirs = replace(
        base,
        node=2,
        role=Role.SLAVE,
        cluster="other" if wrong == "cluster" else base.cluster,
        store=replace(base.store, root=str(tmp_path / "2")),
        ha=HAConfig(secret_file=secret_file(tmp_path / "x") if wrong == "secret" else mine),
    )
    if mode is Mode.DLEDGER:
        base, theirs = replace(base, role=None, node=2), replace(theirs, role=None, node=1)
        base, theirs = (
            replace(base, store=theirs.store),
            replace(theirs, store=base.store),
        )
    make = Node if mode is Mode.CLASSIC else DLedgerNode
    node = make(base, lambda: None)
    root = pathlib.Path(base.store.root)
    node.start()
    try:
        if wrong == "bytes":
            with socket.create_connection(split_address(nodes[base.node].ha)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 3)
                found = wait_for(lambda: lines(root, "ha"))
        else:
            other = make(theirs, lambda: None)
            other.start()
            try:
                found = wait_for(lambda: lines(root, "ha"))
            finally:
                other.stop()
    finally:
        node.stop()
    assert found[0]["outcome"] == "refused" and found[0]["address"].startswith("127.0.0.1:")
    says = {"secret": "secret", "cluster": "other", "bytes": ""}[wrong]
    assert says in found[0]["reason"] and found[0]["reason"]


class Pair:
    """Two nodes in this process, in either mode, whose master is known."""

    def __init__(self, made: list[Node | DLedgerNode]) -> None:
        def roles() -> list[int | None]:
            return [node.backend.master_node() for node in made]

        wait_for(lambda: roles() in ([1, 1], [2, 2]), "a master that both know")
        self.master = next(node for node in made if node.config.node == roles()[0])
        self.other = next(node for node in made if node is not self.master)
        wait_for(lambda: self.master.backend.status()["takes_default"], "synchronous puts")


# A slow disk lets nobody else be elected here; that would end a connection with its request.
PATIENT = DLedgerConfig(election_timeout_ms=2_000)


@pytest.fixture(params=[Mode.CLASSIC, Mode.DLEDGER])
def make_pair(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, nodes: dict[int, NodeAddress]
) -> Iterator[Callable[..., Pair]]:
    mode: Mode = request.param
    with contextlib.ExitStack() as stack:

        def make(changes: Callable[[int], dict[str, object]] = lambda _number: {}) -> Pair:
            made: list[Node | DLedgerNode] = []
            for number in nodes:
                fields = {"mode": mode, **changes(number)}
                config = config_in_group(tmp_path, number, nodes, **fields)
                if mode is Mode.DLEDGER:
                    config = replace(config, role=None, dledger=PATIENT)
                    made.append(DLedgerNode(config, lambda: None))
                else:
                    made.append(Node(config, lambda: None))
                made[-1].start()
                stack.callback(made[-1].stop)
            return Pair(made)

        yield make


def test_requests_are_forwarded_over_tls_with_a_secret(
    tmp_path: pathlib.Path, make_pair: Callable[..., Pair]
) -> None:
    """A client of RocketMQ sends to a node that is not the master; all addresses speak TLS."""
    pki, ha = Pki(tmp_path / "pki"), HAConfig(secret_file=secret_file(tmp_path / "secret"))

    def protected(number: int) -> dict[str, object]:
        files = pki.node(NodeName("test", "g0", number))
        own = {"ca": files.ca, "certificate": files.certificate, "key": files.key}
        return {"ha": ha, "security": SecurityConfig(**own, api=Wire.TLS, ha=Wire.TLS)}

    pair = make_pair(protected)
    master, other = pair.master, pair.other
    trusts = ssl.create_default_context(cafile=pki.ca)
    with contextlib.closing(RemotingClient(other.api.endpoint, trusts)) as client:
        for number in range(3):
            fields = {
                "a": "group", "b": "T", "c": "TBW102", "d": "4", "e": str(number), "f": "0",
                "g": "1700000000123", "h": "0", "i": "WAIT\x01true\x02", "j": "0",
            }  # fmt: skip
            answer = client.ask(Code.SEND_MESSAGE_V2, fields, bytes(20_000 * number) + b"x")
            assert answer.code == 0, answer.remark
    assert other.forward_counts.forwarded >= 3 <= master.forward_counts.received
    (channel,) = master._links.forward_port._channels.values()
    assert isinstance(channel._sock, TlsSocket)
    assert not lines(pathlib.Path(master.config.store.root), "ha"), "nobody was refused"


def test_a_forwarded_request_needs_the_identity_at_both_nodes(
    tmp_path: pathlib.Path, make_pair: Callable[..., Pair]
) -> None:
    """While a new identity, or its end, has reached one node only, the request is refused."""
    secret, paths = secrets.token_hex(32), {}

    def identified(number: int) -> dict[str, object]:
        paths[number] = str(tmp_path / f"ids{number}.yaml")
        editor = IdentityEditor(paths[number], create=True)
        editor.add(Identity("ops"), None, 0, secret=secret)
        editor.save()
        return {"security": SecurityConfig(identities=paths[number])}

    pair = make_pair(identified)
    master, other = pair.master.config.node, pair.other.config.node

    def edit(number: int, change: Callable[[IdentityEditor], object]) -> None:
        editor = IdentityEditor(paths[number])
        change(editor)
        editor.save()

    def add(editor: IdentityEditor) -> None:
        editor.add(Identity("shop", ("Shop",)), None, 0, secret=secret)

    def sent() -> tuple[int, str]:
        fields = signed("shop", secret, send_fields("Shop"), b"x")
        with contextlib.closing(RemotingClient(pair.other.api.endpoint)) as client:
            answer = client.ask(Code.SEND_MESSAGE_V2, fields, b"x")
        return answer.code, answer.remark or ""

    def refused_by(node: int) -> None:
        code, remark = sent()
        assert code == 16 and f"the file of identities of node {node}" in remark, remark

    refused_by(other)
    edit(other, add)
    refused_by(master)  # which checks by itself what it did not ask its client for
    edit(master, add)
    assert sent()[0] == 0
    edit(master, lambda editor: editor.revoke("shop"))
    wait_for(lambda: sent()[0] == 16, "the master's end of the identity")
    refused_by(master)
    assert pair.master.acl_counts.unproved >= 2
    assert lines(pathlib.Path(pair.master.config.store.root), "authenticate")


def test_a_node_of_a_version_before_rocketmqs_clients_is_named_and_not_in_routes(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(hello: Hello) -> bytes:
        return msgspec.msgpack.encode(replace(hello, remoting=False))

    for module in (peer, answering):
        monkeypatch.setattr(module, "encode_hello", said)
    pair = make_pair()
    master, number = pair.master, pair.other.config.node
    (problem,) = master.backend.problems()
    assert f"node {number} runs a version" in problem and "upgrade it" in problem
    assert master.backend.reading_nodes() == []
    with contextlib.closing(RemotingClient(master.api.endpoint)) as client:
        route = client.ask(Code.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"}).body.decode()
    assert '"brokerName":"g0"' in route and f"g0@{number}" not in route
    assert master.config.nodes[number].api.removeprefix("tcp://") not in route


def test_requests_of_administrators_are_noted_in_mode_dledger(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "s"
    config = replace(config_of(root), mode=Mode.DLEDGER, role=None)
    with running(DLedgerNode(config, lambda: None)) as node:
        for command in ("transfer", "add", "remove"):
            write_request(
                REAL, str(root), command, 1 if command != "add" else 9,
                term=node.backend.epoch(), members=(1,), wall_ms=SYSTEM_CLOCK.wall_ms(),
            )  # fmt: skip
            found = wait_for(lambda command=command: lines(root, f"dledger {command}"))
            assert found[0]["outcome"] == "refused" and found[0]["reason"].startswith("node ")


def http(node: Any, path: str, token: str | None = None) -> int:
    request = urllib.request.Request(f"http://{node.http_address}{path}")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def test_changed_identities_are_noted_and_a_broken_file_is_a_problem(
    tmp_path: pathlib.Path,
) -> None:
    root = tmp_path / "s"
    config, path, key = with_identities(tmp_path, config_of(root))
    with running(Node(config, lambda: None)) as node:
        assert http(node, "/healthz") == 200 and http(node, "/status") == 401
        assert http(node, "/status", f"ops:{key}") == 200
        assert http(node, "/metrics", f"ops:{'0' * 64}") == 401
        refused = wait_for(lambda: lines(root, "http")[1:])
        assert refused[0]["identity"] == "ops" and refused[0]["outcome"] == "refused"
        editor = IdentityEditor(path)
        editor.add(Identity("new"), secrets.token_hex(32), 0)
        editor.save()

        def noted(outcome: str) -> Any:
            http(node, "/status", f"ops:{key}")  # whoever asks lets the node look at the file
            return [one for one in lines(root, "identity") if one["outcome"] == outcome]

        assert wait_for(lambda: noted("added"))[0]["identity"] == "new"
        editor = IdentityEditor(path)
        wanted = dataclasses.replace(editor.find("new"), is_admin=True, produce=("orders",))
        editor.set_rights(wanted, {})
        editor.save()
        assert wait_for(lambda: noted("changed"))[0]["reason"] == "admin given, produce +orders"
        with open(path, "a") as file:
            file.write("  broken: 3\n")
        wait_for(lambda: http(node, "/status", f"ops:{key}") and lines(root, "identities"))
        problems = node.backend.status()["problems"]
        assert any("identities.broken: is not a mapping" in one for one in problems), problems
        assert http(node, "/status", f"ops:{key}") == 200, "the last good ones stay in force"
        os.unlink(path)
        again = IdentityEditor(path, create=True)
        again.add(Identity("ops"), secrets.token_hex(32), 0)
        again.save()
        assert wait_for(lambda: noted("revoked"))[0]["identity"] == "new"
        # 429 if the questions above were too many with a key that is wrong now.
        assert http(node, "/status", f"ops:{key}") in (401, 429), "another key now"
        assert node.backend.status()["problems"] == []
    log = (root / "hastore" / "audit.log").read_text()
    assert key not in log and "SCRAM" not in log


def test_metrics_name_no_topic_that_an_identity_may_not_use(tmp_path: pathlib.Path) -> None:
    with running(Node(config_of(tmp_path / "s"), lambda: None)) as node:
        for topic in ("orders", "secret-merger"):
            record = build_record(
                topic, b"x", queue_id=0, born_timestamp_ms=1, born_host=NO_HOST
            )
            node.backend.put_encoded([record])

        def named(identity: Identity | None) -> set[str]:
            text = node.metrics.render(identity).decode()
            return set(re.findall(r'hastore_messages_in_total{.*topic="(.*?)"', text)) - {"other"}

        assert named(None) == {"orders", "secret-merger"}
        assert named(Identity("shop", consume=("orders",))) == {"orders"}
        assert named(Identity("till", produce=("orders",))) == {"orders"}
        assert named(Identity("worker", groups=("team",))) == set()
        assert named(Identity("ops", is_admin=True)) == {"orders", "secret-merger"}
        assert named(Identity("prometheus")) == {"orders", "secret-merger"}, "for monitoring"


def test_a_node_does_not_start_with_identities_that_are_not_valid(tmp_path: pathlib.Path) -> None:
    config, path, _ = with_identities(tmp_path, config_of(tmp_path / "s"))
    os.chmod(path, 0o644)
    with pytest.raises(ConfigError, match="is open to other users; run chmod 600"):
        Node(config, lambda: None)
    os.unlink(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Node(config, lambda: None)


def test_an_audit_log_that_cannot_be_written_stops_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = str(tmp_path / "file" / "audit.log")
    config = replace(config_of(tmp_path / "s"), security=SecurityConfig(audit_log=wrong))
    with running(Node(config, lambda: None)) as node:
        problem = wait_for(lambda: node.backend.status()["problems"])[0]
        assert wrong in problem and "security.audit_log" in problem
        assert node.backend.status()["writable"]


def test_clients_that_tls_refuses_are_noted(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "g"
    assert run_code(cli, "hastore", ["init", str(folder), "--tls", "--nodes", "1"]) == 0
    tls, ids, file = str(folder / "tls"), str(folder / "identities.yaml"), folder / "node1.yaml"
    text = file.read_text().replace("file_size: 1GiB", "file_size: 1MiB")
    file.write_text(re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:0", text))
    assert run_code(cli, "hastore", ["keys", "ca", "--dir", tls]) == 0
    assert run_code(cli, "hastore", ["keys", "cert", "--dir", tls, "-c", str(file)]) == 0
    assert run_code(cli, "hastore", ["keys", "new", "ops", "--file", ids, "--show"]) == 0
    with running(Node(load_config(str(file)), lambda: None)) as node:
        root = pathlib.Path(node.config.store.root)
        api, http_address = node.api.endpoint.removeprefix("tcp://"), node.http_address
        for address, action in ((api, "tls api"), (http_address, "tls http")):
            host, port = address.rsplit(":", 1)
            with socket.create_connection((host, int(port)), timeout=60) as plain:
                plain.sendall(b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53))  # as ZMTP begins
                found = wait_for(lambda action=action: lines(root, action))
            assert found[0]["outcome"] == "refused" and "TLS" in found[0]["reason"], found
        context = ssl.create_default_context()  # which knows other CAs
        for address, action in ((api, "tls api"), (http_address, "tls http")):
            host, port = address.rsplit(":", 1)
            before = len(lines(root, action))
            with socket.create_connection((host, int(port)), timeout=60) as stranger:
                with pytest.raises(ssl.SSLCertVerificationError):
                    context.wrap_socket(stranger, server_hostname="127.0.0.1")
            wait_for(lambda action=action, before=before: lines(root, action)[before:])


@pytest.mark.parametrize(
    ("ended", "outcome"), [("COMMITTED", "done"), ("REFUSED", "refused"), ("LOST", "unknown")]
)
def test_what_became_of_a_request_is_noted(
    tmp_path: pathlib.Path, ended: str, outcome: str
) -> None:
    root = tmp_path / "s"
    node = DLedgerNode(replace(config_of(root), mode=Mode.DLEDGER, role=None), lambda: None)
    runner = node.driver._requests
    request = AdminRequest(
        id="x", command="transfer", node=2, term=1, members=(1, 2), wall_ms=SYSTEM_CLOCK.wall_ms()
    )
    runner._set(request, None, "")  # it runs
    runner._done(request, Settled(None, ended, reason="" if outcome == "done" else "why"))
    node.audit.start()
    node.audit.stop()
    (found,) = lines(root)
    assert (found["action"], found["outcome"]) == ("dledger transfer", outcome)
    assert found["reason"] == ("node 2" if outcome == "done" else "node 2: why")
