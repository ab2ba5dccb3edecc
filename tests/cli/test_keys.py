"""`hastore keys new`, `list`, `rights`, `revoke`: what they write, each wrong use in one line."""

import json
import os
import pathlib
import re
import secrets
import subprocess
import sys

import pytest
import yaml

from hastore.cli.common import DONE, FAILED, WRONG
from hastore.errors import AuthenticationError
from hastore.security.identities import Identities
from hastore.security.identity_editor import IdentityEditor
from hastore.security.identity_file import parse_identities, parse_time
from hastore.security.scram import ScramClient
from tests.cli.conftest import mode

KEY = re.compile(r"[0-9a-f]{64}")


@pytest.fixture
def keys(run_keys):
    """Run `hastore keys ...` on a file of identities; return code, stdout, stderr."""
    return lambda *words, file="ids.yaml": run_keys(*words, "--file", file)


def refused(result, says):
    code, out, err = result
    assert code in (WRONG, FAILED) and out == "" and err.count("\n") == 1, result
    assert says in err and "error: " in err, err


def prove(name, key_file, file="ids.yaml"):
    identities = Identities(file)
    key = read(key_file).strip()
    ours, theirs = ScramClient(name, key, secrets.token_urlsafe(18)), identities.exchange()
    ours.finish(theirs.prove(ours.final(theirs.challenge(ours.first()))))
    return identities.proved(theirs).identity


def read(path):
    return pathlib.Path(path).read_text()


def test_a_new_identity_proves_its_key_and_has_its_rights(keys):
    code, out, err = keys("new", "orders", "--produce", "orders-*", "--consume", "*")
    assert (code, err) == (DONE, "") and "orders.key" in out
    identity = prove("orders", "orders.key")
    assert identity.may_produce("orders-eu") and not identity.may_produce("x")
    assert identity.may_consume("x") and not identity.is_admin
    assert mode("orders.key") == mode("ids.yaml") == 0o600
    key = read("orders.key")
    assert key.endswith("\n") and KEY.fullmatch(key.strip())
    assert key.strip() not in out + read("ids.yaml")
    assert keys("new", "ops", "--admin", "--out", "secret/../ops.k")[0] != DONE
    assert keys("new", "ops", "--admin", "--out", "ops.k")[0] == DONE
    assert prove("ops", "ops.k").is_admin
    code, out, _ = keys("new", "node", "--certificate", "--consume", "a", "--consume", "b")
    assert code == DONE and not os.path.exists("node.key")
    assert Identities("ids.yaml").by_certificate("node").identity.consume == ("a", "b")


def test_an_identity_of_rocketmqs_clients_has_a_secret(keys):
    code, out, err = keys("new", "shop", "--rocketmq", "--consume", "Shop*", "--group", "shop*")
    assert (code, err) == (DONE, "") and "its secret is in shop.rocketmq.yml" in out
    assert mode("shop.rocketmq.yml") == mode("ids.yaml") == 0o600
    tools = yaml.safe_load(read("shop.rocketmq.yml"))  # as mqadmin reads it
    assert tools.keys() == {"accessKey", "secretKey"} and tools["accessKey"] == "shop"
    assert KEY.fullmatch(tools["secretKey"]) and tools["secretKey"] not in out
    found = Identities("ids.yaml")
    identity, (secret,) = found.secrets("shop")
    assert secret.text == tools["secretKey"] and "secret" not in repr(secret).replace("Secret", "")
    assert identity.may_join("shop1") and not identity.may_join("other") and not identity.keys
    assert keys("new", "shop", "--rocketmq", "--rotate", "--out", "2.yml")[0] == DONE
    found.refresh(0)
    assert len(found.secrets("shop")[1]) == 2
    code, out, _ = keys("list", "--json")
    (listed,) = map(json.loads, out.splitlines())
    assert listed["groups"] == ["shop*"] and len(listed["secrets"]) == 2 and not listed["keys"]
    assert tools["secretKey"] not in out and tools["secretKey"] not in keys("list")[1]
    assert "1 old key revoked" in keys("revoke", "shop", "--old")[1]
    found.refresh(0)
    (secret,) = found.secrets("shop")[1]
    assert secret.text == yaml.safe_load(read("2.yml"))["secretKey"] != tools["secretKey"]
    code, _, err = keys("new", "lost", "--rocketmq", "--consume", "*")
    assert code == DONE and "may be in no consumer group" in err


