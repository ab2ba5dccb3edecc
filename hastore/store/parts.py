"""The parts of an open store, as the modules that work on several of them see it."""

from dataclasses import dataclass

from hastore.clock import Clock
from hastore.config.model import StoreConfig
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.queue_offsets import QueueOffsetTable
from hastore.store.derived.index.key_index import KeyIndex
from hastore.store.derived.queues.consume_queue import ConsumeQueueTable
from hastore.store.fs.filesystem import FileSystem
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.flush import FlushService
from hastore.store.log.health import StoreHealth
from hastore.store.replay.service import IndexBuildService
from hastore.store.state.limits import LimitsPage


@dataclass(frozen=True, slots=True)
class StoreParts:
    """Who does what. Locks are taken in the order replay's pause, `log.lock`, `flush.sync_lock`."""

    config: StoreConfig
    fs: FileSystem
    clock: Clock
    health: StoreHealth
    log: CommitLog
    page: LimitsPage
    flush: FlushService
    queues: ConsumeQueueTable
    index: KeyIndex
    window: DedupWindow
    table: QueueOffsetTable
    build: IndexBuildService
