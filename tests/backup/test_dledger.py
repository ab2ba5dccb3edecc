"""Mode dledger: a restored member does not remember its votes; the only one left is recovered."""

import json
import shutil

import msgspec
import pytest
import yaml

from hastore.backup.backups import find_backup
from hastore.backup.restore import restore_store
from hastore.backup.target import open_target
from hastore.config.model import Mode
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.errors import UsageError
from hastore.fs.filesystem import REAL
from hastore.server.recover_group import recover_group
from tests.backup.kit import check, content, restore, state_of
from tests.backup.kit import take as take_of
from tests.cli.kit import hastore
from tests.dledger.driver.groups import HOST, running_group
from tests.dledger.store.kit import data_of
from tests.ha.nodes import wait_for


@pytest.fixture
def place(tmp_path):
    return tmp_path / "backups"


def take(node, place):
    return take_of(of_dledger(node.config), place)


def of_dledger(config):
    """Return the configuration as a file of the mode has it; the drivers need only a part."""
    return msgspec.structs.replace(config, mode=Mode.DLEDGER, role=None)


def fill(group, count):
    for number in range(count):
        group.put(*[b"%d" % number * 100] * 20)


def opened(config):
    store = DLedgerMmapFileStore(config.store, node=config.node, store_host=HOST)
    store.open()
    return store


def test_a_member_comes_back_with_its_log_and_without_its_votes(tmp_path, place):
    with running_group(tmp_path) as group:
        fill(group, 20)
        leader = group.leader()
        group.settled()
        lost = next(node for node in group.running if node is not leader)
        first = take(leader, place).manifest
        fill(group, 3)
        group.settled()
        taken = take(lost, place)  # another member goes on with it
        manifest = taken.manifest
        assert taken.kept_bytes == first.end_offset and taken.copied_bytes > 0
        assert content(open_target(str(place)), manifest) == leader.log()
        assert check(place) == manifest
        lost.stop()
        shutil.rmtree(lost.config.store.root)
        fill(group, 3)

        config = restore(of_dledger(lost.config), place)
        data = state_of(config, REAL).data
        assert data.group_id == leader.state.data.group_id and data.group_id
        assert not data.joined and data.store_id not in manifest.stores
        store = opened(config)
        assert store.messages.max_offset == manifest.end_offset
        assert not store.remembers and store.hard_state.voted_for is None
        store.close()
        (back,) = group.start(lost.number)
        wait_for(lambda: back.store.remembers, "the leader to bring it in line")
        group.settled()
        assert back.log() == group.leader().log()
        assert not REAL.exists(f"{config.store.root}/rescued")


def test_the_only_one_left_becomes_a_group_of_its_own(tmp_path, place):
    with running_group(tmp_path) as group:
        fill(group, 5)
        node = group.settled()[0]
        manifest = take(node, place).manifest
        config, log = of_dledger(node.config), node.log()
        old_id = node.state.data.group_id
        term, end = node.store.hard_state.term, node.store.end_index
    shutil.rmtree(config.store.root)
    target = open_target(str(place))
    restore_store(config, target, find_backup(target), as_only=True)
    store = opened(config)
    assert not store.remembers, "a crash before the recovery leaves a node that does not count"
    assert (store.end_index, store.committed_index) == (end, end)
    store.close()
    done = recover_group(config, unsafe=True)
    assert done.left_behind == tuple(n for n in (1, 2, 3) if n != config.node)
    assert done.term > term + 60_000 and done.group_id != old_id and done.kept_beyond == 0
    store = opened(config)
    assert store.remembers and data_of(store)[: len(log)] == log
    assert store.end_index == end + 1
    store.close()
    data = state_of(config, REAL).data
    assert manifest.node.store_id in data.replaced_stores[config.node]
    with pytest.raises(UsageError, match="before it was restored or recovered"):
        take_of(config, place)


def interrupt(*_args, **_more):
    raise KeyboardInterrupt


def test_the_commands(tmp_path, place, monkeypatch):
    monkeypatch.setattr("hastore.cli.backup.ANSWER_S", 0.001)  # nobody listens there
    with running_group(tmp_path) as group:
        fill(group, 2)
        node = group.settled()[0]
        end = node.store.end_index
    config = node.config
    settings = {
        "cluster": config.cluster, "group": config.group, "node": config.node, "mode": "dledger",
        "nodes": {
            n: {"api": f"tcp://127.0.0.1:{n}1", "ha": f"127.0.0.1:{n}2", "http": f"127.0.0.1:{n}3"}
            for n in config.nodes
        },
        "store": {"root": config.store.root, "commitlog_file_size": "256KiB"},
    }  # fmt: skip
    path = tmp_path / "n.yaml"
    path.write_text(yaml.safe_dump(settings))
    done = hastore("backup", "take", "-c", str(path), str(place))
    assert done.returncode == 0, done.stderr
    assert "in mode dledger" in hastore("restore", str(place)).stdout
    shutil.rmtree(config.store.root)
    with monkeypatch.context() as patched:
        patched.setattr("hastore.server.recover_group.recover_group", interrupt)
        done = hastore("restore", str(place), "-c", str(path), "--as-only", "--accept-loss")
    assert done.returncode != 0
    assert f"run `hastore dledger recover -c {path} --unsafe`" in done.stderr, done.stderr
    assert "not empty" in hastore("restore", str(place), "-c", str(path)).stderr
    done = hastore("dledger", "recover", "-c", str(path), "--unsafe")
    assert done.returncode == 0 and "a group of its own" in done.stdout, done.stderr
    shutil.rmtree(config.store.root)
    done = hastore("restore", str(place), "-c", str(path), "--as-only", "--accept-loss")
    assert done.returncode == 0 and "a group of its own" in done.stdout, done.stderr
    asked = hastore("dledger", "recover", "-c", str(path), "--json")
    told = json.loads(asked.stdout)
    assert (told["members"], told["left_behind"]) == ([config.node], [])
    assert told["end_index"] == end + 1


def test_only_a_member_can_be_the_only_one_left(tmp_path, place):
    with running_group(tmp_path) as group:
        fill(group, 1)
        node = group.settled()[0]
        take(node, place)
    stranger = msgspec.structs.replace(
        of_dledger(node.config), node=7, nodes={7: node.config.nodes[1]},
        store=msgspec.structs.replace(node.config.store, root=str(tmp_path / "node7")),
    )  # fmt: skip
    with pytest.raises(UsageError, match="must be a member: 1, 2, 3"):
        restore(stranger, place, as_only=True)