def test_the_umask_opens_nothing(keys):
    before = os.umask(0)
    try:
        assert keys("new", "orders")[0] == DONE
    finally:
        os.umask(before)
    assert mode("orders.key") == mode("ids.yaml") == 0o600
    before = os.umask(0o777)
    try:
        assert keys("new", "other")[0] == DONE
    finally:
        os.umask(before)
    assert mode("other.key") == mode("ids.yaml") == 0o600


def test_a_key_is_printed_only_when_asked(keys):
    code, out, _ = keys("new", "a", "--show")
    key = KEY.search(out)[0]
    assert code == DONE and not os.path.exists("a.key")
    with open("key", "w") as file:
        file.write(key)
    assert prove("a", "key").name == "a"
    made = json.loads(keys("new", "b", "--json")[1])
    assert made == {"name": "b", "file": "ids.yaml", "key_file": "b.key"}
    made = json.loads(keys("new", "c", "--json", "--show", "--out", "c.k")[1])
    assert made["key_file"] == "c.k" and read("c.k") == made["key"] + "\n"
    for line in (keys("list")[1], keys("list", "--json")[1], keys("revoke", "c")[1]):
        assert not KEY.search(line) and "SCRAM" not in line


def test_rotation_keeps_the_old_key_until_it_is_revoked(keys):
    keys("new", "orders", "--produce", "a")
    code, out, _ = keys("new", "orders", "--rotate", "--out", "second.key")
    assert code == DONE and "1 older key counts until you revoke them" in out
    for name in ("orders.key", "second.key"):
        assert prove("orders", name).may_produce("a")
    assert "1 old key revoked" in keys("revoke", "orders", "--old")[1]
    with pytest.raises(AuthenticationError):
        prove("orders", "orders.key")
    assert prove("orders", "second.key").may_produce("a")
    code, out, err = keys("revoke", "orders", "--old")
    assert (code, out) == (DONE, "") and "no old keys" in err
    assert json.loads(keys("revoke", "orders", "--json")[1]) == {
        **{"name": "orders", "file": "ids.yaml", "keys": 1, "identity_removed": True}
    }
    with pytest.raises(AuthenticationError):
        prove("orders", "second.key")


def test_rotation_to_a_given_time(keys):
    keys("new", "orders")
    made = json.loads(
        keys("new", "orders", "--rotate", "--old-until", "24h", "--out", "2", "--json")[1]
    )
    assert made["old_keys"] == 1
    found = json.loads(keys("list", "--json")[1])["keys"]
    lasts_ms = parse_time(found[0]["until"]) - parse_time(found[1]["made"])
    assert abs(lasts_ms - 86_400_000) <= 2_000 and found[1]["until"] is None
    assert prove("orders", "orders.key") and prove("orders", "2")
    # A later rotation never makes an old key count for longer.
    keys("new", "orders", "--rotate", "--old-until", "9999-01-01T00:00:00Z", "--out", "3")
    again = json.loads(keys("list", "--json")[1])["keys"]
    assert again[0]["until"] == found[0]["until"] and again[1]["until"] == "9999-01-01T00:00:00Z"
    text = read("ids.yaml").replace(found[0]["until"], "2001-01-01T00:00:00Z")
    with open("ids.yaml", "w") as file:
        file.write(text)
    with pytest.raises(AuthenticationError):
        prove("orders", "orders.key")
    assert "ended 2001-01-01T00:00:00Z" in keys("list")[1]
    keys("new", "orders", "--rotate", "--out", "4")  # which drops what has ended
    assert len(json.loads(keys("list", "--json")[1])["keys"]) == 3


def test_an_identity_of_a_certificate_may_get_a_key_too(keys):
    keys("new", "ops", "--admin", "--certificate")
    assert keys("new", "ops", "--rotate")[0] == DONE
    assert prove("ops", "ops.key").by_certificate


