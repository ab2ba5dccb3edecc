"""With which name and password hastore works in ZooKeeper."""

from hastore.config.model import Config
from hastore.fs.filesystem import FileSystem


def read_credentials(config: Config, fs: FileSystem) -> str | None:
    """Return what the configuration's registry_acl_file holds, None without one. Raises OSError."""
    if config.registry_acl_file is None:
        return None
    return fs.read_bytes(config.registry_acl_file).decode().strip()
