"""Each wrong object in ZooKeeper: one line that names it, the role unchanged, the node alive."""

import json
import threading
import time

import pytest

from hastore import Producer
from hastore.cli.own_node import RegistryPlace
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import load_config
from hastore.config.model import Role
from hastore.errors import RegistryError
from hastore.registry import session
from hastore.registry.session import Session
from tests.process.harness import hastore, wait_until
from tests.registry.servers import CREDENTIALS, Wire, registered

ADDRESSES = {"api": "tcp://127.0.0.1:1", "ha": "127.0.0.1:2", "http": "127.0.0.1:3"}


def own(servers, number=1):
    entry = servers.read(number)
    return {key: entry[key] for key in ("role", "api", "ha", "http")}


def wait_problem(node, text):
    status, _ = told(node, text)
    (line,) = [each for each in status["problems"] if text in each]
    assert "\n" not in line and line.startswith("the registry"), line
    assert line.endswith("the node keeps its role, SYNC_MASTER"), line
    assert status["role"] == "SYNC_MASTER" and status["writable"], status
    return line


def told(node, text):
    """Wait until a problem of a node has these words; return its status and the problem."""
    status = node.wait_status(
        lambda s: any(text in each for each in s["problems"]), f"the problem {text!r}"
    )
    return status, next(each for each in status["problems"] if text in each)


def test_wrong_objects_change_no_role(pair, servers):
    node, epoch = pair[1], pair[1].status()["epoch"]
    right, store = own(servers), servers.read(1)["store"]

    def slave(**changes):
        return json.dumps({**right, "role": "SLAVE", **changes}).encode()

    def without(key):
        return json.dumps({k: v for k, v in right.items() if k != key}).encode()

    for data, text in (
        (slave(role="BOSS"), "the roles are ASYNC_MASTER, SYNC_MASTER, SLAVE"),
        (slave(role=7), "`role` (the roles are"),
        (slave(role=None), "`role` (the roles are"),
        (slave(api=["x"]), "`api`"),
        (slave(ha="nonsense"), "ha: 'nonsense' is not HOST:PORT"),
        (slave(api="127.0.0.1:5"), "api: '127.0.0.1:5' is not tcp://HOST:PORT"),
        (slave(colour="red"), "unknown field `colour`"),
        (slave(once={"id": "x"}), "`once`"),
        (slave(once={"id": "x", "command": "dance", "epoch": 1, "wall_ms": 1}), "neither promote"),
        (without("role"), "missing required field `role`"),
        (without("http"), "missing required field `http`"),
        (b"SLAVE", "JSON"),
        (b'"SLAVE"', "Expected `object`"),
        (b"[]", "Expected `object`"),
        (b"{" * 5_000, "JSON"),
        (b"\xff\xfe\x00", "JSON"),
        (slave(padding="x" * 20_000), "more than 16,384"),
        (b"x" * 900_000, "900,000 bytes"),
        (slave(cluster="other"), "the object of cluster 'other'"),
        (slave(group="g9"), "the object of group 'g9'"),
        (slave(node=2), "the object of node 2"),
        (slave(store="f" * 32), "node number 1 is used with another store"),
        (slave(**ADDRESSES), "it is the object of another node"),
        (slave(**ADDRESSES, store=store), "it is the object of another node, or of a copy"),
    ):
        servers.put(1, data)
        line = wait_problem(node, text)
        assert "/hastore/test/g0/1" in line
    assert node.status()["epoch"] == epoch
    with Producer(pair.bootstrap) as producer:
        assert producer.send_sync("t", b"x").status == "PUT_OK"
    refused = hastore("demote", "-c", str(node.path))  # the object of another node is still there
    assert (
        refused.returncode == 1 and "has other addresses (api tcp://127.0.0.1:1)" in refused.stderr
    )
    # An operator's command replaces an invalid object, and doctor names it.
    servers.put(1, b"{}")
    wait_problem(node, "missing required field")
    found = hastore("doctor", "-c", str(node.path))
    assert found.returncode == 1 and "missing required field" in found.stdout
    servers.put(2, b"{}")
    status = pair[2].wait_status(
        lambda s: "missing required field" in " ".join(s["problems"]), "problem"
    )
    assert status["registry"]["role"] is None  # that of no object
    done = hastore("promote", "-c", str(pair[2].path))
    assert done.returncode == 0, done.stderr
    assert "warning: /hastore/test/g0/2" in done.stderr
    assert servers.read(2)["role"] == "SYNC_MASTER"


