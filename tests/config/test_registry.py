"""The keys of the registry: each mistake is one line with file, line, key and remedy."""

import pytest

from hastore.cli.nodes import load_for
from hastore.config.checks import config_notes
from hastore.config.file import load_config
from hastore.errors import ConfigError

FILE = """\
cluster: c
group: g
node: 1
role: SYNC_MASTER
nodes:
  1: {api: "tcp://127.0.0.1:1", ha: "127.0.0.1:2", http: "127.0.0.1:3"}
  2: {api: "tcp://127.0.0.1:4", ha: "127.0.0.1:5", http: "127.0.0.1:6"}
store: {root: data}
"""


def load(tmp_path, more, base=FILE):
    path = tmp_path / "node.yaml"
    path.write_text(base + more)
    return load_config(str(path))


def test_the_default_is_the_file(tmp_path):
    assert load(tmp_path, "").registry is None
    assert load(tmp_path, "registry: null\n").registry is None


def test_a_registry_on_loopback_needs_no_credentials(tmp_path):
    config = load(tmp_path, "registry: zk://127.0.0.1:2181,localhost:2182\n")
    assert config.registry == "zk://127.0.0.1:2181,localhost:2182"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("registry: 127.0.0.1:2181\n", r"node.yaml:9: registry: .*does not begin with zk://; w"),
        ("registry: zk://127.0.0.1\n", "is not HOST:PORT of ZooKeeper; write zk://HOST:PORT"),
        ("registry: zk://127.0.0.1:2181/c/g\n", "cluster and group are keys of their own"),
        ("registry: zk://zoo:2181\n", "zoo is beyond loopback.*; set registry_acl_file"),
        ("registry: [a]\n", "registry: must be a single value"),
        ("registry: ''\n", "registry: is empty"),
        ("registry_acl_file: x\n", "is set, but registry is null; remove it"),
        ("registry_ca: x\n", "registry_ca: is set, but registry is null; remove it"),
        ("registry: zk://127.0.0.1:1\nregistry_ca: missing\n", "missing cannot be read"),
        ("registry: zk://127.0.0.1:1\nregistry_key: x\n", "is given without registry_certificate"),
        ("registry: zk://127.0.0.1:1\nregistry_certificate: x\n", "is given without registry_key"),
        (
            "registry: zk://127.0.0.1:1\nregistry_certificate: x\nregistry_key: x\n",
            "without registry_ca.*; set registry_ca to the CA of ZooKeeper's servers",
        ),
        ("registry_allow_unauthenticated: true\n", "is set, but registry is null; remove it"),
        ("registry_allow_plain_password: true\n", "is set, but registry is null; remove it"),
        (
            "registry: zk://zoo:2181\nregistry_allow_plain_password: true\n"
            "registry_allow_unauthenticated: true\n",
            "is true, but registry_acl_file is null; remove it",
        ),
        ("registry: zk://127.0.0.1:1\nregistry_acl_file: missing\n", "missing cannot be read"),
        ("registry: zk://127.0.0.1:1\nha: {classic_master: 'h:1'}\n", "SYNC_MASTER follows no"),
    ],
)
def test_mistakes(tmp_path, more, text):
    with pytest.raises(ConfigError, match=text) as failure:
        load(tmp_path, more)
    assert "\n" not in str(failure.value)


def test_a_loud_flag_allows_an_open_registry(tmp_path):
    more = "registry: zk://zoo:2181\nregistry_allow_unauthenticated: true\n"
    config = load(tmp_path, more)
    assert config.registry_allow_unauthenticated
    (note,) = config_notes(config)
    assert note.startswith("registry_allow_unauthenticated: true: whoever reaches ZooKeeper can ")
    more = "registry: zk://127.0.0.1:2181\nregistry_allow_unauthenticated: true\n"
    assert config_notes(load(tmp_path, more)) == []


