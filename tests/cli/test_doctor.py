"""`hastore doctor` on a store of mode dledger whose node does not run."""

import errno
import json
import os
import pathlib
import shutil
import socket
from types import SimpleNamespace

import pytest

from hastore.cli import doctor
from hastore.cli.doctor import Finding, Severity, check_node
from hastore.config.file import load_config
from hastore.errors import StoreError
from hastore.security.identity import Identity
from hastore.security.identity_editor import IdentityEditor
from hastore.server.dledger_node import DLedgerNode
from tests.dledger.store.kit import opened, put
from tests.process.dledger_group import DLedgerGroup
from tests.server.kit import group_of_one, running
from tests.store.kit import FILE_SIZE, message
from tests.test_listeners import V6, needs_ipv6


@pytest.fixture
def node(tmp_path, impatient):
    """A node with a log, which does not run."""
    with DLedgerGroup(tmp_path, 1) as group:
        (node,) = group
        with opened(node.store) as store:
            put(store, 1, *(message(number) for number in range(10)))
        yield node


def found(node, check, **overrides) -> Finding:
    config = load_config(str(node.path), overrides)
    (finding,) = [one for one in check_node(str(node.path), config) if one.check == check]
    return finding


def test_a_good_store(node):
    assert found(node, "store").verdict is Severity.GOOD
    shutil.rmtree(node.store / "dledger-n1" / "index")  # the node writes it anew
    assert found(node, "store").verdict is Severity.GOOD


def test_another_size_of_the_log_files(node):
    finding = found(node, "store", **{"store.commitlog_file_size": "128KiB"})
    assert finding.verdict is Severity.BAD
    assert f"dledger-n1/data/{0:020} has {FILE_SIZE} bytes" in finding.text
    assert "store.commitlog_file_size is 131072" in finding.text


def test_a_disk_that_is_nearly_full(node, monkeypatch):
    """Files of another size than those of the log would keep the node from starting."""
    usage = shutil.disk_usage(node.store)._replace(free=1)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    finding = found(node, "disk")
    assert finding.verdict is Severity.BAD
    assert finding.text.endswith("or set retention.max_size, which takes effect at once")
    shutil.rmtree(node.store)
    assert found(node, "disk").text.endswith("lower store.commitlog_file_size on every node")


def test_the_place_of_a_broken_off_restore(node):
    shutil.rmtree(node.store / "dledger-n1")
    (node.store / "restoring.tmp").mkdir()
    finding = found(node, "store")
    assert finding.verdict is Severity.BAD and "give `hastore restore` again" in finding.text


def test_a_store_that_other_users_may_read(node):
    assert found(node, "privacy").verdict is Severity.GOOD
    log = node.store / "dledger-n1"
    log.chmod(0o755)  # as an earlier version made it
    (node.store / "notes").mkdir(mode=0o755)  # not the store's
    finding = found(node, "privacy")
    assert finding.verdict is Severity.BAD
    assert finding.text.endswith(f"run chmod go-rwx {log}")
    assert f"chmod g-w,o-rwx {log}" in found(node, "privacy", **{"store.group_read": "true"}).text
    log.chmod(0o750)
    assert found(node, "privacy", **{"store.group_read": "true"}).verdict is Severity.GOOD
    log.chmod(0o700)
    node.store.chmod(0o777)
    assert found(node, "privacy").text.endswith(f"run chmod go-w {node.store}")


def test_a_store_in_a_folder_of_another_user(node, monkeypatch):
    """Who owns the folder can put another file in the place of any."""
    owner = node.store.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    if owner:
        assert f"belongs to user {owner}, who can change" in found(node, "privacy").text
    else:
        assert found(node, "privacy").verdict is Severity.GOOD  # root may, whoever owns it
        os.chown(node.store, 12345, -1)
        monkeypatch.setattr("os.geteuid", lambda: 12346)
        assert "belongs to user 12345, who can change" in found(node, "privacy").text


