"""Random walks of cores over the real entry store, with real records through the real codec.

The faults are those of tests/dledger/simulation.py. A node that dies leaves what its process has
written, and after a power cut what it has synced and any part of the rest (store/lossy.py).
"""

import os
import random
from collections import Counter
from dataclasses import replace

import pytest

from hastore.config.model import RetentionConfig
from hastore.dledger.core.events import Retained
from hastore.dledger.driver.carry_out import filled
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.protocol.dledger import AppendRequest
from hastore.protocol.dledger_link import FrameReceiver, append_frames, message_frame
from tests.dledger.oracle import Violation
from tests.dledger.simulation import FAULTS, SimNode, World, plan_of, walk
from tests.dledger.store.lossy import LossyFileSystem
from tests.dledger.store.test_crash_points import forget_boot
from tests.store.kit import HOST, config, message

WALKS = 10
MET = {"acked", "whole", "parts", "files", "healed", "wipe", "recalled", "power cut", "installed"}
FILE_BYTES = 8 * 1024  # so a walk fills several files, with blanks at their ends
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
        self.root = f"/n{number}"
        self.fs = LossyFileSystem()
        self.left = None  # what a dead node's disk may have
        self.joined = False  # the store knows whether it replaces a lost one
        self.store = None

    def open_store(self, chance=None):
        """Open what a dead node has left; with `chance` after a power cut."""
        if self.left is not None:
            self.fs, self.left = self.left.restored(chance), None
            if chance is not None:
                forget_boot(self.fs, self.root)
        files = config(
            self.root,
            commitlog_file_size=FILE_BYTES,
            retention=RetentionConfig(max_size_bytes=FILE_BYTES),
        )
        store = self.store = DLedgerMmapFileStore(
            files, node=self.number, index_file_bytes=INDEX_BYTES, fs=self.fs, store_host=HOST
        )
        store.open()

    def start(self):
        self.open_store()
        store, disk = self.store, self.disk
        if not self.joined:
            store.save_hard_state(disk.hard, remembers=disk.remembers)
            self.joined = True
        assert store.hard_state == disk.hard, (store.hard_state, disk.hard)
        disk.checkpoint = store.committed_index
        self.same()
        store.flush()
        super().start()

    def die(self):
        super().die()
        self.left = self.fs.snapshot(None)
        self.store.close()

    def lose_power(self):
        """The store, not the simulation, says what is left of the entries."""
        self.open_store(self.world.rng)
        disk, end = self.disk, self.store.end_index
        if not disk.durable <= end <= disk.end:
            raise Violation(f"entries up to {disk.durable} were synced, up to {end} are left")
        lost = disk.end - end
        disk.drop_from(end + 1)
        self.left = self.fs.snapshot(None)
        self.store.close()
        return lost

    def wipe(self):
        super().wipe()
        self.fs, self.left, self.joined = LossyFileSystem(), None, False

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

    def install(self, index, pos, prev_term, group):
        super().install(index, pos, prev_term, group)
        self.store.install(index, pos, prev_term)
        self.same()

    def retain(self, limit):
        """Remove the files that the store gives up, as a node does it."""
        store = self.store
        store.flush()
        self.disk.durable = self.disk.end
        hold = store.end_position(limit)
        store.messages.wait_dispatched(hold, 60)
        begin = store.messages.retention.expired_end(hold)
        if begin is None:
            return False
        self.disk.retain(store.index_at(begin) + 1)
        self.step(Retained(self.local_ms(), self.disk.begin))
        assert store.messages.retention.delete_expired(hold)
        self.same()
        return True

    def commit(self, index):
        super().commit(index)
        self.store.commit(index)

    def _synced(self, life):
        if self.up and self.life == life and self.syncing is not None:
            assert self.store.flush() >= self.syncing[1]
        super()._synced(life)

    def filled(self, message):
        if not isinstance(message, AppendRequest):
            (whole,) = filled(message, self.store)
            received, _ = through_link(message_frame(whole))
            assert received == whole
            yield whole, ()
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
        nodes = [self.nodes[n] for n in leader.disk.members]
        begin = max(node.store.messages.min_offset for node in nodes)
        end = leader.store.end_position(leader.disk.end)
        logs = {node.number: self.log_bytes(node, begin, end) for node in nodes}
        if any(log != logs[leader.number] for log in logs.values()):
            raise Violation("the bytes of the logs differ")
        self.count("files", end // FILE_BYTES)

    @staticmethod
    def log_bytes(node, begin, end):
        folder = f"{node.store.messages.directory}/data"
        names = sorted(node.fs.list_dir(folder))
        whole = b"".join(node.fs.read_bytes(f"{folder}/{name}") for name in names)
        first = int(names[0])
        return whole[begin - first : end - first]

    def close(self):
        for node in self.nodes.values():
            if node.up:
                node.store.close()


def store_walk(seed):
    plan = replace(plan_of(seed), faults=FAULTS)
    made = []

    def world(*args):
        made.append(StoreWorld(*args))
        return made[0]

    try:
        return walk(seed, plan, world)
    finally:
        made[0].close()


@pytest.mark.slow("hundreds of walks over files that are synced")
def test_walks_over_the_real_store():
    first = int(os.environ.get("HASTORE_SEED", random.SystemRandom().randrange(1 << 31)))
    count = max(WALKS, int(os.environ.get("HASTORE_SEEDS", "0")) // 50)
    print(f"HASTORE_SEED={first}")
    seen: Counter[str] = Counter()
    walks = 0
    while walks < count or (MET - (+seen).keys() and walks < 20 * WALKS):  # some are rare
        seen.update(store_walk(first + walks).counts)
        walks += 1
    print(walks, sorted(seen.items()))
    assert not MET - (+seen).keys(), seen
