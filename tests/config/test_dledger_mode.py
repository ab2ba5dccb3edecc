"""The configuration of mode dledger: its keys, its defaults, and the text of each refusal."""

import pathlib

import msgspec
import pytest
import yaml

from hastore.config.checks import config_notes
from hastore.config.file import load_config, parse_config
from hastore.config.model import (
    ApiConfig,
    DLedgerConfig,
    Flush,
    HAConfig,
    Mode,
    RetentionConfig,
    StoreConfig,
    StoreKind,
)
from hastore.errors import ConfigError

CONF = pathlib.Path(__file__).resolve().parent.parent.parent / "conf"
FILES = ("dledger-n0.yaml", "dledger-n1.yaml", "dledger-n2.yaml")
# Keys of the structs that have no meaning in this mode, so its files leave them out.
CLASSIC_ONLY = {
    "store": {"flush_timeout"},
    "ha": {
        *("ack_point", "allow_classic_peers", "count_classic_peers", "classic_master"),
        *("sync_from", "heartbeat_interval", "housekeeping_interval", "slave_timeout"),
        *("transfer_batch_size", "max_gap_not_in_sync", "classic_broker", "classic_key_file"),
    },
}

GROUP = """\
cluster: demo   # line 1
group: g0
node: 1
mode: dledger
nodes:
  1: {api: "tcp://127.0.0.1:10911", ha: "127.0.0.1:10912", http: "127.0.0.1:10913"}
  2: {api: "tcp://127.0.0.1:10921", ha: "127.0.0.1:10922", http: "127.0.0.1:10923"}
  3: {api: "tcp://127.0.0.1:10931", ha: "127.0.0.1:10932", http: "127.0.0.1:10933"}
store: {root: /tmp/x}
dledger:
  election_timeout: 500ms
"""


def refusal(text, **overrides):
    """Return the one-line error that the text raises."""
    with pytest.raises(ConfigError) as refused:
        parse_config(
            text, "x.yaml", {key.replace("__", "."): value for key, value in overrides.items()}
        )
    assert "\n" not in str(refused.value)
    return str(refused.value)


def changed(old, new):
    assert old in GROUP
    return GROUP.replace(old, new)


def test_a_group_is_read_and_its_default_is_sync():
    config = parse_config(GROUP, "x.yaml")
    assert (config.mode, config.role, config.majority) == (Mode.DLEDGER, None, 2)
    assert config.store.flush is Flush.SYNC and config.store.kind is StoreKind.FILE
    assert config.dledger == DLedgerConfig()
    assert config_notes(config) == []


def test_a_file_without_a_mode_is_classic():
    classic = changed("mode: dledger\n", "role: SLAVE\n").partition("dledger:")[0]
    config = parse_config(classic, "x.yaml")
    assert config.mode is Mode.CLASSIC and config.store.flush is Flush.ASYNC


@pytest.mark.parametrize("name", FILES)
def test_the_files_of_conf_work_and_document_every_key_with_its_default(name):
    config = load_config(str(CONF / name))
    assert config.mode is Mode.DLEDGER
    assert config.ha == HAConfig() and config.api == ApiConfig()
    assert config.dledger == DLedgerConfig()
    assert config.store == StoreConfig(root=config.store.root, flush=Flush.SYNC)
    tree = yaml.safe_load((CONF / name).read_text())
    for section, kind in (
        ("store", StoreConfig), ("ha", HAConfig), ("api", ApiConfig), ("dledger", DLedgerConfig),
    ):  # fmt: skip
        fields = {field.name.removesuffix("_ms") for field in msgspec.structs.fields(kind)}
        expected = fields - {"retention"} - CLASSIC_ONLY.get(section, set())
        assert set(tree[section]) == expected, section
    assert set(tree["retention"]) == {"max_age", "max_size", "hold", "check_interval"}
    assert config.store.retention == RetentionConfig()


def test_the_files_of_conf_are_three_nodes_of_one_group():
    configs = [load_config(str(CONF / name)) for name in FILES]
    assert [config.node for config in configs] == [1, 2, 3]
    assert all(config.nodes == configs[0].nodes for config in configs)
    assert len({config.store.root for config in configs}) == 3
    pair = load_config(str(CONF / "master.yaml"))
    assert not {config.store.root for config in configs} & {pair.store.root}
    # Commands without --bootstrap ask the addresses of master.yaml and slave.yaml.
    assert {1: configs[0].nodes[1], 2: configs[0].nodes[2]} == pair.nodes


