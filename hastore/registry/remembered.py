"""What a node knows of ZooKeeper before it connects: registry.json, its name and password.

`<store>/hastore/registry.json` is what a node remembers of ZooKeeper over a restart. With it the
node starts in the role that it had, even if ZooKeeper is out of reach; it notices that ZooKeeper's
data was restored from an older copy; and it uses the options of one command only once.

A node without a registry loads this module, so it does not need kazoo.
"""

import threading

import msgspec

from hastore.config.model import Config, Role
from hastore.errors import UNREADABLE, StoreBrokenError
from hastore.fs.filesystem import FileSystem

WITHOUT = -1


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """The content of registry.json."""

    role: Role | None = None  # the last role that ZooKeeper has given this node
    changed: int = 0  # the transaction (mzxid) that wrote it
    made: int = 0  # the one (czxid) that made the znode; 0: not known, WITHOUT: see `forget`
    once: str = ""  # the id of the options that were used last
    node: int | None = None  # the node that wrote the file; None: an earlier version did


class RegistryMemory:
    """The registry.json of one store; two threads write it."""

    def __init__(self, fs: FileSystem, root: str, node: int) -> None:
        self._fs = fs
        self._node = node
        self._path = f"{root}/hastore/registry.json"
        self._lock = threading.Lock()
        self._data = Remembered()

    @property
    def data(self) -> Remembered:
        """What is remembered."""
        return self._data

    def load(self) -> None:
        """Read the file, if there is one.

        Raises StoreBrokenError if it is damaged, or another node's: a role that ZooKeeper has given
        to another node must not make this one a master.
        """
        if not self._fs.exists(self._path):
            return
        try:
            data = msgspec.json.decode(self._fs.read_bytes(self._path), type=Remembered)
        except UNREADABLE as error:
            raise StoreBrokenError(
                f"{self._path} is damaged ({error}); remove it, and set `role` in the node's file "
                "to the role with which the node shall start while ZooKeeper is out of reach"
            ) from error
        if data.node not in (None, self._node):
            raise StoreBrokenError(
                f"{self._path} was written by node {data.node}, and this is node {self._node}; "
                "bring back this node's own file; or remove it, and set `role` in the node's file "
                "to the role with which the node shall start while ZooKeeper is out of reach"
            )
        self._data = data

    def forget(self) -> None:
        """Forget all but that the node has had a registry: it has none any more, and what ZooKeeper
        still has of it is outdated. Raises OSError.
        """
        if self._fs.exists(self._path):
            self.save(role=None, changed=0, made=WITHOUT, once="")

    def save(self, **changes: object) -> None:
        """Change fields, durably. Raises OSError; then nothing is changed."""
        with self._lock:
            data = msgspec.structs.replace(self._data, node=self._node, **changes)
            if data != self._data:
                self._fs.replace_bytes(self._path, msgspec.json.encode(data))
                self._data = data


def read_credentials(config: Config, fs: FileSystem) -> str | None:
    """Return what the configuration's registry_acl_file holds, None without one. Raises OSError."""
    if config.registry_acl_file is None:
        return None
    return fs.read_bytes(config.registry_acl_file).decode().strip()
