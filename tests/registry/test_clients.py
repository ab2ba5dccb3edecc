"""Clients that were given `zk://HOST:PORT/CLUSTER/GROUP`; a real ZooKeeper and real nodes."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

import hastore.aio
from hastore import Admin, Consumer, Producer
from hastore.addresses import parse_group_address
from hastore.client.connections import registry_transport
from hastore.client.connections.requester import Requester
from hastore.client.connections.transport import Arrival
from hastore.client.consumer.positions_client import Positions
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import NotAuthenticatedError, UnreachableError, UsageError
from hastore.registry import group_watch, session
from tests.process.harness import hastore as run
from tests.process.harness import wait_until
from tests.registry.servers import flip, registered


def address_of(servers):
    return f"{servers.registry}/test/g0"


def registry_threads():
    return [one.name for one in threading.enumerate() if one.name.startswith("Registry")]


def test_all_clients_take_the_address_of_zookeeper(pair, servers):
    where = address_of(servers)
    with Producer(where) as producer:
        assert producer.send_sync("t", b"one").status == "PUT_OK"
        assert producer.master == pair[1].api
    with Consumer("t", where, group="g") as consumer:
        wait_until(lambda: [m.body for m in consumer.poll()] == [b"one"], 60, "no message")
        consumer.commit()
    with Admin(where) as admin:
        assert [one.node for one in admin.status()] == [1, 2]
    with Positions(where) as positions:
        assert positions.committed("g", "t")
    wait_until(lambda: not registry_threads(), 60, lambda: f"left: {registry_threads()}")

    async def use():
        async with hastore.aio.Producer(where) as sender:
            assert (await sender.send("t", b"two")).status == "PUT_OK"
        async with hastore.aio.Consumer("t", where) as reader:
            found = []
            while len(found) < 2:
                found += [one.body for one in await reader.poll()]
            assert set(found) == {b"one", b"two"}
        async with hastore.aio.Admin(where) as admin:
            assert len(await admin.status()) == 2

    asyncio.run(use())


@pytest.mark.full
def test_commands_take_the_address_of_zookeeper(pair, servers):
    where = address_of(servers)
    sent = run("produce", "t", "--bootstrap", where, stdin=b"a\nb\n")
    assert sent.returncode == 0, sent.stderr
    read = run("consume", "t", "--bootstrap", where)
    assert sorted(read.stdout.split()) == ["a", "b"]
    status = run("status", "--json", "--wait", "30", "--bootstrap", where)
    assert status.returncode == 0, status.stderr
    first = json.loads(status.stdout.splitlines()[0])
    assert first["registry"]["connected"] and first["registry"]["role"] == "SYNC_MASTER"
    metrics = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with metrics.open(f"http://{pair[1].http}/metrics", timeout=30) as page:
        text = page.read().decode()
        assert re.search(r'^hastore_registry_connected{.*node="1"} 1$', text, re.MULTILINE)
    shown = run("status", "--bootstrap", where)
    assert f"registry {servers.registry}: connected" in shown.stdout
    wrong = run("status", "--bootstrap", f"{servers.registry}/test")
    assert wrong.returncode == 2
    assert "does not name a group in ZooKeeper" in wrong.stderr


@pytest.mark.full
def test_a_client_follows_a_flip_and_a_new_address_and_goes_on_without_zookeeper(
    mortal_pair, mortal
):
    with Producer(address_of(mortal), delivery_timeout_s=60.0) as producer:
        assert producer.send_sync("t", b"1").status == "PUT_OK"
        flip(mortal_pair[1], mortal_pair[2])
        assert producer.send_sync("t", b"2").status == "PUT_OK"
        # Node 1 moves: only its own file says where it is now.
        mortal_pair[1].stop()
        moved = f"tcp://127.0.0.1:{mortal.ports.take()}"
        ha = f"127.0.0.1:{mortal.ports.take()}"
        nodes = {**mortal_pair[1].settings["nodes"]}
        nodes[1] = {**nodes[1], "api": moved, "ha": ha}
        mortal_pair[1].write(nodes=nodes)
        mortal_pair[1].start()
        mortal_pair[2].wait_in_sync(1)
        flip(mortal_pair[2], mortal_pair[1])
        mortal_pair[1].wait_in_sync(2)  # node 2 finds node 1 at its new address
        mortal.kill()
        assert producer.send_sync("t", b"3").status == "PUT_OK"
        assert producer.master == moved


@pytest.mark.full
def test_clients_say_why_they_know_no_node(mortal, monkeypatch):
    with Admin(f"{mortal.registry}/test/none", timeout_s=1.5) as admin:
        with pytest.raises(UnreachableError, match="/hastore/test/none has no nodes in ZooKeeper"):
            admin.status()
    where = address_of(mortal)
    mortal.kill()
    monkeypatch.setattr(session, "ANSWER_S", 0.5)
    with Admin(where, timeout_s=1.5) as admin:
        with pytest.raises(UnreachableError, match="no answer from 127.0.0.1.*Connection refused"):
            admin.status()

    def unknown(*_arguments):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with Admin("zk://zookeeper.invalid:2181/test/g0", timeout_s=1.5) as admin:
        with pytest.raises(UnreachableError, match="Cannot resolve zookeeper.invalid"):
            admin.status()


@contextlib.contextmanager
def not_imported(*names):
    """Let these modules, and those below them, be imported anew; then put the present ones back.

    A package keeps its modules as attributes too: `sys.modules` alone would leave it the new ones.
    """

    def known():
        below = tuple(f"{name}." for name in names)
        return [one for one in sys.modules if one in names or one.startswith(below)]

    def parent_of(name):
        return sys.modules.get(name.rpartition(".")[0])

    present = [(parent_of(name), name, sys.modules[name]) for name in known()]
    for _, name, _ in present:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in known():
            parent, tail = parent_of(name), name.rpartition(".")[2]
            del sys.modules[name]
            if hasattr(parent, tail):
                delattr(parent, tail)
        for parent, name, module in present:
            sys.modules[name] = module
            if parent is not None:
                setattr(parent, name.rpartition(".")[2], module)


def test_kazoo_missing_is_one_clear_line(monkeypatch):
    transport = "hastore.client.connections.registry_transport"
    with not_imported("hastore.registry", "kazoo", transport):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "kazoo", None)
            without.setitem(sys.modules, "kazoo.client", None)
            with pytest.raises(UsageError, match=r"pip install 'hastore\[zk\]'"):
                Producer("zk://127.0.0.1:2181/test/g0")
    assert registry_transport is hastore.client.connections.registry_transport
    assert session is hastore.registry.session is sys.modules["hastore.registry.session"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("zk://", "does not name a group"),
        ("zk://127.0.0.1:2181", "does not name a group"),
        ("zk://127.0.0.1:2181/a/b/c", "does not name a group"),
        ("zk://127.0.0.1:2181/a/..", "does not name a group"),
        ("zk://127.0.0.1/a/b", "is not HOST:PORT"),
        ("zk://127.0.0.1:0/a/b", "is not HOST:PORT"),
        ("zk://127.0.0.1:2181,tcp://127.0.0.1:1/a/b", "does not name a group"),
        (["zk://127.0.0.1:2181/a/b", "tcp://127.0.0.1:1"], "does not name a group"),
        ("tcp://127.0.0.1:1,zk://127.0.0.1:2181/a/b", "expected tcp://HOST:PORT"),
    ],
)
def test_wrong_addresses_are_refused(given, text):
    with pytest.raises(UsageError, match=text):
        Admin(given)


def test_spark_options_take_the_address_of_zookeeper():
    from hastore.spark.read.servers import ServerBackend
    from hastore.spark.sink.options import _parse_bootstrap

    text = "zk://h1:2181,h2:2181/test/g0"
    assert ServerBackend(tuple(text.split(",")), True).where == text
    assert _parse_bootstrap({"hastore.bootstrap.servers": text}) == tuple(text.split(","))


class Named:
    """Stands for the subscription: addresses that a test names."""

    addresses: tuple[str, ...] = ()
    problem = None

    def close(self):
        pass


def test_a_watch_without_a_thread_is_no_watch_of_later_clients(monkeypatch):
    """No thread could be started: then no client of the process found the group any more."""
    where = parse_group_address("zk://127.0.0.1:1/test/no-thread")

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            group_watch.watch_group(where, None, Named().close)
    watch = group_watch.watch_group(where, None, Named().close)
    try:
        wait_until(lambda: "not answered yet" not in (watch.problem or ""), 60, "nobody looks")
    finally:
        watch.close()


def test_addresses_that_nodes_have_left_are_forgotten(monkeypatch):
    """Nodes that get a new address at each start never fill the client's list."""
    named = Named()
    monkeypatch.setattr(registry_transport, "watch_group", lambda *_: named)
    requester = Requester(("zk://127.0.0.1:2181/test/g0",), SYSTEM_CLOCK)
    try:
        for port in range(1, 200):
            before, named.addresses = named.addresses, (f"tcp://127.0.0.1:{port}",)
            for address in before:
                requester.cluster.add(address)  # as if it had been up
            requester.collect()
            assert requester.transport.addresses == list(named.addresses)
            assert requester.cluster.addresses == []
        named.addresses = ()  # never without any
        requester.collect()
    finally:
        requester.close()