@pytest.mark.full
def test_deleted_and_emptied_objects_are_written_anew(pair, servers):
    node = pair[1]
    with servers.client() as client:
        client.delete("/hastore/test/g0/1")
        wait_until(lambda: client.exists("/hastore/test/g0/1"), 60, "the znode stays deleted")
        client.set("/hastore/test/g0/1", b"")
        wait_until(lambda: client.get("/hastore/test/g0/1")[0], 60, "the znode stays empty")
        delete = client.transaction()
        for path in ("g0/1", "g0/2", "g0", ""):
            delete.delete(f"/hastore/test/{path}".rstrip("/"))
        assert delete.commit() == [True] * 4
        for number in (1, 2):
            path = f"/hastore/test/g0/{number}"
            wait_until(lambda p=path: client.exists(p), 60, "the znode stays deleted")
    assert servers.read(1)["role"] == "SYNC_MASTER" and servers.read(2)["role"] == "SLAVE"
    node.wait_status(lambda s: s["writable"] and not s["problems"], "no problem")
    assert node.status()["epoch"] == 65537
    assert "is empty: it is written with this node's role, SYNC_MASTER" in node.log


@pytest.mark.full
def test_two_nodes_with_one_number(make_group, servers, tmp_path):
    """The second group has the same cluster, group and numbers, but other stores."""
    first = registered(make_group(1, master_role="ASYNC_MASTER"), servers)
    (tmp_path / "second").mkdir()
    from tests.process.harness import Group

    with Group(tmp_path / "second", 1, master_role="ASYNC_MASTER") as second:
        second[1].write(registry=servers.registry)
        second[1].start()
        status, problem = told(second[1], "node number 1 is used with another store")
        assert first[1].api in problem
        assert status["role"] == "ASYNC_MASTER" and first[1].status()["problems"] == []
        assert servers.read(1)["api"] == first[1].api


@pytest.mark.full
def test_a_role_that_the_node_cannot_have_and_a_stranger(make_group, servers):
    alone = registered(make_group(1, master_role="ASYNC_MASTER"), servers)
    servers.set_role(1, "SYNC_MASTER")
    status, _ = told(alone[1], "a SYNC_MASTER needs a slave")
    assert status["role"] == "ASYNC_MASTER" and status["writable"]
    servers.set_role(1, "ASYNC_MASTER")
    with servers.client() as client:
        client.create("/hastore/test/g0/9", json.dumps({"role": "SLAVE", **ADDRESSES}).encode())
        client.create("/hastore/test/g0/nonsense", b"")
    stranger = "node 9 is in the registry under /hastore/test/g0, but not in"
    alone[1].wait_status(lambda s: any(stranger in each for each in s["problems"]), "node 9")
    # It is no member, whatever ZooKeeper says: a promotion does not ask it.
    assert hastore("promote", "-c", str(alone[1].path), "--async").returncode == 0


@pytest.mark.full
def test_acls(make_group, servers, tmp_path):
    """With a file of credentials only they may write; without them a node keeps its role."""
    secret = tmp_path / "acl"
    secret.write_text(f"{CREDENTIALS}\n")
    secret.chmod(0o600)
    other = tmp_path / "other"
    other.write_text("hastore:wrong\n")
    other.chmod(0o600)
    pair = registered(make_group(), servers, registry_acl_file=str(secret))
    with servers.client() as stranger:
        from kazoo.exceptions import NoAuthError

        for change in (
            lambda: stranger.set("/hastore/test/g0/1", b"{}"),
            lambda: stranger.delete("/hastore/test/g0/1"),
            lambda: stranger.create("/hastore/test/g0/7", b"{}"),
        ):
            try:
                change()
                raise AssertionError("a stranger could change the registry")
            except NoAuthError:
                pass
        assert stranger.create("/hastore/other", b"") == "/hastore/other"  # another cluster
        with Producer(f"{servers.registry}/test/g0") as producer:  # reading needs no credentials
            assert producer.send_sync("t", b"x").status == "PUT_OK"
    with servers.client(CREDENTIALS) as operator:
        entry = json.loads(operator.get("/hastore/test/g0/2")[0])
        operator.set("/hastore/test/g0/2", json.dumps({**entry, "role": "SYNC_MASTER"}).encode())
    pair[2].wait_writable()
    assert hastore("demote", "-c", str(pair[1].path)).returncode == 0
    # The wrong password: the command and the node say so, and nothing changes.
    pair[1].write(registry_acl_file=str(other))
    refused = hastore("promote", "-c", str(pair[1].path))
    assert refused.returncode == 1
    assert "ZooKeeper refuses access to /hastore/test/g0/1" in refused.stderr
    pair[1].stop()
    pair[1].start()
    status, _ = told(pair[1], "registry_acl_file holds another user:password")
    assert status["role"] == "SLAVE"
    for node in pair:
        assert "s3cret" not in node.log and "s3cret" not in json.dumps(node.status())
    # An object that anybody may write is closed when the node has credentials.
    pair[1].write(registry_acl_file=str(secret))
    with servers.client(CREDENTIALS) as operator:
        from kazoo.security import OPEN_ACL_UNSAFE

        operator.set_acls("/hastore/test/g0/1", OPEN_ACL_UNSAFE)
        pair[1].stop()
        pair[1].start()
        pair[1].wait_log("/hastore/test/g0/1 had another ACL")
        assert len(operator.get_acls("/hastore/test/g0/1")[0]) == 2


