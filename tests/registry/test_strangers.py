"""Objects in ZooKeeper that others may have written choose no role of a node with credentials.

ZooKeeper is a tree in memory with its rules for versions, transactions and ACLs; `servers.py` has
real ones, with the same attacks in `test_bad_objects.py`.
"""

import errno
import itertools
import json
import threading
import types
from unittest.mock import Mock

import pytest

pytest.importorskip("kazoo")

from kazoo.exceptions import (
    BadVersionError,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
)
from kazoo.security import OPEN_ACL_UNSAFE, Permissions, make_acl, make_digest_acl

from hastore.cli.own_node import RegistryPlace
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config, NodeAddress, Role, StoreConfig
from hastore.errors import RegistryError
from hastore.fs.filesystem import REAL
from hastore.registry import session
from hastore.registry.remembered import RegistryMemory
from hastore.registry.session import Session
from hastore.server.role_source import RegistryRoles
from hastore.service import raise_failure

CREDENTIALS = "hastore:s3cret"
ATTACKER = "mallory:x"
GROUP = "/hastore/test/g0"
OURS = [make_digest_acl("hastore", "s3cret", all=True), make_acl("world", "anyone", read=True)]


class Result:
    """An operation of kazoo's that is done."""

    def __init__(self, do):
        self._do = do

    def wait(self, _timeout_s):
        return True

    ready = wait

    def get_nowait(self):
        return self._do()


class Tree:
    """ZooKeeper's znodes: path -> [data, ACL, version, czxid, mzxid]."""

    def __init__(self):
        self.znodes = {"/": [b"", OPEN_ACL_UNSAFE, 0, 0, 0]}
        self._transactions = itertools.count(1)

    def node(self, path):
        if path not in self.znodes:
            raise NoNodeError
        return self.znodes[path]

    def allow(self, user, path, right):
        own = make_digest_acl(*user.split(":"), all=True).id if user else None
        for acl in self.node(path)[1]:
            if acl.perms & right and acl.id in (own, ("world", "anyone")):
                return
        raise NoAuthError

    def stat(self, path):
        _, _, version, made, changed = self.znodes[path]
        return types.SimpleNamespace(version=version, mzxid=changed, czxid=made)

    def create(self, user, path, data, acl):
        parent = path.rpartition("/")[0] or "/"
        self.allow(user, parent, Permissions.CREATE)
        if path in self.znodes:
            raise NodeExistsError
        now = next(self._transactions)
        self.znodes[path] = [data, acl, 0, now, now]
        return path, self.stat(path)

    def set(self, user, path, data, version):
        self.allow(user, path, Permissions.WRITE)
        znode = self.node(path)
        if version not in (-1, znode[2]):
            raise BadVersionError
        znode[0], znode[2], znode[4] = data, znode[2] + 1, next(self._transactions)
        return self.stat(path)

    def delete(self, user, path, version):
        self.allow(user, path.rpartition("/")[0], Permissions.DELETE)
        if version not in (-1, self.node(path)[2]):
            raise BadVersionError
        if any(one.startswith(f"{path}/") for one in self.znodes):
            raise NotEmptyError
        del self.znodes[path]
        return True

    def get(self, user, path):
        self.allow(user, path, Permissions.READ)
        return self.node(path)[0], self.stat(path)

    def acls(self, user, path):
        return list(self.node(path)[1]), self.stat(path)

    def set_acls(self, user, path, acl):
        self.allow(user, path, Permissions.ADMIN)
        self.node(path)[1] = acl

    def children(self, user, path):
        self.allow(user, path, Permissions.READ)
        return [p.rpartition("/")[2] for p in self.znodes if p.rpartition("/")[0] == path]

    def make(self, user, path, data, acl=OPEN_ACL_UNSAFE):
        """Make a znode and the parents that it lacks, as anybody can."""
        for end in (index for index, each in enumerate(path) if each == "/" and index):
            if path[:end] not in self.znodes:
                self.create(user, path[:end], b"", acl)
        self.create(user, path, data, acl)


