"""Tell whether a store has a log of the other replication mode. Changes nothing."""

from hastore.config.model import Mode
from hastore.store.fs.filesystem import FileSystem

_CLASSIC_LOG = "commitlog"
_DLEDGER_LOG = "dledger-"  # the beginning of the name


def other_mode_problem(fs: FileSystem, root: str, mode: Mode) -> str | None:
    """Return why a node of `mode` must not open the store at `root`; None if it may.

    A store keeps the log of one mode. The other mode would not see it, and begin an empty one.
    """
    if not fs.is_dir(root):
        return None
    names = fs.list_dir(root)
    if mode is Mode.DLEDGER:
        fits, logs = Mode.CLASSIC, [name for name in names if name == _CLASSIC_LOG]
    else:
        fits, logs = Mode.DLEDGER, [name for name in names if name.startswith(_DLEDGER_LOG)]
    for name in logs:
        if fs.list_dir(f"{root}/{name}"):
            return (
                f"{root}/{name} is a log of mode {fits.value}, but the file says mode: "
                f"{mode.value}; give the node another store.root, or set mode: {fits.value}"
            )
    return None
