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


def loaded(root):
    memory = RegistryMemory(REAL, root)
    memory.load()
    return memory


def test_it_survives_a_restart(root):
    assert loaded(root).data == Remembered()
    memory = loaded(root)
    memory.save(role=Role.SYNC_MASTER, changed=7)
    memory.save(once="x")
    assert loaded(root).data == Remembered(role=Role.SYNC_MASTER, changed=7, once="x")
    memory.forget()
    memory.forget()
    assert loaded(root).data == Remembered(made=WITHOUT)


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
