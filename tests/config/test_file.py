"""The configuration file: what is read, the text of each error, and the edit of the role."""

import os
import pathlib
import re
import stat
import types
import typing

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hastore.config.file import edit_role, load_config, parse_config, parse_overrides
from hastore.config.model import (
    AckPoint,
    ApiConfig,
    Config,
    Flush,
    HAConfig,
    RetentionConfig,
    Role,
    StoreConfig,
    SyncFrom,
)
from hastore.errors import ConfigError

CONF = pathlib.Path(__file__).resolve().parent.parent.parent / "conf"

PAIR = """\
cluster: demo   # line 1
group: g0
node: 1
role: SYNC_MASTER
acks: 1
nodes:
  1: {api: "tcp://127.0.0.1:10911", ha: "127.0.0.1:10912", http: "127.0.0.1:10913"}
  2: {api: "tcp://127.0.0.1:10921", ha: "127.0.0.1:10922", http: "127.0.0.1:10923"}
store: {root: /tmp/x, commitlog_file_size: 1GiB, flush: async}
ha:
  ack_point: written
"""

ALONE = """\
cluster: demo
group: g0
node: 1
role: ASYNC_MASTER
nodes: {1: {api: "tcp://127.0.0.1:1", ha: "127.0.0.1:2", http: "127.0.0.1:3"}}
store: {root: /tmp/x}
"""


def refusal(text, **overrides):
    """Return the one-line error that the text raises."""
    with pytest.raises(ConfigError) as refused:
        parse_config(
            text, "x.yaml", {key.replace("__", "."): value for key, value in overrides.items()}
        )
    assert "\n" not in str(refused.value)
    return str(refused.value)


def changed(text, old, new):
    assert old in text
    return text.replace(old, new)


def test_the_configuration_of_a_pair_is_read():
    config = parse_config(PAIR, "x.yaml")
    assert (config.cluster, config.group, config.node, config.role) == (
        "demo",
        "g0",
        1,
        Role.SYNC_MASTER,
    )
    assert config.nodes[2].ha == "127.0.0.1:10922"
    assert config.store == StoreConfig(root="/tmp/x")
    assert config.store.commitlog_file_size == 2**30
    assert config.store.flush is Flush.ASYNC
    assert config.effective_acks == 1


@pytest.mark.parametrize("name", ["master.yaml", "slave.yaml"])
def test_the_files_of_conf_work_and_document_every_key_with_its_default(name):
    config = load_config(str(CONF / name))
    assert config.ha == HAConfig()
    assert config.api == ApiConfig()
    assert config.store == StoreConfig(root=config.store.root)
    tree = yaml.safe_load((CONF / name).read_text())
    for section, kind in (("store", StoreConfig), ("ha", HAConfig), ("api", ApiConfig)):
        fields = {field.name.removesuffix("_ms") for field in msgspec.structs.fields(kind)}
        assert set(tree[section]) == fields - {"retention"}
    assert set(tree["retention"]) == {"max_age", "max_size", "hold", "check_interval"}


def test_the_files_of_conf_are_two_nodes_of_one_group():
    master, slave = (load_config(str(CONF / name)) for name in ("master.yaml", "slave.yaml"))
    assert (master.role, slave.role) == (Role.SYNC_MASTER, Role.SLAVE)
    assert master.nodes == slave.nodes and master.node != slave.node
    assert (master.cluster, master.group) == (slave.cluster, slave.group)
    assert master.store.root != slave.store.root