@pytest.mark.full
def test_objects_that_strangers_made_before_the_first_start(make_group, servers, tmp_path):
    """They forced an unclean promotion of node 2, and took node 1 out of office."""
    from kazoo.exceptions import NoAuthError

    secret = tmp_path / "acl"
    secret.write_text(CREDENTIALS)
    secret.chmod(0o600)
    pair = make_group()
    once = {"id": "x", "command": "promote", "epoch": 0, "wall_ms": int(time.time() * 1000),
            "force_unclean": True}  # fmt: skip
    for number, more in ((1, {"role": "SLAVE"}), (2, {"role": "SYNC_MASTER", "once": once})):
        address = pair[1].settings["nodes"][number]
        data = {**{key: address[key] for key in ("api", "ha", "http")}, **more}
        with servers.client() as stranger:
            stranger.create(f"/hastore/test/g0/{number}", json.dumps(data).encode(), makepath=True)
    registered(pair, servers, registry_acl_file=str(secret))
    for node in pair:
        node.wait_status(
            lambda s, n=node: any(
                f"/hastore/test/g0/{n.number} has another ACL" in each for each in s["problems"]
            ),
            "a problem",
        )
    assert pair[1].wait_writable()["epoch"] == 65537
    assert pair[2].status()["role"] == "SLAVE"
    # The operator's commands replace both; the master begins a new epoch.
    done = hastore("promote", "-c", str(pair[1].path))
    assert done.returncode == 0, done.stderr
    assert "warning: /hastore/test/g0/1 has another ACL" in done.stderr
    done = hastore("demote", "-c", str(pair[2].path))
    assert done.returncode == 0, done.stderr
    for node in pair:
        node.wait_status(lambda s: not s["problems"], "no problem")
    assert pair[1].wait_writable()["epoch"] > 65537
    with servers.client() as stranger:
        for number in (1, 2):
            with pytest.raises(NoAuthError):
                stranger.set(f"/hastore/test/g0/{number}", b"{}")
            with pytest.raises(NoAuthError):
                stranger.delete(f"/hastore/test/g0/{number}")


@pytest.mark.full
def test_a_registry_under_a_closed_root(make_group, servers, tmp_path):
    """Only others may create znodes in the root, but /hastore is there."""
    from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, make_acl

    secret = tmp_path / "acl"
    secret.write_text(CREDENTIALS)
    secret.chmod(0o600)
    with servers.client("admin:admin") as admin:
        admin.create("/hastore", b"", acl=OPEN_ACL_UNSAFE)
        admin.set_acls("/", [*CREATOR_ALL_ACL, make_acl("world", "anyone", read=True)])
        try:
            pair = registered(make_group(), servers, registry_acl_file=str(secret))
            pair[1].wait_status(lambda s: s["problems"] == [], "no problem")
            assert servers.read(1)["role"] == "SYNC_MASTER"
        finally:
            admin.set_acls("/", OPEN_ACL_UNSAFE)


@pytest.mark.full
def test_a_command_whose_write_gets_no_answer_says_that_it_may_be_done(pair, servers, monkeypatch):
    """The server is silent from the write on: whether it was done, nobody knows."""
    wire = Wire(servers.each[0].port)
    try:
        pair[2].write(registry=f"zk://{wire.address}")
        change = Session.write

        def cut_off(self, *arguments):
            wire.cut()
            monkeypatch.setattr(session, "ANSWER_S", 0.5)
            return change(self, *arguments)

        monkeypatch.setattr(Session, "write", cut_off)
        with pytest.raises(RegistryError, match="it is not known whether the role was written"):
            RegistryPlace(load_config(str(pair[2].path))).change(Role.SYNC_MASTER)
    finally:
        wire.close()


def test_a_parent_that_is_deleted_while_an_object_is_written(servers, monkeypatch):
    """An operator empties the registry beside the nodes: they write again later, and do not end."""
    create = Session._create

    def delete_then_create(self, path, *arguments, **options):
        if path.endswith("/1"):
            with servers.client() as client:
                client.delete("/hastore", recursive=True) if client.exists("/hastore") else None
        return create(self, path, *arguments, **options)

    monkeypatch.setattr(Session, "_create", delete_then_create)
    one = Session(
        servers.registry.removeprefix("zk://"),
        None,
        SYSTEM_CLOCK,
        tls=None,
        stopping=threading.Event(),
        on_event=lambda: None,
    )
    try:
        assert one.create("/hastore/test/g0/1", b"{}") is None
        monkeypatch.undo()
        assert one.create("/hastore/test/g0/1", b"{}") is not None
        assert one.create("/hastore/test/g0/1", b"{}") is None
    finally:
        one.close()
