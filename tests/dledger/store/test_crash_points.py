"""What a kill or a power loss leaves, at every kind of call: nothing that was promised is lost."""

import os
import random

import pytest

from hastore.store.state.limits import LimitsPage, read_limits
from tests.dledger.store.kit import folder_bytes, make, walk
from tests.dledger.store.lossy import LossyFileSystem, Snapshot
from tests.dledger.store.random_run import FILE_SIZE, Model, Run, found_in, is_kept, is_rescued

SAMPLES = int(os.environ.get("CRASH_SAMPLES", "20"))


@pytest.mark.parametrize("kind", ["kill", "power"])
def test_nothing_that_was_promised_is_lost(tmp_path, kind):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    for part in range(2):
        check_run(tmp_path / f"{part}", seed + part, kind)


def check_run(tmp_path, seed, kind):
    run = Run(seed, str(tmp_path / "s"), LossyFileSystem())
    snapshots = []

    def notice(number: int) -> None:
        if number % 7 == wanted:
            snapshots.append(run.fs.snapshot(list(run.after)))

    wanted = run.chance.randrange(7)
    run.fs.on_call = notice
    try:
        run.go(60)
    finally:
        run.store.close()
    assert len(snapshots) > 30
    chance = random.Random(seed)
    for number, snapshot in enumerate(chance.sample(snapshots, min(SAMPLES, len(snapshots)))):
        where = f"seed {seed} number {number}"
        fs = snapshot.restored(chance if kind == "power" else None)
        if kind == "power":
            forget_boot(fs, run.root)
        again = Again(fs, chance, snapshot.note)
        check(fs, run.root, snapshot.note, where, again)
        # The power fails while the first fault is recovered from, and after that.
        for second in again.snapshots:
            fs = second.restored(chance)
            forget_boot(fs, run.root)
            check(fs, run.root, second.note, f"{where} again")


class Again:
    """Takes snapshots while a store is opened, and once it is open."""

    def __init__(self, fs: LossyFileSystem, chance: random.Random, models: list[Model]) -> None:
        self.snapshots: list[Snapshot] = []
        self._fs = fs
        self._at = chance.randrange(40)
        self._models = models
        fs.on_call = self._notice

    def _notice(self, number: int) -> None:
        if number == self._at:
            self.snapshots.append(self._fs.snapshot(self._models))

    def is_open(self, found: Model) -> None:
        self._fs.on_call = lambda number: None
        self.snapshots.append(self._fs.snapshot([found]))


def forget_boot(fs, root):
    """Make the limits page one of another boot."""
    found = read_limits(fs, root)
    if found is not None:
        page = LimitsPage(fs, root)
        page.open(found._replace(boot_id=b"another boot id."))
        page.close()


def check(fs, root, models, where, again=None):
    store = make(root, fs=fs, commitlog_file_size=FILE_SIZE)
    store.open()
    try:
        found = found_in(store)
        reasons = [is_kept(model, found) for model in models]
        assert "" in reasons, (where, reasons, found, models)
        for pos, tail in models[reasons.index("")].rescued:
            assert is_rescued(fs, root, pos, tail), (where, pos)
        if again is not None:
            again.is_open(found)
        if found.entries:
            data = folder_bytes(f"{store.messages.directory}/data", fs)
            _, units = walk(data, FILE_SIZE, store.messages.min_offset)
            folder = f"{store.messages.directory}/index"
            # A file of units below the first entry may be left; retention removes it later.
            at = store.begin_index * 32 - int(min(fs.list_dir(folder)))
            index = folder_bytes(folder, fs)
            assert index[at:].startswith(units), where
            assert not any(index[at + len(units) :]), where
    finally:
        store.close()