def test_a_client_without_nodes_sleeps_until_zookeeper_names_one(servers):
    """It does not look again and again; a change wakes it."""
    requester = Requester((f"{servers.registry}/test/sleeps",), SYSTEM_CLOCK)
    try:
        requester.collect()
        assert requester.transport.due_s() == -1.0, "it looks by itself"
        with servers.client() as client:
            entry = {"role": "SLAVE", "api": "tcp://127.0.0.1:1", "ha": "h:1", "http": "h:1"}
            client.create("/hastore/test/sleeps/1", json.dumps(entry).encode(), makepath=True)
        began = SYSTEM_CLOCK.monotonic_ms()
        while not requester.transport.addresses:
            requester.transport.sleep(30.0)
            requester.collect()
        assert SYSTEM_CLOCK.monotonic_ms() - began < 20_000
        assert requester.transport.addresses == ["tcp://127.0.0.1:1"]
    finally:
        requester.close()


def test_a_client_finds_a_group_again_soon_after_its_znodes_were_deleted(servers, monkeypatch):
    monkeypatch.setattr(group_watch, "POLL_S", 600.0)
    watch = group_watch.watch_group(parse_group_address(address_of(servers)), None, Named().close)
    try:
        with servers.client() as client:
            for port in (1, 2):
                entry = {"role": "SLAVE", "api": f"tcp://127.0.0.1:{port}", "ha": "h:1",
                         "http": "h:1"}  # fmt: skip
                client.create("/hastore/test/g0/1", json.dumps(entry).encode(), makepath=True)
                wait_until(lambda e=entry: watch.addresses == (e["api"],), 60, "not noticed")
                client.delete("/hastore", recursive=True)
                wait_until(lambda: watch.problem is not None, 60, "the end is not noticed")
                assert watch.addresses == (entry["api"],)
    finally:
        watch.close()