def test_what_a_person_wrote_into_the_file_stays(keys):
    keys("new", "orders", "--produce", "a")
    text = read("ids.yaml")
    text = text.replace('produce: ["a"]', "produce: [ a, 'b-*' ]   # the web shop")
    text = re.sub(r'made: "(.*?)"', r"made: \1", text)
    with open("ids.yaml", "w") as file:
        file.write("# ours\n" + text)
    assert (
        keys("new", "second")[0] == DONE and keys("new", "orders", "--rotate", "--out", "k")[0] == 0
    )
    after = read("ids.yaml")
    assert after.startswith("# ours\n") and "# the web shop" in after and "'b-*'" in after
    assert prove("orders", "k").produce == ("a", "b-*")


@pytest.mark.parametrize("name", ["007", "no", "null", "1e3", "2026-11-22", "a@b", "true", "0x1F"])
def test_names_that_yaml_takes_for_something_else(keys, name):
    assert keys("new", name)[0] == DONE
    assert keys("new", name, "--rotate", "--out", "k")[0] == DONE
    assert prove(name, "k").name == name == json.loads(keys("list", "--json")[1])["name"]
    assert keys("revoke", name, "--old")[0] == DONE and keys("revoke", name)[0] == DONE
    assert keys("new", name, "--out", "k2")[0] == DONE


@pytest.mark.parametrize(
    ("old", "new", "arguments"),
    [
        ("  7e2x:", "  7e2:", ("new", "b", "--show")),
        ("  7e2x:", "  7e2:", ("revoke", "7e2")),
        ("  7e2x:", "  7e2:", ("new", "7e2", "--rotate", "--show")),
        ('produce: ["t"]', "produce: [True]", ("new", "b", "--show")),
        ('produce: ["t"]', "produce: [True]", ("rights", "7e2x", "--admin")),
        ("  7e2x:", "  7e2:", ("rights", "7e2", "--no-admin", "--consume", "a")),
        ('produce: ["t"]', "produce: [1__0]", ("new", "7e2x", "--rotate", "--show")),
    ],
)
def test_what_only_a_node_takes_for_text_is_never_changed(keys, old, new, arguments):
    """A node reads YAML 1.1, the editor 1.2: a pattern `True` became `true`, another topic."""
    assert keys("new", "7e2x", "--produce", "t", "--show")[0] == DONE
    text = read("ids.yaml").replace(old, new)
    assert new in text
    pathlib.Path("ids.yaml").write_text(text)
    before = parse_identities(text.encode(), "").identities
    code, out, err = keys(*arguments)
    if code == DONE:
        after = parse_identities(read("ids.yaml").encode(), "").identities
        assert {name: after[name].rights for name in before} == {
            name: one.rights for name, one in before.items()
        }
    else:
        refused((code, out, err), "write it in quotes")
        assert read("ids.yaml") == text


def test_rights_change_and_nothing_else_does(keys):
    keys("new", "orders", "--produce", "a", "--consume", "b", "--group", "g")
    keys("new", "second", "--admin")
    text = read("ids.yaml").replace('produce: ["a"]', 'produce: ["a"]   # the web shop')
    pathlib.Path("ids.yaml").write_text("# ours\n" + text)
    code, out, err = keys("rights", "orders", "--produce", "a", "--produce", "c-*", "--admin")
    assert (code, err) == (DONE, "") and "produce: a,c-*  (was a)" in out, out
    assert "consume: b\n" in out and "admin:   yes  (was -)" in out
    identity = prove("orders", "orders.key")
    assert identity.rights == {
        "produce": ["a", "c-*"], "consume": ["b"], "groups": ["g"], "admin": True
    }  # fmt: skip
    assert read("ids.yaml").startswith("# ours\n") and "# the web shop" in read("ids.yaml")
    assert mode("ids.yaml") == 0o600 and prove("second", "second.key").is_admin
    gone = ("--no-produce", "--no-consume", "--no-group", "--no-admin")
    assert keys("rights", "orders", *gone)[0] == DONE
    identity = prove("orders", "orders.key")
    assert identity.rights == {"produce": [], "consume": [], "groups": [], "admin": False}
    assert keys("rights", "orders", "--any-group", "--consume", "*")[0] == DONE
    identity = prove("orders", "orders.key")
    assert identity.groups is None and identity.consume == ("*",)


