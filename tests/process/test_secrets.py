"""No secret shows: not in any output, log, error, status, audit log or process title.

A group with TLS and identities everywhere, nodes that log at DEBUG, every command that talks to
them, and every way in which a key can be wrong. All that anybody could read is searched for every
secret there is, in each form in which it could slip out.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import yaml

from hastore import Consumer, Producer, Security
from hastore.cli.common import run_code
from hastore.cli.main import cli
from hastore.errors import HastoreError
from tests.process.harness import ROOT, Ports, wait_until

START_S = 120


class Fixture:
    """The group, what was seen of it, and its secrets."""

    def __init__(self, folder: pathlib.Path, capsys, monkeypatch) -> None:
        self.folder = folder
        self.seen: dict[str, str] = {}
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.stack = contextlib.ExitStack()
        self.secrets: set[str] = set()
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(
        self,
        *words: str,
        security: str | None = "ops.yaml",
        code: int | None = None,
        refused: str | None = None,
    ) -> str:
        """Run a command in this process; keep what it says. It must end with `code`, or say why
        it was refused.
        """
        if security is None:
            self._monkeypatch.delenv("HASTORE_SECURITY", raising=False)
        else:
            self._monkeypatch.setenv("HASTORE_SECURITY", str(self.folder / security))
        ended = run_code(cli, "hastore", list(words))
        out, err = self._capsys.readouterr()
        self.keep("hastore " + " ".join(words), out + err)
        assert code is None or ended == code, (words, ended, out, err)
        assert "Traceback" not in err, err
        assert refused is None or (ended != 0 and refused in err), (words, ended, out, err)
        return out + err

    def keep(self, what: str, text: str) -> None:
        self.seen[f"{len(self.seen)}: {what}"] = text

    def client(self, name: str, **fields: str) -> str:
        """Write a client's file; return its name."""
        given = {"tls_ca": "tls/ca.pem", **fields}
        (self.folder / name).write_text(yaml.safe_dump(given))
        return name

    def key(self, name: str, text: str, mode: int = 0o600) -> str:
        (self.folder / name).write_text(text)
        os.chmod(self.folder / name, mode)
        return name

    def collect_secrets(self) -> None:
        """Add every secret that is in a file now."""
        for path in self.folder.rglob("*.key"):
            text = path.read_text()
            if "PRIVATE KEY" in text:
                self.secrets |= {line for line in text.splitlines() if len(line) > 30}
            else:
                self.secrets |= set(re.findall(r"[0-9a-f]{64}", text))
        self.secrets.add((self.folder / "secret").read_text().strip())
        text = (self.folder / "identities.yaml").read_text()
        found = re.findall(r"\$([A-Za-z0-9+/=]{44}):([A-Za-z0-9+/=]{44})", text)
        assert found and "challenge_secret: " in text
        self.secrets |= {one for pair in found for one in pair}
        self.secrets |= set(re.findall(r"challenge_secret: (\S{44})", text))

    def needles(self) -> set[str]:
        """Return every form of every secret; each is long enough to be no accident."""
        found = set()
        for one in self.secrets:
            found |= {
                one,
                one.upper(),
                one[:20],
                one[-20:],
                base64.b64encode(one.encode()).decode(),
            }
            if re.fullmatch(r"[0-9a-f]{64}", one):
                raw = bytes.fromhex(one)
                found |= {base64.b64encode(raw).decode(), repr(raw)[2:-1]}
            elif re.fullmatch(r"[A-Za-z0-9+/]{43}=", one):
                found.add(base64.b64decode(one).hex())
        return {one for one in found if len(one) >= 12}

    def search(self) -> None:
        needles = self.needles()
        assert len(needles) > 50
        for what, text in self.seen.items():
            shown = [one for one in needles if one in text]
            assert not shown, f"{what} shows {shown[0][:6]}... of a secret"


@pytest.fixture
def group(tmp_path, capsys, monkeypatch):
    found = Fixture(tmp_path / "group", capsys, monkeypatch)
    with found.stack, contextlib.closing(Ports()) as ports:
        yield found, ports
        for process in found.processes:
            process.kill()
            process.wait()