def test_a_client_finds_the_nodes_beside_one_that_it_may_not_read(servers):
    from kazoo.security import OPEN_ACL_UNSAFE, make_digest_acl

    entry = {"role": "SLAVE", "ha": "h:1", "http": "h:1"}
    with servers.client("admin:admin") as client:
        try:
            for number in (1, 2):
                data = json.dumps({**entry, "api": f"tcp://127.0.0.1:{number}"}).encode()
                client.create(f"/hastore/test/beside/{number}", data, makepath=True)
            client.set_acls("/hastore/test/beside/1", [make_digest_acl("admin", "admin", all=True)])
            where = parse_group_address(f"{servers.registry}/test/beside")
            watch = group_watch.watch_group(where, None, Named().close)
            wait_until(lambda: "tcp://127.0.0.1:2" in watch.addresses, 60, lambda: watch.problem)
            assert watch.addresses == ("tcp://127.0.0.1:2",)
            watch.close()
        finally:
            client.set_acls("/hastore/test/beside/1", OPEN_ACL_UNSAFE)


@pytest.mark.full
def test_a_client_does_not_use_a_node_of_another_group(make_group, servers):
    """The object of a group names an address that belongs to another group now."""
    (other,) = make_group(1, master_role="ASYNC_MASTER")
    other.start()
    entry = {"role": "ASYNC_MASTER", "api": other.api, "ha": other.ha, "http": other.http}
    with servers.client() as client:
        client.create("/hastore/test/g7/1", json.dumps(entry).encode(), makepath=True)
    where = f"{servers.registry}/test/g7"
    why = "it is node 1 of cluster test, group g0, and this client uses cluster test, group g7"
    with Producer(where, delivery_timeout_s=30.0) as producer:
        with pytest.raises(NotAuthenticatedError, match=why):
            producer.send_sync("t", b"x")
    with Consumer("t", where) as consumer, pytest.raises(NotAuthenticatedError, match=why):
        consumer.poll(timeout_s=30.0)
    with Admin(where) as admin, pytest.raises(NotAuthenticatedError, match=why):
        admin.status()
    shown = run("status", "--bootstrap", where)
    assert shown.returncode == 1 and why in shown.stderr
    assert other.status()["max_offset"] == 0