def test_a_part_of_the_store_on_another_disk_that_other_users_may_read(node, tmp_path):
    linked = tmp_path / "disk"
    (node.store / "dledger-n1").rename(linked)
    (node.store / "dledger-n1").symlink_to(linked)
    assert found(node, "privacy").verdict is Severity.GOOD
    linked.chmod(0o755)
    finding = found(node, "privacy")
    assert finding.verdict is Severity.BAD
    assert finding.text.endswith(f"; run chmod go-rwx {node.store}/dledger-n1")


def test_a_volume_of_root_where_the_node_writes_by_its_group(node, monkeypatch):
    """As Kubernetes mounts one with fsGroup: without the group's right the node cannot write."""
    real = os.stat

    def stat(path, **given):
        status = list(real(path, **given))
        if path == str(node.store):
            status[0], status[4:6] = 0o42770, (0, 4711)
        return os.stat_result(status)

    monkeypatch.setattr("os.stat", stat)
    monkeypatch.setattr("os.geteuid", lambda: 1001)
    monkeypatch.setattr("os.getgroups", lambda: [4711])
    finding = found(node, "privacy")
    assert finding.verdict is Severity.NOTE
    assert "can be changed by group 4711" in finding.text and "chmod" not in finding.text
    monkeypatch.setattr("os.getgroups", lambda: [4712])
    remedy = f"as root, run chown 1001 {node.store}, then chmod go-w {node.store}"
    assert found(node, "privacy").text.endswith(remedy)


def test_the_log_of_another_node(node):
    (node.store / "dledger-n1").rename(node.store / "dledger-n0")
    finding = found(node, "store")
    assert finding.verdict is Severity.BAD and "rename the directory" in finding.text


def test_a_file_stands_where_the_store_is_to_be(node, tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    for root in (place, place / "store"):
        finding = found(node, "store", **{"store.root": str(root)})
        assert finding.verdict is Severity.BAD and f"{place} is no folder" in finding.text
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    finding = found(node, "store", **{"store.root": str(tmp_path / "link")})
    assert finding.verdict is Severity.BAD and "is no folder" in finding.text
    finding = found(node, "store", **{"store.root": str(tmp_path / "new" / "store")})
    assert finding.verdict is Severity.GOOD and "is created" in finding.text


def test_a_dead_disk_is_not_a_store_that_is_still_to_be_made(node, monkeypatch):
    real, root = os.stat, str(node.store)

    def stat(path, *args, **kwargs):
        if str(path).startswith(root):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **kwargs)

    config = load_config(str(node.path))
    monkeypatch.setattr("os.stat", stat)
    findings = {one.check: one for one in check_node(str(node.path), config)}
    store = findings["store"]
    assert store.verdict is Severity.BAD
    assert f"{root} cannot be read: Input/output error" in store.text
    assert "A dead disk" in store.text and "disk" not in findings


@pytest.mark.parametrize("code, remedy", [(errno.EIO, "dmesg"), (errno.EACCES, "the node's user")])
def test_a_state_that_cannot_be_read_names_the_remedy_that_fits(node, monkeypatch, code, remedy):
    (node.store / "hastore").mkdir(exist_ok=True)

    def refuse(_path):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)
    with pytest.raises(StoreError, match=remedy):
        doctor._state(str(node.store))


def test_a_disk_that_is_mounted_read_only(node, monkeypatch):
    """As the kernel does after an error of the disk; the owner of the folder is not the cause."""
    real = os.statvfs

    def statvfs(path):
        found = list(real(path))
        found[8] |= os.ST_RDONLY
        return os.statvfs_result(found)

    monkeypatch.setattr("os.access", lambda *_: False)
    assert "is not writable" in found(node, "store").text
    monkeypatch.setattr("os.statvfs", statvfs)
    finding = found(node, "store")
    assert finding.verdict is Severity.BAD
    assert "mounted read-only" in finding.text and "chown" not in finding.text


