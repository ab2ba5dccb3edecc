"""What a node remembers of ZooKeeper over a restart."""

import pytest

from hastore.config.model import Role
from hastore.errors import StoreBrokenError
from hastore.fs.filesystem import REAL
from hastore.registry.remembered import WITHOUT, RegistryMemory, Remembered


@pytest.fixture
def root(tmp_path):
    (tmp_path / "hastore").mkdir()
    return str(tmp_path)


def loaded(root, node=1):
    memory = RegistryMemory(REAL, root, node)
    memory.load()
    return memory


def test_it_survives_a_restart(root):
    assert loaded(root).data == Remembered()
    memory = loaded(root)
    memory.save(role=Role.SYNC_MASTER, changed=7)
    memory.save(once="x")
    assert loaded(root).data == Remembered(role=Role.SYNC_MASTER, changed=7, once="x", node=1)
    memory.forget()
    memory.forget()
    assert loaded(root).data == Remembered(made=WITHOUT, node=1)


def test_a_failed_write_changes_nothing(root, monkeypatch):
    memory = loaded(root)

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(REAL, "replace_bytes", full)
    with pytest.raises(OSError, match="No space"):
        memory.save(role=Role.SLAVE)
    assert memory.data == Remembered()


def test_a_damaged_file_is_named(root, tmp_path):
    (tmp_path / "hastore" / "registry.json").write_text("{")
    with pytest.raises(StoreBrokenError, match="registry.json is damaged .*; remove it"):
        loaded(root)


def test_the_file_of_another_node_gives_no_role(root, tmp_path):
    loaded(root, node=2).save(role=Role.SYNC_MASTER, changed=7)
    with pytest.raises(StoreBrokenError, match=r"was written by node 2, and this is node 1; .* or "
                                               r"remove it"):  # fmt: skip
        loaded(root, node=1)
    assert loaded(root, node=2).data.role is Role.SYNC_MASTER


def test_a_file_of_an_earlier_version_says_no_node(root, tmp_path):
    (tmp_path / "hastore" / "registry.json").write_text('{"role":"SLAVE","changed":7}')
    memory = loaded(root)
    assert memory.data == Remembered(role=Role.SLAVE, changed=7)
    memory.save(changed=8)
    assert loaded(root).data == Remembered(role=Role.SLAVE, changed=8, node=1)
