"""Choose the kind of a side: tcp://HOST:PORT is a running node, all else a store's folder."""

from hastore.pipeline.audit.folder import FolderSide, folder_extent, open_folder
from hastore.pipeline.audit.node import NodeSide, node_extent
from hastore.pipeline.audit.sides import NODE, Extent, Side


def extent(where: str) -> Extent:
    """Return what a side has. Raises UsageError, StoreError, UnreachableError."""
    return node_extent(where) if "://" in where else folder_extent(where)


def check_side(where: str) -> None:
    """Look whether there is a log; scan none. Raises UsageError, StoreError, UnreachableError."""
    if "://" in where:
        node_extent(where)
    else:
        open_folder(where).close()


def open_side(given: Extent, algorithm: str, security: str | None = None) -> Side:
    """Open a side in the process of a task; `security` is the path of the client's file."""
    if given.kind == NODE:
        return NodeSide(given, algorithm, security)
    return FolderSide(given, algorithm)