# name -> old text, new text, what the error must contain
REFUSED = {
    "a role": (
        "node: 1\n", "node: 1\nrole: SLAVE\n",
        "x.yaml:4: role: has no meaning in mode dledger: the nodes elect their leader",
    ),
    "acks": (
        "node: 1\n", "node: 1\nacks: 1\n",
        "x.yaml:4: acks: has no meaning in mode dledger: a put is acknowledged once a majority",
    ),
    "a bad mode": ("mode: dledger", "mode: raft", "x.yaml:4: mode: 'raft' is not one of classic, "),
    "a key of the HA link": (
        "dledger:\n", "ha: {ack_point: flushed}\ndledger:\n",
        "x.yaml:10: ha.ack_point: has no meaning in mode dledger: a node confirms what is on its",
    ),
    "a RocketMQ master": (
        "dledger:\n", 'ha: {classic_master: "rocket:10912"}\ndledger:\n',
        "ha.classic_master: has no meaning in mode dledger: only a node of mode classic",
    ),
    "async flush": (
        "root: /tmp/x", "root: /tmp/x, flush: async",
        "x.yaml:9: store.flush: async acknowledges puts that are on no disk",
    ),
    "a memory store": (
        "root: /tmp/x", "root: /tmp/x, kind: memory",
        "x.yaml:9: store.kind: memory puts nothing on the disk, but store.flush is sync; use file,",
    ),
    "a kind": ("root: /tmp/x", "root: /tmp/x, kind: tape", "'tape' is not one of file, memory"),
    "slow heart beats": (
        "election_timeout: 500ms", "heartbeat_interval: 200ms",
        "x.yaml:11: dledger.heartbeat_interval: 200 ms is more than a third of",
    ),
    "a hasty election": ("500ms", "299ms", "dledger.heartbeat_interval: 100 ms is more than a"),
    "a short wait": (
        "election_timeout: 500ms", "append_timeout: 400ms",
        "x.yaml:11: dledger.append_timeout: 400 ms is less than dledger.election_timeout, 500 ms;",
    ),
    "a short transfer": (
        "election_timeout: 500ms", "transfer_timeout: 400ms", "dledger.transfer_timeout: 400 ms",
    ),
    "timeouts that were left behind": (
        "election_timeout: 500ms", "election_timeout: 5s",
        "x.yaml:10: dledger.append_timeout: 2500 ms is less than dledger.election_timeout, 5000 ms;"
        " set it to 10000ms or more, and dledger.transfer_timeout (2000 ms) too",
    ),
    "an unknown preferred leader": (
        "election_timeout: 500ms", "preferred_leader: 4",
        "x.yaml:11: dledger.preferred_leader: node 4 is missing from nodes",
    ),
    "an unknown key": (
        "election_timeout: 500ms", "election_timout: 1s",
        "x.yaml:11: dledger.election_timout: is unknown; did you mean election_timeout?",
    ),
    "no cluster": (
        "cluster: demo   # line 1\n", "",
        "x.yaml: cluster: is missing; add it, as in conf/dledger-n0.yaml",
    ),
    "a batch larger than a frame": (
        "election_timeout: 500ms", "push_batch_size: 4MiB", "dledger.push_batch_size: 4194304",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_file_line_key_and_remedy(old, new, expected):
    assert expected in refusal(changed(old, new))


def test_the_keys_of_this_mode_are_refused_in_mode_classic():
    classic = changed("mode: dledger\n", "role: SLAVE\n")
    assert "x.yaml:10: dledger: has no meaning in mode classic; remove it" in refusal(classic)
    forgotten = changed("mode: dledger\n", "")
    assert "dledger: has no meaning in mode classic; remove it, or set mode" in refusal(forgotten)
    classic = classic.partition("dledger:")[0].replace("/tmp/x", "/tmp/x, kind: memory")
    assert "x.yaml:9: store.kind: memory exists only in mode dledger" in refusal(classic)


def test_a_classic_key_from_the_command_line_is_refused_too():
    assert refusal(GROUP, acks="1").startswith("-o acks: has no meaning in mode dledger")
    assert refusal(GROUP, ha__sync_from="last").startswith("-o ha.sync_from: has no meaning")


def test_an_async_flush_needs_the_flag_and_says_what_it_means():
    allowed = {"dledger.allow_async_flush": "true", "store.flush": "async"}
    config = parse_config(GROUP, "x.yaml", allowed)
    assert config.store.flush is Flush.ASYNC
    assert any("QUORUM_MEM" in note for note in config_notes(config))
    config = parse_config(GROUP, "x.yaml", allowed | {"store.kind": "memory"})
    assert config.store.kind is StoreKind.MEMORY
    (note,) = config_notes(config)
    assert "started anew" in note


@pytest.mark.parametrize(
    ("size", "majority", "noted"), [(1, 1, False), (2, 2, True), (3, 2, False), (4, 3, True)]
)
def test_an_even_number_of_nodes_is_noted(size, majority, noted):
    nodes = [
        f'  {n}: {{api: "tcp://127.0.0.1:{n}1", ha: "127.0.0.1:{n}2", http: "127.0.0.1:{n}3"}}\n'
        for n in range(1, size + 1)
    ]
    head, _, rest = GROUP.partition("nodes:\n")
    config = parse_config(head + "nodes:\n" + "".join(nodes) + "store: {root: /x}\n", "x.yaml")
    assert config.majority == majority
    assert [note for note in config_notes(config) if "odd number" in note] == (
        config_notes(config) if noted else []
    )