def test_every_key_is_read_with_its_unit():
    text = (
        changed(PAIR, "/tmp/x, commitlog_file_size: 1GiB, flush: async", "/tmp/x, flush: sync")
        + "  ack_point2: 1\n"
    )
    text = changed(text, "  ack_point: written\n  ack_point2: 1\n", "")
    text += """\
  ack_point: flushed
  allow_classic_peers: true
  count_classic_peers: true
  sync_from: last
  heartbeat_interval: 500ms
  housekeeping_interval: 2s
  slave_timeout: 1m
  transfer_batch_size: 32KiB
  max_gap_not_in_sync: 268_435_456
retention: {max_age: 72h, max_size: 1TiB, hold: 0s, check_interval: 1d}
api: {max_pending_bytes: 16MiB}
"""
    config = parse_config(text, "x.yaml")
    assert config.store.flush is Flush.SYNC
    ha = config.ha
    assert (ha.ack_point, ha.sync_from) == (AckPoint.FLUSHED, SyncFrom.LAST)
    assert ha.allow_classic_peers and ha.count_classic_peers
    assert (ha.heartbeat_interval_ms, ha.housekeeping_interval_ms) == (500, 2_000)
    assert (ha.slave_timeout_ms, ha.transfer_batch_size) == (60_000, 32 * 1024)
    assert ha.max_gap_not_in_sync == 256 * 2**20
    assert config.store.retention == RetentionConfig(
        max_age_ms=72 * 3_600_000, max_size_bytes=2**40, hold_ms=0, check_interval_ms=86_400_000
    )
    assert config.api.max_pending_bytes == 16 * 2**20


@pytest.mark.parametrize("kind", [RetentionConfig, StoreConfig, HAConfig, ApiConfig, Config])
def test_every_number_has_a_range_and_its_default_lies_in_it(kind):
    for field in msgspec.structs.fields(kind):
        inner = [one for one in typing.get_args(field.type) if one is not types.NoneType]
        optional = typing.get_origin(field.type) is types.UnionType
        annotated = inner[0] if optional else field.type
        assert annotated is not int, f"{field.name} has no Range"
        if typing.get_origin(annotated) is typing.Annotated and not optional and not field.required:
            (allowed,) = annotated.__metadata__
            assert allowed.least <= field.default <= allowed.most, field.name


def test_a_relative_root_is_relative_to_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = parse_config(changed(PAIR, "/tmp/x", "data/node1"), "elsewhere/x.yaml")
    assert config.store.root == str(tmp_path / "data" / "node1")


def test_overrides_set_existing_and_new_keys():
    overrides = parse_overrides(
        [
            "store.flush=sync",
            "retention.max_age=1h",
            "nodes.1.http=127.0.0.1:0",
            "ha.classic_master=",
        ]
    )
    config = parse_config(PAIR, "x.yaml", overrides)
    assert config.store.flush is Flush.SYNC
    assert config.store.retention.max_age_ms == 3_600_000
    assert config.nodes[1].http == "127.0.0.1:0"
    assert config.ha.classic_master is None


def test_an_override_does_not_change_an_alias():
    text = changed(PAIR, "  1: {", "  1: &one {")
    text = text.replace(text.splitlines()[7], "  2: *one")
    overrides = {f"nodes.2.{name}": f"127.0.0.1:{port}" for name, port in (("ha", 2), ("http", 3))}
    config = parse_config(text, "x.yaml", overrides | {"nodes.2.api": "tcp://127.0.0.1:1"})
    assert config.nodes[1].ha == "127.0.0.1:10912" and config.nodes[2].ha == "127.0.0.1:2"


def test_an_override_names_itself_in_its_error():
    assert refusal(PAIR, role="SLAVE").startswith("-o role: ")
    assert refusal(PAIR, ha__hartbeat="1s").startswith("-o ha.hartbeat: is unknown; ")
    assert refusal(PAIR, acks="x").startswith("-o acks: 'x' is not a whole number;")
    assert "not a section" in refusal(PAIR, node__x="1")


@pytest.mark.parametrize("pair", ["store.flush", "=x", "  =x"])
def test_an_override_without_key_or_value_is_refused(pair):
    with pytest.raises(ConfigError, match="not an assignment"):
        parse_overrides([pair])


