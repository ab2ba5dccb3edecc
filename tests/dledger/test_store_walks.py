"""Random walks of cores over the real entry store, with real records through the real codec.

The faults are those of tests/dledger/simulation.py that a store in memory can take; what a kill or
a power loss leaves of the files is tried in tests/dledger/store.
"""

import os
import random
from dataclasses import replace

from hastore.dledger.driver.filling import filled
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.protocol.dledger import AppendRequest
from hastore.protocol.dledger_link import FrameReceiver, append_frames, message_frame
from hastore.store.fs.memory import MemoryFileSystem
from tests.dledger.oracle import Violation
from tests.dledger.simulation import SimNode, World, plan_of, walk
from tests.store.kit import HOST, config, message

WALKS = 4
FAULTS = (
    *("kill", "restart_all", "pause", "clock_jump", "isolate", "halves", "one_way", "reset_link"),
    *("bad_network", "old_message", "slow_disk", "transfer", "members"),
)
FILE_BYTES = 16 * 1024  # so a walk fills several files, with blanks at their ends
INDEX_BYTES = 4096


class Carried(tuple):
    """Entries of the simulation, and the bytes that stand for them on a link."""

    frames = b""


def through_link(frames):
    """Return the only message that the bytes of a link give, and its data."""
    receiver, at = FrameReceiver(), 0
    while True:
        room = receiver.room()
        count = min(len(room), len(frames) - at, 4096)
        room[:count] = frames[at : at + count]
        at += count
        for received in receiver.received(count):
            assert at == len(frames)
            return received.message, bytes(received.data or b"")


class StoreNode(SimNode):
    """A node whose disk has a real store beside it; both must always say the same."""

    def __init__(self, world, number, members):
        super().__init__(world, number, members)
        self.fs = MemoryFileSystem()
        self.store = None

    def start(self):
        files = config(f"/n{self.number}", commitlog_file_size=FILE_BYTES, consume_queue_units=300)
        self.store = DLedgerMmapFileStore(
            files, node=self.number, index_file_bytes=INDEX_BYTES, fs=self.fs, store_host=HOST
        )
        self.store.open()
        saved, hard = self.store.hard_state, self.disk.hard
        assert (saved.term, saved.voted_for) == (hard.term, hard.voted_for)
        self.same()
        super().start()

    def die(self):
        super().die()
        self.store.close()

    def same(self):
        store, disk = self.store, self.disk
        assert store.log_state() == disk.log_state(), (store.log_state(), disk.log_state())

    # ---- the disk

    def save(self, state):
        super().save(state)
        self.store.save_hard_state(state, remembers=state.remembers)

    def append_put(self, term, token, count):
        super().append_put(term, token, count)
        payloads = [message(token * 10 + n, size=token % 300) for n in range(count)]
        put = self.store.put(term, [b"".join(payloads)])
        assert (put.count, put.last_index) == (count, self.disk.end)

    def append_own(self, own):
        super().append_own(own)
        self.store.append_own(own)

    def append_taken(self, request, what, taken):
        received, data = through_link(taken.frames)
        assert received == request
        for entry in taken[what.skip :]:
            self.disk.append(entry)
            self.world.oracle.appended(self, self.disk.end)
        self.store.append_taken(request, data, what)
        self.same()

    def truncate(self, index):
        super().truncate(index)
        self.store.truncate(index)
        self.same()

    def commit(self, index):
        super().commit(index)
        self.store.commit(index)

    def _synced(self, life):
        if self.up and self.life == life and self.syncing is not None:
            assert self.store.flush() >= self.syncing[1]
        super()._synced(life)

    def filled(self, message):
        if not isinstance(message, AppendRequest):
            received, _ = through_link(message_frame(message))
            assert received == message
            yield message, ()
            return
        entries = self.entries_of(message)
        for part in filled(message, self.store):
            count = sum(number for _, number in part.runs)
            first = part.prev_index - message.prev_index
            carried = Carried(entries[first : first + count])
            with self.store.messages.view(part.pos, part.size) as view:
                carried.frames = append_frames(part) + bytes(view)
            self.world.count("parts" if count < len(entries) else "whole")
            yield part, carried


class StoreWorld(World):
    """A world of such nodes; their files must be equal when the group has healed."""

    def make_node(self, number, members):
        return StoreNode(self, number, members)

    def last_stage(self):
        super().last_stage()
        leader = self.leader()
        end = leader.store.end_position(leader.disk.end)
        logs = {n: self.log_bytes(self.nodes[n], end) for n in leader.disk.members}
        if any(log != logs[leader.number] for log in logs.values()):
            raise Violation("the bytes of the logs differ")
        self.count("files", end // FILE_BYTES)

    @staticmethod
    def log_bytes(node, end):
        folder = f"{node.store.messages.directory}/data"
        names = sorted(node.fs.list_dir(folder))
        return b"".join(node.fs.read_bytes(f"{folder}/{name}") for name in names)[:end]

    def close(self):
        for node in self.nodes.values():
            if node.up:
                node.store.close()


def store_walk(seed):
    plan = replace(plan_of(seed), faults=FAULTS, crash=0.0)
    made = []

    def world(*args):
        made.append(StoreWorld(*args))
        return made[0]

    try:
        return walk(seed, plan, world)
    finally:
        made[0].close()


def test_walks_over_the_real_store():
    first = int(os.environ.get("HASTORE_SEED", random.SystemRandom().randrange(1 << 31)))
    count = max(WALKS, int(os.environ.get("HASTORE_SEEDS", "0")) // 50)
    print(f"HASTORE_SEED={first}")
    wanted, seen, seed = ("acked", "whole", "files", "healed"), {}, first
    # In one run of 50 the first four walks fill no file: walk on until every thing was met.
    while seed < first + count or (
        seed < first + 10 * count and not all(seen.get(what) for what in wanted)
    ):
        for what, times in store_walk(seed).counts.items():
            seen[what] = seen.get(what, 0) + times
        seed += 1
    print(sorted(seen.items()))
    for what in wanted:
        assert seen.get(what, 0), (what, seen)