def test_the_role_of_a_slave_of_rocketmq_is_in_its_file(tmp_path):
    more = "registry: zk://127.0.0.1:1\nha: {classic_master: 'h:1'}\n"
    with pytest.raises(ConfigError, match="role of a node that follows a RocketMQ master"):
        load(tmp_path, more, FILE.replace("SYNC_MASTER", "SLAVE"))


def test_a_group_that_elects_its_leader_has_no_registry(tmp_path):
    base = FILE.replace("role: SYNC_MASTER", "mode: dledger")
    with pytest.raises(ConfigError, match="registry: has no meaning in mode dledger: the nodes el"):
        load(tmp_path, "registry: zk://127.0.0.1:1\n", base)


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        ("user:pass\n", 0o644, "is open to other users; run chmod 600"),
        ("user\n", 0o600, "does not hold one line user:password"),
        (":pass\n", 0o600, "does not hold one line user:password"),
        ("user:\n", 0o600, "does not hold one line user:password"),
        ("user:pa ss\n", 0o600, "does not hold one line user:password"),
        ("a:b\nc:d\n", 0o600, "does not hold one line user:password"),
        ("", 0o600, "does not hold one line user:password"),
        ("user:" + "x" * 9_000, 0o600, "does not hold one line user:password"),
    ],
)
def test_the_file_of_credentials(tmp_path, content, mode, text):
    acl = tmp_path / "acl"
    acl.write_text(content)
    acl.chmod(mode)
    with pytest.raises(ConfigError, match=text) as failure:
        load(tmp_path, f"registry: zk://127.0.0.1:1\nregistry_acl_file: {acl}\n")
    assert "pass" not in str(failure.value).replace("password", "")


def credentials(tmp_path):
    acl = tmp_path / "acl"
    acl.write_text("user:p:a:s\n")
    acl.chmod(0o600)
    return f"registry_acl_file: {acl}\n"


def test_credentials_that_are_valid(tmp_path):
    config = load(tmp_path, f"registry: zk://127.0.0.1:2181\n{credentials(tmp_path)}")
    assert config.registry_acl_file == f"{tmp_path}/acl"


@pytest.mark.parametrize("more", ["", "registry_allow_unauthenticated: true\n"])
def test_the_password_does_not_cross_the_network_in_the_clear(tmp_path, more):
    """Who reads it on the way is an administrator of the group."""
    beyond = f"registry: zk://127.0.0.1:1,zoo:2181\n{credentials(tmp_path)}"
    with pytest.raises(ConfigError, match="zoo is beyond loopback.* in the clear; set registry_ca"):
        load(tmp_path, beyond + more)
    (tmp_path / "ca").write_text("PEM")
    assert load(tmp_path, f"{beyond}{more}registry_ca: {tmp_path}/ca\n")
    loud = f"{beyond}{more}registry_allow_plain_password: true\n"
    (note,) = config_notes(load(tmp_path, loud))
    assert note.startswith("registry_allow_plain_password is true: ")


@pytest.mark.parametrize("kind", ["master", "slave"])
def test_the_file_does_not_know_the_role_of_a_start(tmp_path, kind):
    load(tmp_path, "registry: zk://127.0.0.1:1\n")
    path = str(tmp_path / "node.yaml")
    assert load_for(path, {}, None).registry == "zk://127.0.0.1:1"
    with pytest.raises(ConfigError, match="start the node with hastore serve"):
        load_for(path, {}, kind)


def test_a_key_that_others_may_read_is_refused(tmp_path):
    for name, mode in (("ca", 0o644), ("cert", 0o644), ("key", 0o640)):
        (tmp_path / name).write_text("PEM")
        (tmp_path / name).chmod(mode)
    more = f"""registry: zk://127.0.0.1:1
registry_ca: {tmp_path}/ca
registry_certificate: {tmp_path}/cert
registry_key: {tmp_path}/key
"""
    with pytest.raises(ConfigError, match="registry_key: .* is open to other users; run chmod 600"):
        load(tmp_path, more)
    (tmp_path / "key").chmod(0o600)
    assert load(tmp_path, more).registry_ca == f"{tmp_path}/ca"