# name -> old text, new text, what the error must contain; "x.yaml:12:" is the line
REFUSED = {
    "unknown top key": ("acks: 1", "akcs: 1", "x.yaml:5: akcs: is unknown; did you mean acks?"),
    "unknown ha key": ("ack_point: written", "ack_pint: 1", "x.yaml:11: ha.ack_pint: is unknown"),
    "unknown node key": (', http: "127.0.0.1:10923"', ", x: 1", "x.yaml:8: nodes.2.x: is unknown"),
    "missing address": (', http: "127.0.0.1:10923"', "", "x.yaml:8: nodes.2.http: is missing"),
    "key twice": ("acks: 1", "node: 2", "x.yaml:5: node: is given twice (also line 3)"),
    "node twice": ("  2: {", "  1: {", "x.yaml:8: nodes.1: is given twice (also line 7)"),
    "node twice, spelt otherwise": (
        "  2: {",
        "  01: {",
        "x.yaml:8: nodes.01: node 1 is listed twice",
    ),
    "own node missing": ("node: 1", "node: 3", "x.yaml:3: node: node 3 is missing from nodes"),
    "node 0": ("node: 1", "node: 0", "x.yaml:3: node: 0 is out of range; use 1 to 65535"),
    "node 65536": ("  2: {", "  65536: {", "x.yaml:8: nodes.65536: is not a node number"),
    "node -1": ("node: 1", "node: -1", "x.yaml:3: node: -1 is out of range"),
    "node x": ("  2: {", "  two: {", "x.yaml:8: nodes.two: is not a node number"),
    "acks 0": (
        "acks: 1",
        "acks: 0",
        "x.yaml:5: acks: 0 means that no slave confirms a synchronous put; use 1 to 1 (an "
        "ASYNC_MASTER waits for none all the same)",
    ),
    "acks 2 of 2": (
        "acks: 1",
        "acks: 2",
        "x.yaml:5: acks: 2 slaves cannot confirm a put in a group of 2",
    ),
    "bad role": (
        "SYNC_MASTER",
        "MASTER",
        "x.yaml:4: role: 'MASTER' is not one of ASYNC_MASTER, SYNC_MASTER",
    ),
    "role missing": ("role: SYNC_MASTER\n", "", "x.yaml: role: is missing"),
    "bad address": (
        "127.0.0.1:10922",
        "127.0.0.1",
        "x.yaml:8: nodes.2.ha: '127.0.0.1' is not an address",
    ),
    "api without tcp": (
        "tcp://127.0.0.1:10921",
        "127.0.0.1:10921",
        "nodes.2.api: '127.0.0.1:10921' is not an address",
    ),
    "port too high": ("127.0.0.1:10922", "127.0.0.1:65536", "nodes.2.ha:"),
    "bad host": ("127.0.0.1:10922", "127.0.0.1.5:1", "nodes.2.ha:"),
    "a slave of itself": (
        "127.0.0.1:10922",
        "127.0.0.1:10912",
        "x.yaml:8: nodes.2.ha: 127.0.0.1:10912 is also",
    ),
    "the same by name": (
        "127.0.0.1:10922",
        "localhost:10912",
        "nodes.2.ha: localhost:10912 is also nodes.1.ha",
    ),
    "two ports alike": (
        "127.0.0.1:10923",
        "127.0.0.1:10922",
        "nodes.2.http: 127.0.0.1:10922 is also nodes.2.ha",
    ),
    "bad size": (
        "1GiB",
        "1GB",
        "x.yaml:9: store.commitlog_file_size: '1GB' has the unit 'GB'; write a size",
    ),
    "tiny file": (
        "1GiB",
        "1KiB",
        "x.yaml:9: store.commitlog_file_size: 1024 bytes is out of range; use 4096 to",
    ),
    "huge file": ("1GiB", "2GiB", "2147483648 bytes is out of range: RocketMQ"),
    "negative size": ("1GiB", "-1GiB", "is out of range"),
    "absurd size": ("1GiB", "9" * 30, "is not a size"),
    "bad flush": (
        "flush: async",
        "flush: often",
        "x.yaml:9: store.flush: 'often' is not one of async, sync",
    ),
    "no root": ("root: /tmp/x, ", "", "x.yaml:9: store.root: is missing"),
    "root is a list": ("root: /tmp/x", "root: [a]", "x.yaml:9: store.root: must be a single value"),
    "root has a NUL": ("root: /tmp/x", 'root: "a\\0b"', "store.root: contains a NUL byte"),
    "time without unit": (
        "ack_point: written",
        "slave_timeout: 5",
        "ha.slave_timeout: '5' has no unit",
    ),
    "time with a wrong unit": (
        "ack_point: written",
        "slave_timeout: 5w",
        "has the unit 'w'; write a time",
    ),
    "not a truth": (
        "ack_point: written",
        "allow_classic_peers: 1",
        "'1' is neither true nor false",
    ),
    "a section is a list": ("  ack_point: written", "  - 1", "x.yaml:10: ha: must be a mapping"),
    "heartbeat too slow": (
        "ack_point: written",
        "heartbeat_interval: 20s",
        "ha.heartbeat_interval: is not less than",
    ),
    "counted, not allowed": (
        "ack_point: written",
        "count_classic_peers: true",
        "ha.count_classic_peers: is true, but ha.allow_classic_peers is false",
    ),
    "a master follows": (
        "ack_point: written",
        'classic_master: "1.2.3.4:5"',
        "SYNC_MASTER follows no master",
    ),
    "a tag": (
        "root: /tmp/x",
        "root: !!python/name:os.system x",
        "x.yaml:9: store.root: has the tag",
    ),
    "bad cluster": (
        "cluster: demo",
        "cluster: a/b",
        "x.yaml:1: cluster: 'a/b' is not a valid name",
    ),
    "no value": ("group: g0", "group:", "x.yaml:2: group: has no value"),
    "beyond loopback": (
        "127.0.0.1:10912",
        "10.0.0.1:10912",
        "x.yaml:7: nodes.1.ha: 10.0.0.1 is beyond loopback",
    ),
    "http beyond loopback": (
        "127.0.0.1:10913",
        "0.0.0.0:10913",
        "nodes.1.http: 0.0.0.0 is beyond loopback",
    ),
    "api beyond loopback": (
        "tcp://127.0.0.1:10911",
        "tcp://[::]:10911",
        "nodes.1.api: :: is beyond loopback",
    ),
    "no yaml": ("nodes:", "nodes: [", "x.yaml:"),
    "a tab": ("  ack_point", "\tack_point", "x.yaml:11: is not valid YAML"),
    "an unknown alias": ("group: g0", "group: *g", "x.yaml:2: is not valid YAML"),
}