def test_a_node_that_refuses_is_no_reason_to_give_up_while_another_may_accept(monkeypatch):
    named = Named()
    named.addresses = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    monkeypatch.setattr(registry_transport, "watch_group", lambda *_: named)
    requester = Requester(("zk://127.0.0.1:2181/test/g0",), SYSTEM_CLOCK)
    try:
        requester.collect()
        requester.note([Arrival(named.addresses[0], None, up=False, refused="expired")])
        assert requester.cluster.refused is None
        requester.note([Arrival(named.addresses[1], None, up=False, refused="expired")])
        assert "expired" in requester.cluster.refused
    finally:
        requester.close()


@pytest.mark.full
def test_a_znode_with_a_wrong_name_does_not_end_the_clients_watch(pair, servers):
    with servers.client() as client:
        for name in ("9" * 5_000, "007", "1" * 6, "x"):
            client.create(f"/hastore/test/g0/{name}", b"{}")
    with Producer(address_of(servers)) as producer:
        assert producer.send_sync("t", b"x").status == "PUT_OK"


@pytest.mark.full
def test_a_client_that_was_there_before_its_group_finds_it_soon(mortal, make_group, monkeypatch):
    """No znode exists yet; the one that will be there is watched for."""
    monkeypatch.setattr(group_watch, "POLL_S", 600.0)  # far beyond the producer's time
    watch = group_watch.watch_group(parse_group_address(address_of(mortal)), None, Named().close)
    with Producer(address_of(mortal), delivery_timeout_s=60.0) as producer:
        found = []
        sender = threading.Thread(target=lambda: found.append(producer.send_sync("t", b"x")))
        sender.start()
        wait_until(lambda: "has no nodes" in watch.problem, 60, lambda: watch.problem)
        pair = registered(make_group(), mortal)
        sender.join(60)
        assert found and found[0].status == "PUT_OK", pair[1].last_words()
    watch.close()


@pytest.mark.full
def test_without_descriptors_zookeeper_is_out_of_reach_and_no_more(servers):
    """The thread that follows the registry goes on; its end would end the node."""
    code = """
import os, resource, sys, threading
from hastore.clock import SYSTEM_CLOCK
from hastore.registry import session
from hastore.registry.session import Session, Unreachable
def make():
    return Session(sys.argv[1], None, SYSTEM_CLOCK, tls=None, stopping=threading.Event(),
                   on_event=lambda: None)
make().close()
before = len(os.listdir("/proc/self/fd"))
answer_s, session.ANSWER_S = session.ANSWER_S, 0.5
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for room in range(3):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + room, hard))
    try:
        make().close()
    except Unreachable as failure:
        print("unreachable", failure)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
session.ANSWER_S = answer_s
make().close()
assert len(os.listdir("/proc/self/fd")) == before, os.listdir("/proc/self/fd")
print("names", sorted(t.name for t in threading.enumerate()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, servers.registry.removeprefix("zk://")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "unreachable" in done.stdout, done.stdout
    assert done.stdout.endswith("names ['MainThread']\n"), done.stdout


FORKING = """
import gc, os, sys, threading, time
from hastore.clock import SYSTEM_CLOCK
from hastore.addresses import parse_group_address
from hastore.registry.group_watch import watch_group
from hastore.registry.session import Session

class Client:
    def changed(self):
        pass

def addresses(client):
    watch = watch_group(parse_group_address(sys.argv[1]), None, client.changed)
    while not watch.addresses:
        time.sleep(0.02)
    return watch

def left():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()

def use_session():
    session = Session(parse_group_address(sys.argv[1]).servers, None, SYSTEM_CLOCK, tls=None,
                      stopping=threading.Event(), on_event=lambda: None)
    session.children("/hastore")
    session.close()

use_session()
before = left()
for _ in range(100):
    use_session()
assert left() == before, (left(), before)
mine = Client()
watch = addresses(mine)
child = os.fork()
if not child:
    print("child", *addresses(Client()).addresses, flush=True)
    sys.exit(0)  # in order, as a program's main ends
assert os.waitpid(child, 0)[1] == 0
print("parent", *watch.addresses, watch.problem)
"""


@pytest.mark.full
def test_sessions_leave_nothing_behind_and_a_forked_child_has_its_own(servers):
    entry = {"role": "SLAVE", "api": "tcp://127.0.0.1:1", "ha": "h:1", "http": "h:1"}
    with servers.client() as client:
        client.create("/hastore/test/forks/1", json.dumps(entry).encode(), makepath=True)
    done = subprocess.run(
        [sys.executable, "-c", FORKING, f"{servers.registry}/test/forks"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["child tcp://127.0.0.1:1", "parent tcp://127.0.0.1:1 None"]
