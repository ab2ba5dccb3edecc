"""A node of mode classic without threads and links: its state, its store, and how it starts."""

from hastore.config.model import RetentionConfig
from hastore.ha.node.node_state import NodeState
from hastore.ha.replica.rewind import finish_cut
from hastore.server.kept_positions import KeptPositions
from hastore.store.message_store import MessageStore
from tests.crash.recording import RecordingFileSystem
from tests.crash.violation import Violation
from tests.store.kit import HOST, config

ROOT = "/node"
FILE_SIZE = 8192
SIZES = {
    "commitlog_file_size": FILE_SIZE,
    "consume_queue_units": 16,
    "index_slots": 16,
    "index_entries": 40,
    "retention": RetentionConfig(max_size_bytes=4 * FILE_SIZE, max_age_ms=None),
}


class Ticks:
    """A clock that goes on by 10 ms at each look, so that each record has a time of its own."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def monotonic_ms(self) -> float:
        self.ms += 10
        return float(self.ms)

    def wall_ms(self) -> int:
        self.ms += 10
        return self.ms


class Parts:
    """What a node has open: its state, its store, and the positions that retention kept."""

    def __init__(self, fs: RecordingFileSystem, clock: Ticks) -> None:
        self.state = NodeState(fs, ROOT)
        self.store = MessageStore(
            config(ROOT, **SIZES), fs=fs, clock=clock, store_host=HOST, on_failure=fail
        )
        self.kept = KeptPositions(fs, ROOT, lambda: self.state.data.aside, clock)


def fail(name: str, failure: BaseException) -> None:
    raise AssertionError(f"{name} failed") from failure


def start(parts: Parts) -> None:
    """Open state and store in the order of Node._open_store and Node._prepare."""
    state, store = parts.state, parts.store
    store.lock()
    state.load(1, "cluster", "group")
    known = state.has_started
    if store.limits_lost(known=known):
        raise Violation("the limits page is gone")
    intent = state.data.intent
    store.open(
        intent_offset=None if intent is None else intent.offset, known=known,
        on_doubt=lambda end: state.note_doubt(end, alone=False),
    )  # fmt: skip
    finish_cut(store, state)
    state.begin_boot("written", alone=False, log_end=store.max_offset)
    store.set_limits(readable=min(store.confirmed_offset, store.max_offset))
    parts.kept.load()
