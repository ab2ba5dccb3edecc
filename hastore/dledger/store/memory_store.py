"""DLedgerMemoryStore: the entries of a node in memory (`store.kind: memory`).

It is DLedgerMmapFileStore over a file system in memory. So consumers, replay and retention work as
with files, and a follower gets the same bytes. Nothing survives the process: after a restart the
node has no entries and does not remember its votes. A majority that restarts at once loses all.
"""

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import StoreConfig
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.fs.memory import MemoryFileSystem
from hastore.record.host import Host
from hastore.service import OnFailure


class DLedgerMemoryStore(DLedgerMmapFileStore):
    """The EntryStore of a node whose log is in memory; `config.root` is not touched."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        node: int,
        clock: Clock = SYSTEM_CLOCK,
        store_host: Host,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Prepare; memory is taken as entries are appended."""
        self._fs = fs = MemoryFileSystem()
        self._rescued = f"{config.root}/rescued"
        super().__init__(
            config, node=node, fs=fs, clock=clock, store_host=store_host, on_failure=on_failure
        )

    def truncate(self, index: int) -> int:
        """Remove the entries from `index` on; nobody could fetch an archive from this memory."""
        archived = super().truncate(index)
        self._forget_archives()
        return archived

    def install(self, index: int, pos: int, prev_term: int) -> str:
        """Drop the log, and begin an empty one; see EntryStore.install."""
        folder = super().install(index, pos, prev_term)
        self._forget_archives()
        return folder

    def _forget_archives(self) -> None:
        if self._fs.exists(self._rescued):
            self._fs.remove_tree(self._rescued)