class FakeClient:
    """The part of KazooClient that a Session uses, on a Tree."""

    connected = True

    def __init__(self, tree, auth_data, **_options):
        self._tree = tree
        self._user = auth_data[0][1] if auth_data else None

    def __getattr__(self, name):
        def call(path, *given, watch=None, acl=None, version=-1, **options):
            del watch, options
            arguments = [*given, acl] if acl is not None else given
            do = getattr(self._tree, names.get(name, name.removesuffix("_async")))
            return Result(lambda: do(self._user, path, *arguments))

        names = {"get_acls_async": "acls", "get_children_async": "children"}
        if not name.endswith("_async"):
            raise AttributeError(name)
        return call

    def exists_async(self, path, watch):
        del watch
        return Result(lambda: self._tree.stat(path) if path in self._tree.znodes else None)

    def sync_async(self, path):
        return Result(lambda: path)

    def start_async(self):
        return threading.main_thread()._started  # an Event that is set

    def add_listener(self, listener):
        del listener

    def stop(self):
        """End."""

    close = stop

    def transaction(self):
        return FakeTransaction(self._tree, self._user)


class FakeTransaction:
    def __init__(self, tree, user):
        self._tree, self._user, self._steps = tree, user, []

    def delete(self, path, version):
        self._steps.append(lambda: self._tree.delete(self._user, path, version))

    def create(self, path, data, acl):
        self._steps.append(lambda: self._tree.create(self._user, path, data, acl)[0])

    def commit_async(self):
        return Result(self._commit)

    def _commit(self):
        before = {path: list(znode) for path, znode in self._tree.znodes.items()}
        results = []
        for step in self._steps:
            try:
                results.append(step())
            except (NoNodeError, BadVersionError, NoAuthError, NotEmptyError) as failure:
                self._tree.znodes = before
                left = len(self._steps) - len(results) - 1
                return [RolledBackError() for _ in results] + [failure] + [RolledBackError()] * left
        return results


@pytest.fixture
def tree(monkeypatch):
    made = Tree()
    monkeypatch.setattr(session, "KazooClient", lambda **given: FakeClient(made, **given))
    return made


def places(number):
    return {"api": f"tcp://127.0.0.1:{number}", "ha": f"127.0.0.1:{number + 10}",
            "http": f"127.0.0.1:{number + 20}"}  # fmt: skip


class OneNode:
    """A node's side of the registry: what it reads, what it follows, what it says."""

    def __init__(self, root, role=Role.SLAVE, credentials=CREDENTIALS):
        (root / "hastore").mkdir(exist_ok=True)
        acl = root / "acl"
        if credentials:
            acl.write_text(credentials)
            acl.chmod(0o600)
        addresses = {n: NodeAddress(**places(n)) for n in (1, 2)}
        self.config = Config(
            cluster="test", group="g0", node=1, role=role, nodes=addresses, acks=1,
            registry="zk://127.0.0.1:1", registry_acl_file=str(acl) if credentials else None,
            store=StoreConfig(root=str(root)),
        )  # fmt: skip
        self.moved = {}
        self.epoch = 0  # the greatest that the node knows
        self.roles = RegistryRoles(
            self.config, lambda: None, RegistryMemory(REAL, str(root), self.config.node),
            lambda: "store-1", fs=REAL, clock=SYSTEM_CLOCK, on_addresses=self.moved.update,
            on_failure=raise_failure,
            greatest_epoch=lambda: self.epoch,
        )  # fmt: skip
        self.registry = self.roles.registry
        self.registry.load()
        self.session = self.registry.connect()

    def read(self):
        """Read until nothing more is to be done; return the role that the node has then."""
        for _ in range(10):
            self.registry.changed.clear()
            self.registry.read(self.session)
            if not self.registry.changed.is_set():
                return self.roles.first().role
        raise AssertionError("it never rests")


def entry(role, number=1, **more):
    return json.dumps({"role": role, **places(number), **more}).encode()


FORCED = {"id": "x", "command": "promote", "epoch": 0, "wall_ms": SYSTEM_CLOCK.wall_ms(),
          "force_unclean": True}  # fmt: skip


@pytest.mark.parametrize("acl", ["open", "the stranger's own, readable"])
def test_an_object_made_before_the_first_start_chooses_no_role(tree, tmp_path, acl):
    closed = [make_digest_acl(*ATTACKER.split(":"), all=True),
              make_acl("world", "anyone", read=True)]  # fmt: skip
    acl = OPEN_ACL_UNSAFE if acl == "open" else closed
    tree.make(None, GROUP, b"")
    tree.make(ATTACKER, f"{GROUP}/1", entry("SYNC_MASTER", once=FORCED), acl)
    node = OneNode(tmp_path)
    assert node.read() is Role.SLAVE
    assert node.roles.take_flags("promote", 0) is None, "an unclean promotion was forced"
    (problem,) = node.registry.problems()
    assert f"{GROUP}/1 has another ACL than that of registry_acl_file" in problem
    assert "asks for the role SYNC_MASTER" in problem and "delete the znode" in problem
    assert node.registry.status()["role"] is None
    assert json.loads(tree.get(None, f"{GROUP}/1")[0])["role"] == "SYNC_MASTER", "it stays to see"
    # The remedies: the operator's command replaces it, or it is deleted.
    RegistryPlace(node.config).change(Role.SYNC_MASTER)
    assert node.read() is Role.SYNC_MASTER and node.registry.problems() == []
    assert tree.acls(None, f"{GROUP}/1")[0] == OURS


