"""A flip between a pull's read of the log and its answer: each record keeps its own epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import ApiConfig
from hastore.protocol import api
from hastore.record.codec import decode_record
from hastore.server.api.commits import PositionTable
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client
from tests.server.retention.test_kept_positions import commit
from tests.store.kit import message, opened, put

OLD, NEW = 65537, 131074


def fill(store: MessageStore, numbers: range) -> list[int]:
    results = put(store, *[message(number) for number in numbers])
    assert store.wait_dispatched(store.max_offset, 10)
    store.set_limits(readable=store.max_offset)
    return [result.offset or 0 for result in results]


def flips(backend: FakeBackend, store: MessageStore, common: int) -> Any:
    """Cut the log and let another epoch write it again while the next pull has its bytes."""
    real = store.reader.pull

    def pull(*args: Any, **limits: Any) -> Any:
        backend.store.reader.pull = real
        found = real(*args, **limits)
        store.set_limits(readable=common)
        store.truncate(common)
        backend.entries = [(OLD, 0), (NEW, common)]
        fill(store, range(100, 110))
        return found

    return pull


@pytest.mark.parametrize("known", [False, True], ids=["from anywhere", "behind a record"])
def test_bytes_that_a_flip_cut_away_are_not_given_as_the_new_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    with opened(tmp_path) as store:
        setattr(store, "default_queues", 4)  # noqa: B010 (for the fake node)
        store.set_limits(confirmed=0, readable=0)
        offsets = fill(store, range(10))
        backend = FakeBackend()
        backend.store = store
        backend.entries = [(OLD, 0)]
        server = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
        server.start()
        client = Client(server.endpoint)
        try:
            place = api.Position(7, OLD, offsets[6]) if known else api.Position(5)
            monkeypatch.setattr(store.reader, "pull", flips(backend, store, offsets[5]))
            reply = client.ask(api.Pull(1, "TopicA", 0, place))
            assert isinstance(reply, api.Pulled), reply
            if known:
                assert reply.status is api.PullStatus.HISTORY_DIFFERS
                assert reply.common == api.Position(5, OLD, offsets[4])
            else:
                assert decode_record(client.payload).body.startswith(b"%08d" % 100)
                assert reply.epochs == [(NEW, offsets[5])]
        finally:
            client.close()
            assert server.stop()


def test_positions_that_a_flip_cut_away_are_not_kept_as_the_new_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        setattr(store, "default_queues", 4)  # noqa: B010 (for the fake node)
        common = commit(store, "g", {0: 1})
        commit(store, "g", {0: 2})
        store.set_limits(readable=store.max_offset)
        backend = FakeBackend()
        backend.store = store
        backend.entries = [(OLD, 0)]
        table = PositionTable(backend, SYSTEM_CLOCK)
        real = store.reader.pull

        def pull(*args: Any, **limits: Any) -> Any:
            monkeypatch.setattr(store.reader, "pull", real)
            found = real(*args, **limits)
            store.set_limits(readable=common)
            store.truncate(common)
            backend.entries = [(OLD, 0), (NEW, common)]
            commit(store, "h", {0: 3})
            store.set_limits(readable=store.max_offset)
            return found

        monkeypatch.setattr(store.reader, "pull", pull)
        while not table.catch_up():
            pass
        assert table.find("g", "t")[0].queue_offset == 1
        assert table.find("h", "t")[0].queue_offset == 3