def test_a_peer_may_be_old_again_once_the_version_before_has_written_the_store(
    tmp_path, monkeypatch
):
    """As at the node's own next start (DLedgerNode)."""
    root = tmp_path / "s"
    with running(DLedgerNode(group_of_one(root), lambda: None)) as node:
        node.state.save(proved_nodes=(2,))
    asked = []
    opened = SimpleNamespace(close=lambda: None, hello=None, answer=None)
    monkeypatch.setattr(
        doctor, "call", lambda *_, may_be_old: (asked.append(may_be_old), opened)[1]
    )
    doctor.ask_peer(group_of_one(root), 2, "127.0.0.1:1", 100)
    path = root / "hastore" / "entries.json"
    facts = json.loads(path.read_bytes())
    del facts["proves_first"]
    path.write_text(json.dumps(facts))
    doctor.ask_peer(group_of_one(root), 2, "127.0.0.1:1", 100)
    assert asked == [False, True]


def test_the_file_of_identities_is_checked(node, tmp_path):
    path = tmp_path / "ids.yaml"
    given = {"security.identities": str(path)}
    finding = found(node, "identities", **given)
    assert finding.verdict is Severity.BAD and "cannot be read" in finding.text
    editor = IdentityEditor(str(path), create=True)
    editor.add(Identity("shop"), None, 0, secret="s" * 16)
    editor.save()
    finding = found(node, "identities", **given)
    assert finding.verdict is Severity.GOOD and "1 with secrets" in finding.text
    path.chmod(0o640)
    finding = found(node, "identities", **given)
    assert finding.verdict is Severity.BAD and "chmod 600" in finding.text


@needs_ipv6
@pytest.mark.parametrize("port", ["api", "ha", "http"])
def test_a_port_at_a_name_that_has_an_ipv6_address_only(node, monkeypatch, port):
    """It was said to be taken, also where the node could bind it."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [V6])
    scheme = "tcp://" if port == "api" else ""
    bound = {f"bind.{port}": f"{scheme}node.example:0"}
    opened = {f"{one}.allow_unauthenticated": "true" for one in ("api", "ha")}
    finding = found(node, port, **bound, **opened)
    assert finding.verdict is Severity.GOOD, finding.text


def test_a_node_that_hangs_is_not_said_to_be_down(node):
    """A process has its port, and says nothing: nobody is to free that, or to start another one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        bound = {"bind.api": f"tcp://127.0.0.1:{server.getsockname()[1]}"}
        finding = found(node, "node", **bound)
        assert finding.verdict is Severity.BAD
        assert "node 1 does not answer (" in finding.text and "hangs, is stopped" in finding.text
        config = load_config(str(node.path), bound)
        checks = {one.check: one for one in check_node(str(node.path), config)}
        assert "api" not in checks and checks["store"].verdict is Severity.GOOD
    finding = found(node, "node", **bound)  # it has gone
    assert (finding.verdict, finding.text) == (Severity.NOTE, "node 1 is not running")
    assert found(node, "api", **bound).verdict is Severity.GOOD


def test_a_log_file_without_which_the_node_does_not_start(node, tmp_path):
    path = tmp_path / "logs" / "node1.log"
    finding = found(node, "log", **{"log.file": str(path)})
    assert finding.verdict is Severity.BAD and f"there is no folder {path.parent}" in finding.text
    path.parent.mkdir()
    assert found(node, "log", **{"log.file": str(path)}).verdict is Severity.GOOD
    assert not path.exists()
    assert "it is a folder" in found(node, "log", **{"log.file": str(path.parent)}).text


def test_the_damaged_state_of_a_node_alone(node):
    """No other node is asked, which needs it: so nothing but this said that it does not start."""
    path = node.store / "hastore" / "node.json"
    path.parent.mkdir(exist_ok=True)
    for damaged in ("{", "[]", "{}"):
        path.write_text(damaged)
        finding = found(node, "store")
        assert finding.verdict is Severity.BAD and f"{node.store}" in finding.text