def test_a_deleted_object_is_written_anew_with_our_acl(tree, tmp_path):
    tree.make(None, f"{GROUP}/1", entry("SYNC_MASTER"))
    node = OneNode(tmp_path)
    assert node.read() is Role.SLAVE
    tree.delete(CREDENTIALS, f"{GROUP}/1", -1)
    assert node.read() is Role.SLAVE and node.registry.problems() == []
    assert json.loads(tree.get(None, f"{GROUP}/1")[0])["role"] == "SLAVE"
    assert tree.acls(None, f"{GROUP}/1")[0] == OURS
    with pytest.raises(NoAuthError):
        tree.set(ATTACKER, f"{GROUP}/1", entry("SYNC_MASTER"), -1)
    tree.set(CREDENTIALS, f"{GROUP}/1", entry("SYNC_MASTER"), -1)  # the operator's plain `set`
    assert node.read() is Role.SYNC_MASTER


@pytest.mark.parametrize("data", [b"", entry("SLAVE")], ids=["empty", "of its own role"])
def test_an_open_object_that_asks_for_nothing_is_closed_in_one_step(tree, tmp_path, data):
    """A node without credentials made it: the operator gave the node some since."""
    tree.make(None, f"{GROUP}/1", data)
    made = tree.stat(f"{GROUP}/1").czxid
    node = OneNode(tmp_path)
    replace, attacked = Session._replace, []

    def attacking(self, path, wanted, found):
        """A stranger writes between the read and the replacement."""
        if not attacked:
            attacked.append(tree.set(None, path, entry("SYNC_MASTER"), -1))
        return replace(self, path, wanted, found)

    Session._replace = attacking
    try:
        assert node.read() is Role.SLAVE
    finally:
        Session._replace = replace
    assert attacked and "asks for the role SYNC_MASTER" in node.registry.problems()[0]
    tree.set(None, f"{GROUP}/1", data, -1)
    assert node.read() is Role.SLAVE and node.registry.problems() == []
    assert tree.acls(None, f"{GROUP}/1")[0] == OURS and tree.stat(f"{GROUP}/1").czxid > made


def test_an_object_that_changes_while_it_is_read_is_read_again(tree, tmp_path, monkeypatch):
    node = OneNode(tmp_path)
    node.read()
    acls = Tree.acls
    again = []

    def between(self, user, path):
        if not again and path == f"{GROUP}/1":
            again.append(tree.set(CREDENTIALS, path, entry("SYNC_MASTER"), -1))
        return acls(self, user, path)

    monkeypatch.setattr(Tree, "acls", between)
    assert node.read() is Role.SYNC_MASTER and again


def test_a_role_read_after_a_time_without_zookeeper_is_as_old_as_that_time(tree, tmp_path):
    """ZooKeeper answers late after a start, or was out of reach of this node alone meanwhile."""
    node = OneNode(tmp_path)
    node.epoch = 1
    node.read()
    node.roles.read()
    tree.set(CREDENTIALS, f"{GROUP}/1", entry("SYNC_MASTER"), -1)
    node.registry.read(node.session)
    assert node.roles.read().role is Role.SYNC_MASTER and node.roles.meant_epoch() is None
    tree.set(CREDENTIALS, f"{GROUP}/1", entry("SLAVE"), -1)
    node.registry.read(node.session)
    assert node.roles.read().role is Role.SLAVE
    node.registry.note_lost("the connection is lost")
    node.roles.read()
    tree.set(CREDENTIALS, f"{GROUP}/1", entry("SYNC_MASTER"), -1)
    node.epoch = 2  # of a master that was promoted meanwhile, and that this node has met
    node.roles.read()
    node.registry.read(node.session)
    assert node.roles.read().role is Role.SYNC_MASTER and node.roles.meant_epoch() == 1
    restarted = OneNode(tmp_path)
    tree.set(CREDENTIALS, f"{GROUP}/1", entry("SLAVE"), -1)
    restarted.epoch = 2
    assert restarted.roles.first().role is Role.SYNC_MASTER, "ZooKeeper has not answered yet"
    restarted.epoch = 3
    restarted.registry.read(restarted.session)
    assert restarted.roles.read().role is Role.SLAVE and restarted.roles.meant_epoch() == 2