def begin(found: Fixture, ports: Ports) -> str:
    """Make the files and start the nodes; return their addresses."""
    folder = found.folder
    found.run("init", str(folder), "--tls", security=None, code=0)
    others: dict[str, str] = {}
    for number in (1, 2):
        path = folder / f"node{number}.yaml"
        text = path.read_text().replace("file_size: 1GiB", "file_size: 1MiB")
        text = text.replace(
            "  http: tls  ", "  http: plain"
        )  # so that a token can be sent in the clear
        for port in re.findall(r"127\.0\.0\.1:(\d+)", text.partition("\nstore:")[0]):
            other = others.setdefault(port, str(ports.take()))
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
        path.write_text(text)
    tls, ids = str(folder / "tls"), str(folder / "identities.yaml")
    nodes = [word for number in (1, 2) for word in ("-c", str(folder / f"node{number}.yaml"))]
    found.run("keys", "ca", "--dir", tls, code=0)
    found.run("keys", "cert", "--dir", tls, *nodes, "--client", "app2", code=0)
    ops = ("keys", "new", "ops", "--admin", "--produce", "*", "--consume", "*", "--file", ids)
    found.run(*ops, "--out", str(folder / "ops.key"), code=0)
    app = ("keys", "new", "app", "--produce", "orders*", "--file", ids)
    found.run(*app, "--out", str(folder / "app.key"), "--json", code=0)
    found.client("app.yaml", identity="app", key_file="app.key")
    found.collect_secrets()
    for number in (1, 2):
        out = found.stack.enter_context(open(folder / f"node{number}.log", "wb"))
        command = [sys.executable, str(ROOT / "bin" / "hastore"), "serve"]
        process = subprocess.Popen(
            [*command, "-c", str(folder / f"node{number}.yaml")],
            env={**os.environ, "HASTORE_LOG": "DEBUG"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        found.processes.append(process)
    addresses = [f"127.0.0.1:{others[port]}" for port in ("10911", "10921")]
    return ",".join(addresses)


def titles(found: Fixture) -> None:
    """Keep the titles of the nodes and of their threads."""
    for process in found.processes:
        for name in (
            "cmdline",
            "comm",
            *(f"task/{t}/comm" for t in os.listdir(f"/proc/{process.pid}/task")),
        ):
            path = pathlib.Path(f"/proc/{process.pid}/{name}")
            with contextlib.suppress(OSError):  # a thread that has ended
                found.keep(str(path), path.read_text())


def http(found: Fixture, address: str, authorization: str) -> int:
    request = urllib.request.Request(f"http://{address}/status")
    request.add_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.keep("http", answer.read().decode())
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        found.keep("http", str(refused.headers) + refused.read().decode())
        return refused.code


@pytest.mark.full
def test_no_secret_shows_anywhere(group):
    found, ports = group
    addresses = begin(found, ports)
    folder, ids = found.folder, str(found.folder / "identities.yaml")
    where = ("--bootstrap", addresses)
    found.run("status", "--wait", str(START_S), *where, code=0)
    (folder / "line").write_text("a message\n")
    # What works.
    found.run("status", "--json", *where, code=0)
    found.run(
        "produce", "orders", "--file", str(folder / "line"), *where, security="app.yaml", code=0
    )
    found.run("consume", "orders", "--json", *where, code=0)
    found.run("query", "--topic", "orders", "--key", "none", *where)
    found.run("positions", "export", *where)
    found.run("doctor", "-c", str(folder / "node1.yaml"))
    found.run("keys", "list", "--file", ids, "--json", code=0)
    found.run("keys", "list", "--file", ids, code=0)
    found.run("promote", "-c", str(folder / "node2.yaml"), code=0)
    # What does not.
    good = (folder / "app.key").read_text().strip()
    wrong = secrets.token_hex(32)
    found.secrets.add(wrong)
    found.client("none.yaml")
    for name, text, mode in (
        ("wrong.key", wrong, 0o600),
        ("open.key", good, 0o644),
        ("long.key", good + "0", 0o600),
        ("two.key", f"{good}\n{wrong}\n", 0o600),
        ("binary.key", f"\0{good}", 0o600),
    ):
        found.key(name, text, mode)
        found.client(f"{name}.yaml", identity="app", key_file=name)
    found.client("nobody.yaml", identity="nobody", key_file="app.key")
    found.client("pasted.yaml", identity=good, key_file="app.key")  # the key where the name belongs
    wrong_ones = [
        *(f"{n}.key.yaml" for n in ("wrong", "open", "long", "two", "binary")),
        "none.yaml",
    ]
    produce = (*where, "--timeout", "1", "--file", str(folder / "line"))
    says = ("another key", "chmod 600", "64 hex digits", "64 hex digits", "64 hex digits", "asks")
    for client, why in (
        *zip(wrong_ones, says, strict=True),
        ("nobody.yaml", "another key"),
        ("pasted.yaml", "a key stands where a name belongs"),
    ):
        found.run("status", *where, "--timeout", "1", security=client, refused=why)
        found.run("produce", "orders", *produce, security=client, refused=why)
    found.run("consume", "orders", *where, security="app.yaml", refused="no right to consume")
    found.run("produce", "other", *produce, security="app.yaml", refused="no right to produce")
    with pytest.raises(HastoreError) as raised:
        with Producer(addresses.split(","), security=str(folder / "wrong.key.yaml")) as producer:
            producer.send_sync("orders", b"x")
    found.keep("an exception", repr(raised.value) + str(raised.value))
    with Producer(addresses.split(","), security=str(folder / "app.yaml")) as producer:
        found.keep("repr", repr(producer) + repr(vars(producer)))
        producer.send_sync("orders", b"y")
    with Consumer("orders", addresses.split(","), security=str(folder / "ops.yaml")) as consumer:
        found.keep("repr", repr(consumer) + repr(vars(consumer)))
    found.keep("repr", repr(Security(identity="app", key_file=str(folder / "app.key"))))
    for authorization in (
        f"Bearer app:{wrong}",
        f"Bearer nobody:{good}",
        f"Basic {base64.b64encode(f'app:{wrong}'.encode()).decode()}",
        f"Token {good}",
    ):
        address = yaml.safe_load((folder / "node1.yaml").read_text())["nodes"][1]["http"]
        assert http(found, address, authorization) in (401, 429)
    # Keys that change, and a file of identities with a key in the wrong place.
    found.run(
        "keys", "new", "app", "--rotate", "--file", ids, "--out", str(folder / "b.key"), code=0
    )
    found.collect_secrets()
    before = (folder / "identities.yaml").read_text()
    for broken in (f"{before}  {good}: 3\n", f"{before}{good}\n", before.replace("keys:", good)):
        (folder / "identities.yaml").write_text(broken)
        found.run("keys", "list", "--file", ids)
        wait_until(lambda: refreshed(found, where), 60, "the node does not see the broken file")
    (folder / "identities.yaml").write_text(before)
    found.run("keys", "revoke", "app", "--file", ids, code=0)
    found.run("produce", "orders", *produce, security="app.yaml", refused="another key")
    found.run("serve", "-c", str(folder / "node1.yaml"), "--check", code=0)
    os.chmod(folder / "secret", 0o644)
    found.run("serve", "-c", str(folder / "node1.yaml"), "--check", code=2)
    os.chmod(folder / "secret", 0o600)
    titles(found)
    for process in found.processes:
        process.send_signal(signal.SIGTERM)
    for number, process in enumerate(found.processes, 1):
        assert process.wait(START_S) == 0
        log = (folder / f"node{number}.log").read_text()
        assert "DEBUG" in log or "INFO" in log
        found.keep(f"the log of node {number}", log)
        audit = (folder / "data" / f"node{number}" / "hastore" / "audit.log").read_text()
        assert [json.loads(line) for line in audit.splitlines()]
        found.keep(f"the audit log of node {number}", audit)
    found.search()


def refreshed(found: Fixture, where: tuple[str, ...]) -> bool:
    time.sleep(0.2)
    return "the changed identities are not followed" in found.run("status", "--json", *where)


def test_the_search_finds_what_shows():
    found = Fixture(pathlib.Path("/none"), None, None)
    key = secrets.token_hex(32)
    found.secrets = {secrets.token_hex(32) for _ in range(20)} | {key}
    found.keep("good", "nothing")
    found.search()
    for text in (f"...{key}...", key[:20], base64.b64encode(bytes.fromhex(key)).decode()):
        found.seen = {"bad": f"text {text} text"}
        with pytest.raises(AssertionError, match="of a secret"):
            found.search()
