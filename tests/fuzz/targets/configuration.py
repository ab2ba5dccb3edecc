"""A node's configuration file: the loader, and the edits that commands and nodes make."""

from __future__ import annotations

import errno
import os
import pathlib
from unittest import mock

import msgspec

from hastore.config import checks, file
from hastore.config.file import parse_config, parse_names, text_with_role
from hastore.config.model import Config, Mode, NodeAddress, Role
from hastore.config.node_list import ListChange, with_node, without_node
from hastore.errors import ConfigError, UsageError
from tests.fuzz import kit

CONF = pathlib.Path(__file__).resolve().parents[3] / "conf"
REACHES = (
    parse_config, parse_names, text_with_role, checks.read_value, checks.check_config, with_node,
    without_node,
    file._Reader.compose, file._Reader._nodes, checks._number, file._with_scalar,
)  # fmt: skip
LEAST = kit.Least(0.08, 15)
RUNS = 20  # of `make test`: PyYAML takes its time
TOKENS = (
    *(
        b"role: ",
        b"nodes:\n",
        b"store:\n",
        b"  root: s\n",
        b"mode: dledger\n",
        b"64KiB",
        b"5s",
        b"null",
    ),
    *(
        b"!!binary ",
        b"&x ",
        b"*x",
        b"<<: *x\n",
        b"? ",
        b"|\n ",
        b"2024-01-01",
        b"- ",
        b"{",
        b"ha:\n",
    ),
)
SMALL = b"""\
cluster: demo
group: g0
node: 1
role: ASYNC_MASTER  # a comment
nodes:
  1: {api: "tcp://127.0.0.1:1", ha: "127.0.0.1:2", http: "127.0.0.1:3"}
  2: {api: "tcp://127.0.0.1:4", ha: "127.0.0.1:5", http: "127.0.0.1:6"}
store: {root: data, commitlog_file_size: 64KiB}
"""


def seeds() -> list[bytes]:
    """Return the files of conf/, without their comments, and small ones with mistakes."""
    whole = []
    for path in (CONF / "master.yaml", CONF / "dledger-n0.yaml"):
        lines = [line.partition(" #")[0].rstrip() for line in path.read_text().splitlines()]
        whole.append("\n".join(x for x in lines if x and not x.startswith("#")).encode() + b"\n")
    dledger = SMALL.replace(b"role: ASYNC_MASTER  # a comment\n", b"mode: dledger\n")
    dledger = dledger.replace(b"store:", b"  3: {api: 'tcp://h:7', ha: 'h:8', http: 'h:9'}\nstore:")
    changes = [
        (b"ASYNC_MASTER  # a comment", b"SLAVE"),
        (b"ASYNC_MASTER  # a comment", b"'SYNC_MASTER'"),
        (b"node: 1", b"node: 2  # the second"),
        (b"  1:", b"  0x1:\n  1:"),
        (b"store: {", b"store: {flush: sync, "),
        (b"store: {", b"ha: {}\nstore: {"),
        (b"cluster: demo", b"# the cluster\ncluster: 'demo'"),
        (b"node: 1", b"node: 9"),
        (b"64KiB", b"64 parsecs"),
        (b"64KiB", b"1"),
        (b"ASYNC", b"NO"),
        (b"g0", b"[g0]"),
        (b"role", b"rule"),
        (b"  2:", b"  1:"),
        (b"  2:", b"  0:"),
        (b"{root", b"[root"),
        (b"g0", b"!!binary g0"),
        (b"demo", b"&a demo\nx: *a"),
        (b"tcp://127.0.0.1:1", b"nothing"),
        (b"nodes:", b"nodes: [1]\nx:"),
        (b"demo", b"''"),
        (b"node: 1", b"node: 1\nnode: 1"),
        (b"store: {", b"ha: {classic_master: 'h:1'}\nstore: {"),
        (b"g0", b"\xff"),
        (b"node: 1", b"node:"),
        (b"store: {", b"registry: zk://h:1\nremoting: {listen: yes}\nstore: {flush: sync, "),
        (b"data", b"data, retention: {hours: 72h, bytes: 1GiB}, warm_files: perhaps"),
    ]
    return [
        *whole,
        SMALL,
        dledger,
        *(SMALL.replace(*one) for one in changes),
        b"",
        b"a",
        b"[]",
        b"\0",
    ]


def _no_file(path: object, *_: object, **_more: object) -> None:
    """Open nothing: a file that the input names may be anything of this machine."""
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def one(data: bytes) -> None:
    """Load a file. Of one that is right, each edit is right too, and says what it should."""
    text = data.decode("utf-8", "surrogateescape")
    with mock.patch("builtins.open", _no_file):
        with kit.documented(ConfigError):
            config = parse_config(text, "node.yaml")
        assert parse_names(text, "node.yaml").cluster == config.cluster
        if config.mode is Mode.CLASSIC:
            for role in (Role.SLAVE, Role.ASYNC_MASTER):
                _edit_role(text, config, role)
        _edit_nodes(text, config)


def _edit_role(text: str, config: Config, role: Role) -> None:
    """Write a role into the file: nothing else changes, but that a master follows nobody."""
    try:
        found = parse_config(text_with_role(text, "node.yaml", role), "node.yaml")
    except ConfigError:
        return  # a role that this file cannot have: `edit_role` leaves it as it was
    follows = config.ha.classic_master if role is Role.SLAVE else None
    ha = msgspec.structs.replace(config.ha, classic_master=follows)
    assert found == msgspec.structs.replace(config, role=role, ha=ha)


def _edit_nodes(text: str, config: Config) -> None:
    """Add a node to the list, and remove one: it is done, or refused."""
    number = max(config.nodes) + 1
    address = NodeAddress(api="tcp://new:1", ha="new:2", http="new:3")
    for change in (ListChange(new=number, address=address), ListChange(gone=number - 1)):
        try:
            edited = change.edited(text, "node.yaml", config, parse_config)
        except UsageError:
            continue
        assert parse_config(edited, "node.yaml") == change.wanted(config)
