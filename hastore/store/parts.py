"""The parts of an open store, as the modules that work on several of them see it."""

from dataclasses import dataclass

from hastore.clock import Clock
from hastore.config import StoreConfig
from hastore.store.commit_log import CommitLog
from hastore.store.consume_queue import ConsumeQueueTable
from hastore.store.filesystem import FileSystem
from hastore.store.flush import FlushService
from hastore.store.health import StoreHealth
from hastore.store.idempotence import IdempotenceWindow
from hastore.store.index_build import IndexBuildService
from hastore.store.key_index import KeyIndex
from hastore.store.limits import LimitsPage
from hastore.store.queue_offsets import QueueOffsetTable


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
    window: IdempotenceWindow
    table: QueueOffsetTable
    build: IndexBuildService