def test_rights_without_an_option_are_shown(keys):
    keys("new", "orders", "--produce", "a")
    before = read("ids.yaml")
    assert keys("rights", "orders")[1].splitlines() == [
        "produce: a", "consume: -", "groups:  any", "admin:   -", "quota:   -"
    ]  # fmt: skip
    shown = json.loads(keys("rights", "orders", "--produce", "a", "--json")[1])
    assert shown == {
        "name": "orders", "file": "ids.yaml", "produce": ["a"], "consume": [], "groups": None,
        "admin": False, "quota": None, "changed": False,
    }  # fmt: skip
    assert read("ids.yaml") == before


def test_a_quota_is_set_and_removed(keys):
    keys("new", "orders")
    set_it = ("--quota", "bytes_per_s=10MiB", "--quota", "topics=0")
    shown = json.loads(keys("rights", "orders", *set_it, "--json")[1])
    assert shown["changed"] and shown["quota"] == {
        "requests_per_s": None, "bytes_per_s": 10 << 20, "topics": 0, "positions": None
    }  # fmt: skip
    assert "bytes_per_s: 10MiB" in read("ids.yaml")
    assert prove("orders", "orders.key").quota.topics == 0
    out = keys("rights", "orders", "--quota", "topics=")[1]
    assert "quota:   bytes_per_s=10485760  (was " in out
    code, out, _ = keys("rights", "orders", "--quota", "bytes_per_s=", "--quota", "positions=")
    assert code == DONE and "quota:   -  (was " in out
    assert prove("orders", "orders.key").quota is None and "quota" not in read("ids.yaml")


def test_an_empty_quota_of_the_file_is_no_change(keys):
    keys("new", "orders", "--produce", "a")
    text = read("ids.yaml").replace('produce: ["a"]', 'produce: ["a"]\n    quota: {}')
    pathlib.Path("ids.yaml").write_text(text)
    assert json.loads(keys("rights", "orders", "--json")[1])["changed"] is False
    assert read("ids.yaml") == text
    assert keys("rights", "orders", "--admin")[0] == DONE
    assert prove("orders", "orders.key").is_admin


def test_a_symbolic_link_stays_one(keys):
    keys("new", "orders", file="real.yaml")
    os.symlink("real.yaml", "ids.yaml")
    assert keys("new", "other")[0] == DONE
    assert os.path.islink("ids.yaml") and "other" in read("real.yaml")