@pytest.mark.parametrize(("old", "new", "expected"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_file_line_key_and_remedy(old, new, expected):
    assert expected in refusal(changed(PAIR, old, new))


def test_a_slave_of_itself_by_classic_master_is_refused():
    text = changed(PAIR, "SYNC_MASTER", "SLAVE") + '  classic_master: "127.0.0.1:10912"\n'
    assert "x.yaml:12: ha.classic_master: 127.0.0.1:10912 is nodes.1.ha" in refusal(text)


def test_a_group_of_one():
    assert parse_config(ALONE, "x.yaml").effective_acks == 0
    assert parse_config(ALONE + "acks: 5\n", "x.yaml").effective_acks == 0
    alone = changed(ALONE, "ASYNC_MASTER", "SYNC_MASTER")
    assert "x.yaml:4: role: a SYNC_MASTER needs a slave" in refusal(alone)
    slave = changed(ALONE, "ASYNC_MASTER", "SLAVE")
    assert "x.yaml:4: role: nodes lists only this node" in refusal(slave)
    assert (
        parse_config(slave + "ha: {classic_master: 'rocket:10912'}\n", "x.yaml").role is Role.SLAVE
    )


def test_counted_classic_peers_stand_in_for_slaves():
    alone = changed(ALONE, "ASYNC_MASTER", "SYNC_MASTER")
    counted = alone + "ha: {allow_classic_peers: true, count_classic_peers: true}\n"
    assert parse_config(counted, "x.yaml").role is Role.SYNC_MASTER


def test_a_flag_or_a_secret_allows_addresses_beyond_loopback(tmp_path):
    text = changed(PAIR, "127.0.0.1:10912", "10.0.0.1:10912")
    assert (
        parse_config(text + "  allow_unauthenticated: true\n", "x.yaml").nodes[1].ha
        == "10.0.0.1:10912"
    )
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    assert parse_config(text + f"  secret_file: {secret}\n", "x.yaml").ha.secret_file == str(secret)
    text = changed(PAIR, "127.0.0.1:10911", "10.0.0.1:10911")
    assert parse_config(text + "api: {allow_unauthenticated: true}\n", "x.yaml")


def test_where_a_rocketmq_master_serves_its_clients(tmp_path):
    key = tmp_path / "tools.yml"
    key.write_text("accessKey: hastore\nsecretKey: 12345678\n")
    key.chmod(0o600)
    text = changed(PAIR, "SYNC_MASTER", "SLAVE") + "  classic_master: 'b:10912'\n"
    ha = parse_config(
        text + f"  classic_broker: 'b:1'\n  classic_key_file: {key}\n", "x.yaml"
    ).ha
    assert (ha.classic_broker, ha.classic_key_file) == ("b:1", str(key))
    assert "write HOST:PORT" in refusal(text + "  classic_broker: b\n")
    assert "write HOST:PORT" in refusal(text + "  classic_broker: 'b:0'\n")
    key.chmod(0o644)
    assert "chmod 600" in refusal(text + f"  classic_key_file: {key}\n")
    key.chmod(0o600)
    key.write_text("accessKey: hastore\n")
    assert "has no line secretKey:" in refusal(text + f"  classic_key_file: {key}\n")
    key.write_text("accessKey: hastore\nsecretKey: two words\n")
    assert "has no line secretKey:" in refusal(text + f"  classic_key_file: {key}\n")
    assert "cannot be read" in refusal(text + f"  classic_key_file: {tmp_path / 'none'}\n")


def test_a_bad_secret_file_is_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    secret.chmod(0o644)
    assert "x.yaml:12: ha.secret_file: " in refusal(PAIR + f"  secret_file: {secret}\n")
    assert "chmod 600" in refusal(PAIR + f"  secret_file: {secret}\n")
    assert "cannot be read" in refusal(PAIR + f"  secret_file: {tmp_path / 'none'}\n")
    secret.chmod(0o600)
    secret.write_bytes(b"short\n")
    assert "bytes" in refusal(PAIR + f"  secret_file: {secret}\n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "- 1",
        "1",
        "[" * 5_000,
        "{" * 5_000,
        "a: &a [*a]",
        "\ufeff",
        "a: b: c",
        "? [1]\n: 2",
        "%",
    ],
)
def test_a_text_that_is_no_configuration_raises_a_one_line_error(text):
    refusal(text)


def test_a_missing_or_non_utf8_or_too_large_file_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(path))
    path.write_bytes(b"cluster: demo\ngroup: \xff\n")
    with pytest.raises(ConfigError, match=r"x.yaml:2: is not UTF-8"):
        load_config(str(path))
    path.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_config(str(path))


