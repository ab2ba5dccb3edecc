"""`hastore keys ca` and `hastore keys cert`: what they write, and every wrong use in one line."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from cryptography import x509

from hastore.addresses import is_numeric
from hastore.cli.common import DONE, WRONG
from hastore.config.file import load_config
from hastore.errors import ConfigError
from hastore.fs.private_files import replace_file
from hastore.security.certificates import names_of, not_after
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import NodeName, TlsEngine
from tests.cli.conftest import mode

NODE = """\
cluster: demo
group: g0
node: 2
role: SLAVE
nodes:
  1: {api: "tcp://n1.example:10911", ha: "10.0.0.1:10912", http: "127.0.0.1:10913"}
  2: {api: "tcp://n2.example:10921", ha: "10.0.0.2:10922", http: "127.0.0.1:10923"}
store:
  root: data
security:
  ca: tls/ca.pem
  certificate: tls/node2.pem
  key: tls/node2.key
  ha: tls
  api: tls
  identities: who
"""


@pytest.fixture
def keys(run_keys, tmp_path):
    """Run `hastore keys ...` in a folder with the file of node 2; return code, stdout, stderr."""
    (tmp_path / "node2.yaml").write_text(NODE)
    return run_keys


def refused(result, says):
    code, out, err = result
    assert code == WRONG and out == "" and err.count("\n") == 1, result
    assert says in err and err.startswith("error: "), err


def content(folder="tls"):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


def test_a_set_for_a_group_works_and_has_the_right_modes(keys):
    before = os.umask(0)
    try:
        code, out, err = keys("ca", "--dir", "tls")
        assert (code, err) == (DONE, "") and "off the nodes" in out
        code, out, err = keys("cert", "--dir", "tls", "-c", "node2.yaml", "--host", "n2", "--json")
    finally:
        os.umask(before)
    assert (code, err) == (DONE, "")
    made = json.loads(out)
    assert made["hosts"] == ["n2", "n2.example", "10.0.0.2", "127.0.0.1", "localhost", "::1"]
    assert mode("tls/ca.key") == mode("tls/node2.key") == 0o600 == mode(made["key"])
    assert mode("tls/ca.pem") == mode("tls/node2.pem") == 0o644 and mode("tls") == 0o700
    assert load_config("node2.yaml").security.ca == "tls/ca.pem"
    name = NodeName("demo", "g0", 2)
    node = TlsContexts(TlsFiles("tls/ca.pem", "tls/node2.pem", "tls/node2.key"), node=name)
    parsed = x509.load_pem_x509_certificate(pathlib.Path("tls/node2.pem").read_bytes())
    assert parsed.subject.rfc4514_string() == "CN=hastore node 2"

    code, out, _ = keys("cert", "--dir", "tls", "--client", "orders", "--client", "audit")
    assert code == DONE and mode("tls/client-audit.key") == 0o600
    orders = TlsFiles("tls/ca.pem", "tls/client-orders.pem", "tls/client-orders.key")
    for host in made["hosts"]:
        caller = TlsEngine(TlsContexts(orders).client(), server_side=False, host=host)
        called = TlsEngine(node.server(require_certificate=True), server_side=True)
        for _ in range(3):
            called.receive(caller.take_outgoing())
            caller.receive(called.take_outgoing())
        assert caller.failure is None and caller.peer.node == name, host
        assert called.peer.common_name == "orders"


def test_what_to_write_into_the_file_is_shown_only_if_it_is_not_there(keys):
    keys("ca", "--dir", "tls")
    code, out, _ = keys("cert", "--dir", "tls", "-c", "node2.yaml")
    assert code == DONE and out.count("\n") == 1 and "security:" not in out
    for old, new in (("key: tls/node2.key", "key: null"), ("tls/ca.pem", "tls/other.pem")):
        pathlib.Path("node2.yaml").write_text(NODE.replace(old, new))
        code, out, _ = keys("cert", "--dir", "tls", "-c", "node2.yaml", "--renew")
        assert code == DONE and "On the node, in node2.yaml:" in out
        assert "  security:\n" in out and out.endswith("/tls/node2.key\n")


def test_nothing_is_overwritten_unless_asked(keys):
    keys("ca", "--dir", "tls")
    keys("cert", "--dir", "tls", "-c", "node2.yaml")
    before = content()
    refused(keys("ca", "--dir", "tls"), "ca.pem: exists already")
    refused(keys("cert", "--dir", "tls", "-c", "node2.yaml"), "node2.pem: exists already")
    os.remove("tls/node2.pem")
    refused(keys("cert", "--dir", "tls", "-c", "node2.yaml"), "node2.key: exists already")
    refused(
        keys("cert", "--dir", "tls", "-c", "node2.yaml", "--renew"), "there is nothing to renew"
    )
    pathlib.Path("tls/node2.pem").write_bytes(before["node2.pem"])
    assert content() == before
    assert keys("cert", "--dir", "tls", "-c", "node2.yaml", "--renew", "--days", "9")[0] == DONE
    after = content()
    assert {name for name in after if after[name] != before[name]} == {"node2.pem", "node2.key"}
    assert mode("tls/node2.key") == 0o600 and mode("tls/node2.pem") == 0o644
    ends = [not_after(one["node2.pem"]) for one in (before, after)]
    assert ends[0] > ends[1]


@pytest.mark.parametrize("broken_off", [ConfigError, KeyboardInterrupt])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_renewal_that_is_broken_off_leaves_a_pair_that_fits(
    keys, monkeypatch, broken_off, replaced
):
    keys("ca", "--dir", "tls")
    keys("cert", "--dir", "tls", "-c", "node2.yaml")
    before = content()

    def replace(path, data, mode):
        if path.endswith(".key") or replaced:
            replace_file(path, data, mode)
        if path.endswith(".pem"):
            raise broken_off(f"{path}: cannot be written")

    monkeypatch.setattr("hastore.cli.certificates.replace_file", replace)
    if broken_off is ConfigError:
        refused(keys("cert", "--dir", "tls", "-c", "node2.yaml", "--renew"), "cannot be written")
    else:
        assert keys("cert", "--dir", "tls", "-c", "node2.yaml", "--renew")[0] != DONE
    after = content()
    changed = {name for name in after if after[name] != before[name]}
    assert changed == ({"node2.pem", "node2.key"} if replaced else set())


def test_a_certificate_is_valid_no_longer_than_its_ca(keys):
    keys("ca", "--dir", "tls", "--days", "3")
    _, _, told = keys("cert", "--dir", "tls", "--client", "orders", "--days", "300")
    assert "valid until the CA ends" in told and "replace the CA" in told
    assert "the CA ends" not in keys("cert", "--dir", "tls", "--client", "a", "--days", "1")[2]
    assert len({not_after(content()[name]) for name in ("ca.pem", "client-orders.pem")}) == 1


def test_wrong_uses_are_one_line(keys, tmp_path):
    refused(keys("cert", "--dir", "tls", "--client", "a"), "ca.pem: cannot be read")
    (tmp_path / "file").write_text("")
    refused(keys("ca", "--dir", "file/tls"), "file/tls cannot be made")
    refused(keys("ca", "--dir", "tls", "--name", ""), "--name")
    refused(keys("ca", "--dir", "tls", "--days", "0"), "--days")
    keys("ca", "--dir", "tls")
    keys("ca", "--dir", "other")
    for words, says in (
        ((), "give -c NODE.yaml"),
        (("--client", "a b"), "not a valid name"),
        (("--client", "../a"), "not a valid name"),
        (("--client", "a", "--host", "x"), "--host needs -c"),
        (("-c", "node2.yaml", "--host", "a_b"), "neither a host name"),
        (("-c", "node2.yaml", "-c", "node1.yaml", "--host", "x"), "belongs to one node"),
        (("-c", "node9.yaml"), "node9.yaml: cannot be read"),
        (("--client", "a", "--days", "99999999"), "--days"),
        (("--client", "a", "--renew"), "there is nothing to renew"),
    ):
        refused(keys("cert", "--dir", "tls", *words), says)
    os.chmod("tls/ca.key", 0o640)
    refused(keys("cert", "--dir", "tls", "--client", "a"), "run chmod 600")
    os.replace("other/ca.key", "tls/ca.key")
    refused(keys("cert", "--dir", "tls", "--client", "a"), "is not the key of ca.pem")
    pathlib.Path("tls/ca.key").write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n")
    refused(keys("cert", "--dir", "tls", "--client", "a"), "are not a CA in PEM")
    assert sorted(content()) == ["ca.key", "ca.pem"]


def test_a_node_with_wildcards_needs_a_name(keys, tmp_path):
    text = NODE
    for old in ("n2.example", "10.0.0.2", "127.0.0.1:10923"):
        text = text.replace(old, "0.0.0.0:10923" if ":" in old else "0.0.0.0")
    (tmp_path / "node2.yaml").write_text(text)
    keys("ca", "--dir", "tls")
    refused(keys("cert", "--dir", "tls", "-c", "node2.yaml"), "only wildcard addresses")
    code, out, _ = keys("cert", "--dir", "tls", "-c", "node2.yaml", "--host", "n2", "--json")
    assert code == DONE and json.loads(out)["hosts"] == ["n2"]


def test_without_the_library_the_commands_say_what_to_install(tmp_path):
    script = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from hastore.cli.common import run_code; from hastore.cli.main import cli\n"
        "sys.exit(run_code(cli, 'hastore', ['keys', 'ca', '--dir', 'tls']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == WRONG and "hastore[tls]" in done.stderr, done
    assert list(tmp_path.iterdir()) == []


def test_a_renewal_keeps_the_names_that_host_has_given(keys):
    """Clients that reach the node by such a name were locked out within seconds."""
    keys("ca", "--dir", "tls")
    keys("cert", "--dir", "tls", "-c", "node2.yaml", "--host", "lb.example", "--host", "10.9.9.9")
    moved = NODE.replace("127.0.0.1:10923", "10.0.0.2:10923")
    pathlib.Path("node2.yaml").write_text(moved)
    code, out, err = keys("cert", "--dir", "tls", "-c", "node2.yaml", "--renew", "--json")
    assert code == DONE and "lb.example, 10.9.9.9 stays in" in err, err
    names = ["n2.example", "10.0.0.2", "lb.example", "10.9.9.9"]
    assert json.loads(out)["hosts"] == names, "those of loopback only while the node is there"
    assert names_of(pathlib.Path("tls/node2.pem").read_bytes()) == sorted(names, key=is_numeric)
    given = ("--renew", "--host", "new.example", "--json")
    code, out, err = keys("cert", "--dir", "tls", "-c", "node2.yaml", *given)
    assert (code, err) == (DONE, "")
    assert json.loads(out)["hosts"] == ["new.example", "n2.example", "10.0.0.2"]
    pathlib.Path("tls/node2.pem").write_text("junk")
    code, _, err = keys("cert", "--dir", "tls", "-c", "node2.yaml", "--renew")
    assert code == DONE and "names that --host gave it are not kept" in err


def test_a_name_of_a_ca_is_bounded_in_bytes(keys):
    """It ended in a traceback."""
    refused(keys("ca", "--dir", "tls", "--name", "ü" * 33), "--name: use 1 to 64")
    assert keys("ca", "--dir", "tls", "--name", "ü" * 32)[0] == DONE


def test_a_ca_that_is_being_replaced_signs_with_its_own_key(keys):
    """Every ca.pem has both then, in any order, also that beside the new key."""
    keys("ca", "--dir", "old", "--name", "old")
    keys("ca", "--dir", "new", "--name", "new")
    old, new = (pathlib.Path(f"{name}/ca.pem").read_bytes() for name in ("old", "new"))
    for place, both in enumerate((old + new, new + old)):
        pathlib.Path("new/ca.pem").write_bytes(both)
        done = keys("cert", "--dir", "new", "--client", f"c{place}")
        assert done[0] == DONE, done
        made = pathlib.Path(f"new/client-c{place}.pem").read_bytes()
        assert x509.load_pem_x509_certificate(made).issuer.rfc4514_string() == "CN=new"
    pathlib.Path("new/ca.pem").write_bytes(old)
    refused(keys("cert", "--dir", "new", "--client", "x"), "is not the key of ca.pem")
