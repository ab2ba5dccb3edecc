"""Walks with queues: retention removes their last records, and the log states their ends.

Each record belongs to a queue. A master gives it the next offset that the master's own log says:
nothing else survives the loss of the derived files, or a resync. So the log that retention leaves
must say it, whatever a failover cuts. The statements are the product's own records
(record/queue_ends.py), read by its StatedEnds; a value of the simulation stands for each.
"""

from __future__ import annotations

from typing import Any

from hastore.record.codec import decode_record
from hastore.record.layout import FLAG_ROLLBACK
from hastore.record.queue_ends import QUEUES_TOPIC, build_queue_ends, queue_ends_in
from hastore.store.append.stated_ends import StatedEnds
from hastore.store.derived.contract import Dispatched
from tests.ha.simulation import (
    VALUES_MAX,
    MemoryFiles,
    SimNode,
    Violation,
    World,
    settings_of,
    size_of,
    take_steps,
)

TOPIC = "t"
QUEUES = 3
_MORE_STEPS = ["state"] * 2 + ["retain"] * 4 + ["follow"] * 2 + ["promote"]
_PART_BYTES = 1  # each queue in a record of its own


class QueueWorld(World):
    """A World whose records are in queues."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.placed: dict[int, tuple[int, int]] = {}  # value -> queue, queue offset
        self.stated: dict[int, bytes] = {}  # value -> properties of a part of a statement
        super().__init__(seed, **{**settings, "retention": True})
        self.more_steps = _MORE_STEPS

    def ends_of(self, node: SimNode) -> dict[int, int]:
        """Return the next offset of each queue, as a node's log says it."""
        found: dict[int, int] = {}
        for _, value in node.store.records():
            if value in self.placed:
                queue, offset = self.placed[value]
                found[queue] = max(found.get(queue, 0), offset + 1)
            elif value in self.stated:
                part = queue_ends_in(QUEUES_TOPIC, FLAG_ROLLBACK, self.stated[value])
                assert part is not None
                for _, queue, after in part.queues:
                    found[queue] = max(found.get(queue, 0), after)
        return found

    def note_put(self, node: SimNode, value: int) -> None:
        queue = 0 if self.rng.random() < 0.8 else self.rng.randrange(1, QUEUES)  # some are quiet
        self.placed[value] = queue, self.ends_of(node).get(queue, 0)

    def do_state(self, node: SimNode) -> None:
        """State the ends of quiet queues."""
        starts = [at for at, _ in node.store.records()] if node.open else []
        if not starts:
            return
        parts = self.statement(node, self.rng.choice(starts))
        if self.values + len(parts) > VALUES_MAX // 2 + len(self.placed):
            return  # leave values for puts
        if all(self.append(node, stated=part) for part in parts):
            self.count("stated")

    def statement(self, node: SimNode, since: int) -> list[bytes]:
        """Return the properties of the parts of a statement, as QueueEndsWriter makes it."""
        later = {
            self.placed[value][0]
            for at, value in node.store.records()
            if at >= since and value in self.placed
        }
        quiet = [(TOPIC, q, after) for q, after in self.ends_of(node).items() if q not in later]
        records = build_queue_ends(
            quiet, since=since, ident=self.values, now_ms=1, part_bytes=_PART_BYTES
        )
        return [decode_record(record).properties for record in records]

    def append(self, node: SimNode, *, stated: bytes | None = None, queue: int = 0) -> bool:
        """As master, append a part of a statement, or a record to a queue."""
        member, store = node.member, node.store
        with member.gate.lock:
            epoch = member.open_epoch
            if not epoch or member.gate.epoch != epoch or self.values >= VALUES_MAX:
                return False
            self.values += 1
            value, start = self.values, store.max_offset
            if stated is not None:
                self.stated[value] = stated
            else:
                self.placed[value] = queue, self.ends_of(node).get(queue, 0)
            self.written[value] = (epoch, start)
            store.append_replica(start, bytes([value]) * size_of(value))
            assert node.ha is not None
            node.ha.on_append(start, store.max_offset)
        return True

    def stated_ends(self, node: SimNode) -> StatedEnds:
        """Return what replay of a node's log finds stated."""
        files: Any = MemoryFiles(lambda: None)
        found = StatedEnds(files, "/n")
        for at, value in node.store.records():
            if value in self.stated:
                properties = self.stated[value]
                found.dispatch([
                    Dispatched(
                        at, size_of(value), QUEUES_TOPIC, 0, 0, FLAG_ROLLBACK, 0, 0, properties
                    )
                ])  # fmt: skip
        return found

    def retained_from(self, node: SimNode, starts: list[int]) -> list[int]:
        """Retention removes nothing beyond the `since` of a confirmed statement."""
        since = self.stated_ends(node).since(node.store.confirmed_offset) or 0
        kept = [at for at in starts if at <= since]
        if kept:
            self.count("retained")
        return kept

    def check(self) -> None:
        super().check()
        for node in self.nodes.values():
            if not node.open:
                continue
            ends = self.ends_of(node)
            for value, epoch in self.confirmed_in.items():
                queue, offset = self.placed.get(value, (0, -1))
                if epoch < node.member.open_epoch and ends.get(queue, 0) <= offset:
                    raise Violation(
                        f"8: master {node.number} would give queue {queue} the offset"
                        f" {ends.get(queue, 0)}, although {offset} was confirmed in {epoch}"
                    )


def walk_with_queues(seed: int, steps: int = 200) -> World:
    """Take one walk; a Violation has the seed and the last steps."""
    world = QueueWorld(seed, **settings_of(seed))
    take_steps(world, steps, f"seed {seed}, with queues")
    return world
