"""Tell whether a store has a log that its node would not see. Changes nothing."""

from hastore.config.model import Mode
from hastore.fs.filesystem import FileSystem

_CLASSIC_LOG = "commitlog"
_DLEDGER_LOG = "dledger-"  # the beginning of the name


def ledger_name(node: int) -> str:
    """Return the name of the directory with a node's log in mode dledger."""
    return f"{_DLEDGER_LOG}n{node}"


def other_log_problem(fs: FileSystem, root: str, mode: Mode, node: int) -> str | None:
    """Return why a node of `mode` must not open the store at `root`; None if it may.

    The store has the log of the other mode, or in mode dledger that of another node. The node would
    not see it, and begin an empty one.
    """
    if not fs.is_dir(root):
        return None
    names = fs.list_dir(root)
    ledgers = [name for name in names if name.startswith(_DLEDGER_LOG)]
    if mode is Mode.DLEDGER:
        fits, logs = Mode.CLASSIC, [name for name in names if name == _CLASSIC_LOG]
    else:
        fits, logs = Mode.DLEDGER, ledgers
    for name in logs:
        if fs.list_dir(f"{root}/{name}"):
            return (
                f"{root}/{name} is a log of mode {fits.value}, but the file says mode: "
                f"{mode.value}; give the node another store.root, or set mode: {fits.value}"
            )
    own = ledger_name(node)
    if mode is Mode.DLEDGER and not fs.list_dir(f"{root}/{own}/data"):
        for name in ledgers:
            if name != own and fs.list_dir(f"{root}/{name}/data"):
                return (
                    f"{root}/{name} is a log of DLedger, but node {node} keeps its log in {own}:"
                    " rename the directory if it is this node's, or give the node another"
                    " store.root"
                )
    return None