@settings(max_examples=300, deadline=None, print_blob=True)
@given(st.data())
def test_no_text_breaks_the_reader(data):
    """Cut, repeat and splice lines at random: the text is read, or raises a one-line error."""
    lines = PAIR.splitlines(keepends=True)
    pieces = data.draw(
        st.lists(st.sampled_from([*lines, "  x: [1", "acks: !!float 1\n", "\0", "'"]))
    )
    noise = data.draw(st.text(max_size=20))
    try:
        parse_config("".join(pieces) + noise, "x.yaml")
    except ConfigError as refused:
        assert "\n" not in str(refused)


# -- the edit of the role


def test_the_edit_changes_the_role_alone(tmp_path):
    path = tmp_path / "node.yaml"
    before = (CONF / "master.yaml").read_text()
    path.write_text(before)
    edit_role(str(path), Role.SLAVE)
    differ = [
        (old, new)
        for old, new in zip(before.splitlines(), path.read_text().splitlines(), strict=True)
        if old != new
    ]
    assert len(differ) == 1 and differ[0][0].startswith("role: SYNC_MASTER")
    assert re.match(r"role: SLAVE +# required; ", differ[0][1])
    assert load_config(str(path)).role is Role.SLAVE
    edit_role(str(path), Role.SYNC_MASTER)
    assert path.read_text() == before


