"""A node that cannot start or join says why in one line, with an exit code."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from hastore.client.producer.producer import Producer
from tests.cli.kit import hastore
from tests.process.harness import ROOT, Group
from tests.process.stores import assert_equal_stores, read_log


def fails(node, code, *words, kind="serve"):
    """Start a node that must end by itself with `code` and one error line that has `words`."""
    said = len(node.log)
    node.start(kind, wait=False)
    assert node.exit_code() == code, node.last_words()
    text = node.log[said:]
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, text
    assert "Traceback" not in text
    for word in words:
        assert word in errors[0], errors[0]
    return errors[0]


def put(group, *bodies, acks=None):
    with Producer(group.bootstrap, acks=acks, delivery_timeout_s=60) as producer:
        return [producer.send_sync("T", body) for body in bodies]


@contextlib.contextmanager
def twin(group, number, **changes):
    """Lend a node with the settings of node `number`, plus `changes`, on ports of its own."""
    folder = group.folder / "twin"
    folder.mkdir(exist_ok=True)
    with Group(folder, len(group.nodes)) as other:
        node = other[number]
        addresses = {**group[number].settings["nodes"], number: node.settings["nodes"][number]}
        node.write(nodes=addresses, **changes)
        yield node


def test_a_store_in_use(pair):
    put(pair, b"x")
    with twin(pair, 1, store={"root": str(pair[1].store)}, role="SLAVE") as second:
        fails(second, 3, "another process", str(pair[1].store))
    put(pair, b"y")
    end = pair.wait_equal()
    done = hastore("log", "stat", "--store", str(pair[1].store), "--json")
    assert done.returncode == 0, "a reader needs no lock"
    assert read_log(pair[1].store).end == end


@pytest.mark.parametrize("port", ["ha", "api", "http"])
def test_a_port_in_use(make_group, port):
    group = make_group()
    address = getattr(group[1], port).removeprefix("tcp://")
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        fails(group[1], 2, address)
    group[1].start("master")
    assert group[1].stop() == 0


def test_a_directory_that_cannot_be_written(make_group):
    group = make_group()
    (group.folder / "file").write_text("not a directory")
    group[1].write(store={"root": str(group.folder / "file" / "store")})
    fails(group[1], 3, "file/store")
    if os.geteuid():
        folder = group.folder / "sealed"
        folder.mkdir(mode=0o500)
    else:
        folder = "/proc/1/hastore-cannot-write-here"
    group[2].write(store={"root": f"{folder}/store"})
    fails(group[2], 3, f"{folder}")


def test_the_other_role_and_wrong_files(make_group):
    group = make_group()
    fails(group[1], 2, "hastore-master", "node1.yaml", kind="slave")
    fails(group[2], 2, "hastore-slave", "node2.yaml", kind="master")
    for changes, words in (
        ({"node": 3}, ("node", "missing from nodes")),
        ({"acks": 2}, ("acks",)),
        ({"store": {"colour": "red"}}, ("store.colour", "unknown")),
    ):
        before = {**group[1].settings}
        group[1].write(**changes)
        fails(group[1], 2, "node1.yaml:", *words)
        group[1].settings = before
    done = subprocess.run(
        [sys.executable, str(ROOT / "bin" / "hastore-master"), "-c", "/nowhere/x.yaml"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr


def test_a_slave_of_itself(make_group):
    group = make_group()
    nodes = group[2].settings["nodes"]
    group[2].write(nodes={1: nodes[2], 2: nodes[2]})
    fails(group[2], 2, "node2.yaml:", "itself")
    group[2].write(nodes={2: nodes[2]}, ha={"classic_master": nodes[2]["ha"]})
    fails(group[2], 2, "itself")


def joins_not(group, words, *, on=2):
    """Start node 2, which the master must refuse; node `on` must log `words`."""
    group[2].start("slave", wait=False)
    group[on].wait_log(words)
    time.sleep(0.3)
    assert not [slave for slave in group[1].status()["slaves"] if slave["in_sync"]]
    with Producer([group[1].api], acks=1) as producer:  # node 2 may name another cluster
        assert producer.send_sync("T", b"alone").level == "MASTER_MEM"
    assert group[2].running
    assert read_log(group[2].store).end == 0


def make_master(make_group, **options):
    """Start a pair and kill the slave."""
    group = make_group(**options).start()
    group[2].kill()
    return group


def use_new_store(node, **changes):
    """Configure a node with a new, empty store."""
    node.store = node.store.with_name("other")
    node.write(store={"root": str(node.store), **changes.pop("store", {})}, **changes)


def test_a_wrong_cluster(make_group):
    group = make_master(make_group)
    use_new_store(group[2], cluster="other")
    joins_not(group, "cluster")


def test_another_file_size(make_group):
    group = make_master(make_group)
    put(group, b"x", acks=1)
    state = group[2].store / "hastore" / "node.json"
    text = state.read_text()
    use_new_store(group[2], store={"commitlog_file_size": "128KiB"})
    (group[2].store / "hastore").mkdir(parents=True)
    (group[2].store / "hastore" / "node.json").write_text(text)  # its identity
    joins_not(group, "store.commitlog_file_size")


def test_another_file_size_over_an_own_log(make_group):
    group = make_group().start()
    put(group, b"x" * 1000)
    assert group[2].stop() == 0
    group[2].write(store={"commitlog_file_size": "128KiB"})
    fails(group[2], 3, "65536", "131072")
    group[2].write(store={"commitlog_file_size": "64KiB"})
    group[2].start("slave")
    group[1].wait_in_sync(2)


def test_a_node_number_that_is_taken(make_group):
    group = make_group().start()
    put(group, b"x")
    with twin(group, 2, store={"root": str(group.folder / "copycat")}) as second:
        second.start("slave", wait=False)
        second.wait_log("known with another store")
    with twin(group, 1, store={"root": str(group.folder / "copycat1")}) as second:
        # Node 1 lost its disk and comes back empty; its file says master. One answer of two would
        # be enough to open an epoch, but the other node reports that it is not the known node 1.
        second.start("master", wait=False)
        second.wait_log("known with another store")
        assert not second.status()["writable"]
    put(group, b"y")
    group[1].wait_in_sync(2)
    group.wait_equal()
    # The store of another node with this configuration.
    assert group[2].stop() == 0
    with twin(group, 1, store={"root": str(group[2].store)}, role="SLAVE") as second:
        fails(second, 3, "node", str(group[2].store))


# ---- stores with missing or damaged bytes


def filled(make_group, count=200):
    """Return a cleanly stopped pair with a log of several files."""
    group = make_group().start()
    with Producer(group.bootstrap) as producer:
        futures = [producer.send("T", b"%d" % n + bytes(1000), key=str(n)) for n in range(count)]
        for future in futures:
            future.result(60)
    group.wait_equal()
    group.stop()
    return group


def log_files(node):
    return sorted((node.store / "commitlog").iterdir())


def test_the_newest_files_are_missing(make_group):
    group = filled(make_group)
    lost = log_files(group[2])[-2:]
    for file in lost:
        file.unlink()
    fails(group[2], 3, lost[0].name.lstrip("0"))
    group[1].start("master")
    put(group, b"the other goes on", acks=1)


def test_the_newest_file_is_torn(make_group):
    group = filled(make_group)
    newest = log_files(group[2])[-1]
    head = newest.read_bytes()[:5000]
    newest.write_bytes(head)
    end = read_log(group[1].store).end
    line = fails(group[2], 3, f"{end})")
    assert "nothing was cut" in line and newest.read_bytes()[:5000] == head
    with open(newest, "r+b") as file:
        file.truncate(65536)
    fails(group[2], 3, f"{end})")  # the size is right again, but the bytes are still missing


def test_synced_bytes_are_damaged(make_group):
    """A bad byte below the flushed offset is damage: the node reports it and cuts nothing."""
    group = filled(make_group)
    newest = log_files(group[2])[-1]
    data = bytearray(newest.read_bytes())
    data[2000] ^= 0xFF
    newest.write_bytes(data)
    fails(group[2], 3)
    assert newest.read_bytes() == data, "nothing was cut"


def test_garbage_beyond_the_end_is_cleared(make_group):
    group = filled(make_group)
    end = read_log(group[2].store).end
    newest = log_files(group[2])[-1]
    with open(newest, "r+b") as file:
        file.seek(end - int(newest.name))
        # One whole old record, then half of one: neither belongs at this offset.
        old = log_files(group[2])[0].read_bytes()[:3000]
        file.write(old)
    (group[2].store / "abort").write_text("1")
    group.start()
    assert group[2].ready["max_offset"] == str(end)
    put(group, b"goes on")
    group.wait_equal()
    group.stop()
    assert_equal_stores(group[1].store, group[2].store)


def test_queues_and_index_are_rebuilt(make_group):
    """Derived files may be missing or damaged: they are rebuilt from the log."""
    group = filled(make_group)
    for file in (group[2].store / "consumequeue").rglob("*"):
        if file.is_file() and file.parent.name == "1":
            file.unlink()
        elif file.is_file() and file.parent.name == "2":
            file.write_bytes(b"\xff" * 500)
    for file in (group[2].store / "index").iterdir():
        file.write_bytes(b"")
    (group[2].store / "checkpoint").write_bytes(b"?")
    group.start()
    put(group, b"goes on")
    group.wait_equal()
    group.stop()
    assert_equal_stores(group[1].store, group[2].store)


def test_a_node_without_its_state_is_another_node(make_group):
    """node.json is the identity: the node refuses half of it, and is a new node without it."""
    group = filled(make_group, 5)
    state = group[2].store / "hastore" / "node.json"
    text = state.read_text()
    state.write_text(text[: len(text) // 2])
    fails(group[2], 3, "node.json")
    state.unlink()
    group[1].start("master")
    group[2].start("slave", wait=False)
    group[2].wait_log("known with another store")
    group[2].kill()
    state.write_text(text)
    group[2].start("slave")
    group[1].wait_in_sync(2)