def test_wrong_uses_are_one_line_and_change_nothing(keys, tmp_path):
    keys("new", "orders")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for words, says in (
        (("new", "orders"), "identity orders exists already; --rotate gives it another key"),
        (("new", "ORDERS"), "identity orders exists already"),
        (("new", "x", "--out", "orders.key"), "orders.key: exists already"),
        (("new", "x", "--out", "no/x"), "no/x: cannot be written: No such file or directory"),
        (("new", "x", "--out", "."), "exists already"),
        (("new", "x", "--out", "a\0b"), "cannot be written: embedded null byte"),
        (("new", "a b"), "'a b' is not a valid name; use 1 to 64"),
        (("new", "a\x1b[2Jb"), "is not a valid name"),
        (("new", "\u0430dmin"), "is not a valid name"),
        (("new", "e\u0301"), "is not a valid name"),
        (("new", "a:b"), "is not a valid name"),
        (("new", ""), "is not a valid name"),
        (("new", "n" * (1 << 20)), "is not a valid name"),
        (("new", "x", "--produce", "orders.*"), "'orders.*' is not a pattern of topics; use"),
        (("new", "x", "--consume", ""), "is not a pattern of topics"),
        (("new", "x", "--consume", "a" * 128), "longer than 127 characters"),
        (("new", "orders", "--rotate", "--admin"), "--rotate leaves the rights as they are"),
        (("new", "orders", "--rotate", "--old-until", "soon"), "'soon' is not a time; write 24h"),
        (("new", "orders", "--rotate", "--old-until", "0s"), "is over; give a time to come"),
        (("new", "orders", "--rotate", "--old-until", "9999999d"), "is not a time"),
        (("new", "orders", "--rotate", "--old-until", "2001-01-01T00:00:00Z"), "is over"),
        (("new", "x", "--old-until", "1h"), "--old-until needs --rotate"),
        (("new", "x", "--certificate", "--show"), "--certificate makes no key"),
        (("new", "x", "--certificate", "--rocketmq"), "--certificate makes no key"),
        (("new", "x", "--rocketmq", "--group", "a b"), "'a b' is not a pattern of groups"),
        (("new", "orders", "--rotate", "--group", "g"), "--rotate leaves the rights as they are"),
        (("new", "x", "--rotate"), "has no identity x; see `hastore keys list`"),
        (("rights", "x", "--admin"), "has no identity x"),
        (("rights", "orders", "--produce", "a", "--no-produce"), "--produce and its opposite"),
        (("rights", "orders", "--any-group", "--no-group"), "--group and its opposite"),
        (("rights", "orders", "--consume", "orders.*"), "'orders.*' is not a pattern of topics"),
        (("rights", "orders", "--group", "a b"), "'a b' is not a pattern of groups"),
        (("rights", "orders", "--quota", "topics"), "'topics' has no `=`"),
        (("rights", "orders", "--quota", "topic=1"), "'topic' is not a quota; use one of requests"),
        (("rights", "orders", "--quota", "topics=x"), "a quota: topics: "),
        (("rights", "orders", "--quota", "requests_per_s=0"), "a quota: requests_per_s: "),
        (("rights", "orders", *("--quota", "topics=1") * 2), "'topics' is given twice"),
        (("rights", "orders", *(f"--produce=t{n}" for n in range(257))), "at most 256"),
        (("revoke", "x"), "has no identity x"),
        (("revoke", "x\n", "--old"), "is not a valid name"),
        (("new",), "Missing argument 'NAME'"),
    ):
        refused(keys(*words), says)
        now = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert now == before, words
    for words in (("list",), ("revoke", "orders"), ("new", "orders", "--rotate")):
        refused(keys(*words, file="nope"), "nope: cannot be read: No such file or directory")
    refused(keys("new", "x", file="no/ids.yaml"), "name a file in a folder that exists")
    refused(keys("list", file="orders.key"), "is not a mapping of keys")  # and quotes no key


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("revoke", "orders"),
        ("new", "x"),
        ("new", "orders", "--rotate"),
        ("rights", "orders"),
    ],
)
def test_a_file_that_is_open_or_broken_is_left_alone(keys, words):
    keys("new", "orders")
    os.unlink("orders.key")
    os.chmod("ids.yaml", 0o644)
    refused(keys(*words), "ids.yaml: is open to other users; run chmod 600 ids.yaml")
    os.chmod("ids.yaml", 0o600)
    with open("ids.yaml", "a") as file:
        file.write("  second: {produce: 3, certificate: true}\n")
    before = read("ids.yaml")
    refused(keys(*words), "produce: must be a list")
    assert read("ids.yaml") == before and os.listdir(".") == ["ids.yaml"]


def test_at_most_eight_keys(keys):
    keys("new", "orders")
    for number in range(7):
        assert keys("new", "orders", "--rotate", "--out", f"k{number}")[0] == DONE
    refused(
        keys("new", "orders", "--rotate", "--out", "k8"), "run `hastore keys revoke orders --old`"
    )
    assert not os.path.exists("k8") and prove("orders", "orders.key") and prove("orders", "k6")


def test_commands_at_the_same_time_lose_nothing(keys):
    keys("new", "first")
    script = (
        "import sys; from hastore.cli.common import run_code; from hastore.cli.main import cli\n"
        "for n in range(3):\n"
        "    name = f'p{sys.argv[1]}-{n}'\n"
        "    assert run_code(cli, 'hastore', ['keys', 'new', name, '--file', 'ids.yaml']) == 0\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(number)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdout=subprocess.DEVNULL,
        )
        for number in range(3)
    ]
    assert [one.wait() for one in running] == [0, 0, 0]
    assert len(IdentityEditor("ids.yaml").identities) == 10
    assert not [name for name in os.listdir(".") if name.startswith(".hastore")]


def test_a_key_is_not_written_where_the_identities_are(keys):
    """The key was lost, and the command said that it was in that file."""
    for words in (("--out", "ids.yaml"), ("--out", "./ids.yaml")):
        refused(keys("new", "orders", *words), "is the file of identities")
    assert not os.path.exists("ids.yaml")


def test_revoking_counts_secrets_too(keys):
    keys("new", "shop", "--rocketmq")
    keys("new", "shop", "--rotate", "--rocketmq", "--out", "2")
    keys("new", "shop", "--rotate")
    assert json.loads(keys("revoke", "shop", "--json")[1])["keys"] == 3