EDITS = [
    ("role: SLAVE", "role: SYNC_MASTER"),
    ("role:  'SLAVE'   # old", "role:  SYNC_MASTER # old"),
    ("role: SLAVE         # here", "role: SYNC_MASTER   # here"),
    ('"role": "SLAVE"', '"role": SYNC_MASTER'),
    ("role:", "role: SYNC_MASTER"),
    ("role: !!str SLAVE", "role: SYNC_MASTER"),
    ("role: # to be set", "role: SYNC_MASTER # to be set"),
    ("? role\n: SLAVE", "? role\n: SYNC_MASTER"),
    ("role: SLAVE\r", "role: SYNC_MASTER\r"),
    ("", "role: SYNC_MASTER\n"),
]


@pytest.mark.parametrize(("old", "new"), EDITS)
def test_the_edit_changes_nothing_but_the_role(tmp_path, old, new):
    path = tmp_path / "node.yaml"
    end = "" if not old else "\n"
    given = changed(PAIR, "role: SYNC_MASTER\n", old + end)
    path.write_bytes(given.encode())
    edit_role(str(path), Role.SYNC_MASTER)
    edited = path.read_bytes().decode()
    rest = given.replace(old + end, "", 1) if old else given
    assert sorted(edited.replace(new + end, "", 1)) == sorted(rest) and new in edited
    assert load_config(str(path)).role is Role.SYNC_MASTER


@pytest.mark.parametrize("begin", ["{role: SLAVE, ", "{"])
def test_the_edit_knows_a_file_in_flow_style(tmp_path, begin):
    path = tmp_path / "node.yaml"
    root = tmp_path / "store"
    rest = (
        "cluster: demo, group: g0, node: 1, nodes: {1: {api: 'tcp://127.0.0.1:1', "
        f"ha: '127.0.0.1:2', http: '127.0.0.1:3'}}}}, store: {{root: {root}}}"
    )
    path.write_text(f"{begin}{rest}}}")
    edit_role(str(path), Role.ASYNC_MASTER)
    assert path.read_text() == f"{{role: ASYNC_MASTER, {rest}}}"
    assert load_config(str(path)).role is Role.ASYNC_MASTER


def test_a_role_that_is_an_alias_is_written_out(tmp_path):
    path = tmp_path / "node.yaml"
    given = changed(PAIR, "role: SYNC_MASTER", "role: *who").replace("demo", "&who demo", 1)
    path.write_text(given)
    edit_role(str(path), Role.SYNC_MASTER)
    assert path.read_text() == given.replace("*who", "SYNC_MASTER")


def test_the_edit_keeps_mode_and_link_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "real.yaml"
    path.write_text(PAIR)
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    edit_role(str(link), Role.ASYNC_MASTER)
    assert link.is_symlink() and stat.S_IMODE(os.stat(path).st_mode) == 0o640
    assert load_config(str(path)).role is Role.ASYNC_MASTER
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "real.yaml"]


def test_a_promotion_drops_the_classic_master(tmp_path):
    path = tmp_path / "node.yaml"
    slave = (
        changed(ALONE, "ASYNC_MASTER", "SLAVE") + "ha: {classic_master: 'rocket:10912'}  # old\n"
    )
    path.write_text(slave)
    edit_role(str(path), Role.ASYNC_MASTER)
    assert load_config(str(path)).ha.classic_master is None
    assert "# old" in path.read_text()


def test_an_edit_that_would_not_validate_changes_nothing(tmp_path):
    path = tmp_path / "node.yaml"
    path.write_text(ALONE)
    with pytest.raises(ConfigError, match="needs a slave"):
        edit_role(str(path), Role.SYNC_MASTER)
    assert path.read_text() == ALONE


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(list(Role)))
def test_the_edit_may_be_repeated(tmp_path, role):
    path = tmp_path / "node.yaml"
    path.write_text(PAIR)
    edit_role(str(path), role)
    once = path.read_text()
    edit_role(str(path), role)
    assert path.read_text() == once and load_config(str(path)).role is role