def test_an_emptied_zookeeper_filled_by_strangers_changes_no_role(tree, tmp_path):
    node = OneNode(tmp_path, Role.SYNC_MASTER)
    assert node.read() is Role.SYNC_MASTER
    for path in [path for path in tree.znodes if path.startswith("/hastore")]:
        del tree.znodes[path]
    tree.make(None, f"{GROUP}/1", entry("SLAVE"))
    assert node.read() is Role.SYNC_MASTER
    assert "asks for the role SLAVE" in node.registry.problems()[0]
    again = OneNode(tmp_path, Role.SLAVE)  # restarted: the file's role does not count
    assert again.read() is Role.SYNC_MASTER


@pytest.mark.parametrize("credentials", [CREDENTIALS, None], ids=["with", "without"])
def test_a_disk_that_cannot_be_written_lets_a_node_write_its_object_once(
    tree, tmp_path, monkeypatch, credentials
):
    """Each write is a change that ZooKeeper tells the node: to write at each read is a loop."""
    node = OneNode(tmp_path, credentials=credentials)
    assert node.read() is Role.SLAVE
    tree.delete(credentials, f"{GROUP}/1", -1)
    broken = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    with monkeypatch.context() as disk:
        disk.setattr(node.roles._memory._fs, "replace_bytes", broken)
        for _ in range(3):
            assert node.read() is Role.SLAVE
            (problem,) = node.registry.problems()
            assert "cannot be saved in the store" in problem
        assert tree.stat(f"{GROUP}/1").version == 0, "it was written again"
        # Nor is a role that an operator sets then taken for an old one.
        tree.set(credentials, f"{GROUP}/1", entry("SYNC_MASTER", store="store-1"), -1)
        assert node.read() is Role.SLAVE and node.registry.problems()
        assert json.loads(tree.get(None, f"{GROUP}/1")[0])["role"] == "SYNC_MASTER"
    assert node.read() is Role.SYNC_MASTER and node.registry.problems() == []


def test_a_group_that_a_stranger_has_closed_is_named(tree, tmp_path):
    tree.make(None, "/hastore/test", b"")
    tree.create(ATTACKER, GROUP, b"", [make_digest_acl(*ATTACKER.split(":"), all=True)])
    tree.make(ATTACKER, f"{GROUP}/1", entry("SYNC_MASTER"))
    node = OneNode(tmp_path)
    assert node.read() is Role.SLAVE
    (problem,) = node.registry.problems()
    assert f"{GROUP}/1 has another ACL" in problem
    tree.delete(ATTACKER, f"{GROUP}/1", -1)
    assert node.read() is Role.SLAVE
    (problem,) = node.registry.problems()
    assert f"refuses access to {GROUP}" in problem and "If strangers made it, delete it" in problem


def test_an_object_with_children_of_others_is_named(tree, tmp_path):
    tree.make(None, f"{GROUP}/1/child", b"")
    node = OneNode(tmp_path)
    assert node.read() is Role.SLAVE
    (problem,) = node.registry.problems()
    assert f"{GROUP}/1 was made by others, and has children" in problem


def test_addresses_of_other_nodes_that_strangers_wrote_do_not_count(tree, tmp_path):
    node = OneNode(tmp_path)
    node.read()
    tree.make(CREDENTIALS, f"{GROUP}/2", entry("SLAVE", 7), OPEN_ACL_UNSAFE)
    node.read()
    assert node.moved == {} and node.registry.status()["nodes"] == {}
    tree.set_acls(CREDENTIALS, f"{GROUP}/2", OURS)
    node.read()
    assert node.moved[2].ha == "127.0.0.1:17"


def test_without_credentials_any_object_counts(tree, tmp_path):
    tree.make(None, f"{GROUP}/1", entry("SYNC_MASTER"))
    assert OneNode(tmp_path, credentials=None).read() is Role.SYNC_MASTER


def test_doctor_and_the_commands_name_an_object_of_others(tree, tmp_path, capsys):
    tree.make(None, f"{GROUP}/1", entry("SYNC_MASTER"))
    place = RegistryPlace(OneNode(tmp_path).config)
    with pytest.raises(RegistryError, match="has another ACL than that of registry_acl_file"):
        place.read_role()
    assert place.role() is None
    assert f"warning: {GROUP}/1 has another ACL" in capsys.readouterr().err
