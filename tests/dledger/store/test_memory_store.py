"""DLedgerMemoryStore serves, copies, cuts and forgets."""

import gc
import os

from hastore.dledger.core.events import HardState
from hastore.dledger.store.mmap_file_store import DLedgerMemoryStore
from tests.dledger.store.kit import copy_entries, no_op, opened, put
from tests.store.kit import FILE_SIZE, HOST, bodies, config, message


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_it_does_what_the_store_in_files_does_and_leaves_nothing(tmp_path):
    before = open_descriptors()
    store = DLedgerMemoryStore(config(tmp_path / "none"), node=1, store_host=HOST)
    store.open()
    try:
        assert (store.hard_state, store.remembers) == (HardState(0, None, False), False)
        store.save_hard_state(HardState(2, 1), remembers=True)
        no_op(store, 2)
        put(store, 2, *(message(number) for number in range(900)))
        with opened(tmp_path / "files") as files:
            copy_entries(store, files)
            assert files.log_state() == store.log_state()
            assert bodies(files.messages) == bodies(store.messages)
            found = store.read(500, 10_000)
            raw = os.pread(found.file.fd, found.size, found.file.position)
            with files.messages.view(found.pos, found.size) as view:
                assert raw == view
        assert store.flush() == 900
        store.commit(100)
        assert store.truncate(300) > 0 and store.end_index == 299
        no_op(store, 3)
        first = FILE_SIZE * 3
        store.install(1000, first, 3)
        assert store.log_state().begin_index == 1000 and store.messages.min_offset == first
        no_op(store, 4)
        put(store, 4, message(1))
        assert len(bodies(store.messages)) == 1
    finally:
        store.close()
    assert not (tmp_path / "none").exists()
    again = DLedgerMemoryStore(config(tmp_path / "none"), node=1, store_host=HOST)
    again.open()
    try:
        assert again.end_index == -1 and not again.remembers
    finally:
        again.close()
    del store, again, found, files
    gc.collect()
    assert open_descriptors() <= before
