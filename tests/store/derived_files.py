"""Everything derived from a log, composed for a directory as the message store does it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hastore.fs.filesystem import REAL, FileSystem
from hastore.service import raise_failure
from hastore.store.derived.consume_queue import ConsumeQueueTable
from hastore.store.derived.contract import ReplayableLog, time_window
from hastore.store.derived.key_index import KeyIndex
from hastore.store.replay import IndexBuildService
from hastore.store.state.replay_progress import ReplayState

UNITS, SLOTS, ENTRIES = 300, 100, 400
BOOT = bytes(range(16))


def query(
    index: KeyIndex,
    topic: str,
    key: str,
    *,
    max_messages: int = 32,
    begin_ms: int = 0,
    end_ms: int = 2**63 - 1,
) -> list[int]:
    """The offsets of the records that may have a key, the latest first, by a log without falls."""
    walk = index.walk(topic, key, time_window(begin_ms, end_ms, (), 0, index.end_offset))
    found: dict[int, int] = {}
    while not walk.ended:
        found |= index.walk_on(walk, 7)
    return list(found)[:max_messages]


@dataclass
class Derived:
    """Queues, key index and replay of a store in `root`."""

    root: Path
    queues: ConsumeQueueTable
    index: KeyIndex
    build: IndexBuildService

    @classmethod
    def over(
        cls,
        root: Path,
        log: ReplayableLog,
        *,
        fs: FileSystem = REAL,
        boot_id: bytes = BOOT,
        units: int = UNITS,
        slots: int = SLOTS,
        entries: int = ENTRIES,
        on_dispatched: Callable[[int], None] = lambda _offset: None,
        on_damage: Callable[[int], None] = lambda _offset: None,
    ) -> "Derived":
        """Compose the parts and load them."""
        queues = ConsumeQueueTable(fs, str(root), units_per_file=units)
        index = KeyIndex(fs, f"{root}/index", log, slots=slots, entries=entries)
        state = ReplayState(
            fs,
            f"{root}/hastore/replay",
            units=units,
            slots=slots,
            entries=entries,
            boot_id=boot_id,
        )
        derived = cls(
            root,
            queues,
            index,
            IndexBuildService(
                log,
                [queues, index],
                state=state,
                on_failure=raise_failure,
                on_dispatched=on_dispatched,
                on_damage=on_damage,
            ),  # fmt: skip
        )
        derived.build.load()
        return derived

    def files(self) -> dict[str, bytes]:
        """Return the bytes of every derived file; numbers replace index file names."""
        found = {}
        for kind in ("consumequeue", "batchconsumequeue"):
            for path in sorted((self.root / kind).rglob("*")):
                if path.is_file():
                    found[str(path.relative_to(self.root))] = path.read_bytes()
        if (self.root / "index").is_dir():
            for number, path in enumerate(sorted((self.root / "index").iterdir())):
                found[f"index/{number}"] = path.read_bytes()
        return found


def rebuilt(root: Path, log: ReplayableLog, **sizes: int) -> dict[str, bytes]:
    """Return the files that a replay from the log's beginning writes."""
    derived = Derived.over(root, log, **sizes)  # type: ignore[arg-type]
    derived.build.replay()
    files = derived.files()
    derived.build.close()
    return files
