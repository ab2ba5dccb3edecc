"""Writes that fail half-way: no refused put is ever seen, no put that may be seen is refused."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hastore.errors import Status, StoreBrokenError, StoreError, StoreFullError
from hastore.store.message_store import MessageStore
from tests.store.faulty import BAD_DISK, NO_SPACE, FaultyFileSystem
from tests.store.kit import (
    FILE_SIZE,
    HOST,
    bodies,
    config,
    crash_copy,
    message,
    opened,
    put,
    read_log,
)


@contextmanager
def on_faulty_disk(root: Path) -> Iterator[tuple[MessageStore, FaultyFileSystem]]:
    """An open store on a faulty disk; a failure may have closed it at the end."""
    fs = FaultyFileSystem()
    store = MessageStore(config(root), store_host=HOST, fs=fs)
    store.open()
    try:
        yield store, fs
    finally:
        fs.heal()
        try:
            store.close()
        except StoreBrokenError:
            assert store.broken_reason is not None


def three(first: int, **more: object) -> list[bytes]:
    return [message(number, **more) for number in range(first, first + 3)]  # type: ignore[arg-type]


def seen_after_a_kill(store: MessageStore, target: Path) -> list[bytes]:
    """The bodies that the next start would find."""
    with opened(crash_copy(store, target)) as again:
        return bodies(again)


@pytest.mark.parametrize("error", [NO_SPACE, BAD_DISK], ids=["full", "bad"])
def test_the_bytes_of_a_failed_put_are_cleared_before_it_is_refused(
    tmp_path: Path, error: OSError
) -> None:
    with on_faulty_disk(tmp_path / "a") as (store, fs):
        end = put(store, message(0))[0].end_offset
        assert end is not None
        fs.torn["commitlog"] = 2 * end + 50, error
        fs.calls.clear()
        with pytest.raises(StoreFullError if error is NO_SPACE else StoreBrokenError):
            store.put_encoded([b"".join(three(1))])
        log_calls = [call for call, path in fs.calls if "/commitlog" in path]
        assert log_calls[-2:] == ["zero", "sync"]  # synced: the disk may have the records already
        assert not any(read_log(tmp_path / "a")[end:])
        assert len(seen_after_a_kill(store, tmp_path / "b")) == 1
        assert (store.broken_reason is None) is (error is NO_SPACE)
        if error is NO_SPACE:
            fs.heal()
            put(store, message(7))  # it ends where the failed put's second record began
            assert seen_after_a_kill(store, tmp_path / "c") == bodies(store)
            assert len(bodies(store)) == 2


def test_a_failed_write_that_left_no_bytes_is_refused_without_a_sync(tmp_path: Path) -> None:
    with on_faulty_disk(tmp_path) as (store, fs):
        put(store, message(0))
        fs.torn["commitlog"] = 0, NO_SPACE
        fs.calls.clear()
        with pytest.raises(StoreFullError):
            store.put_encoded([message(1)])
        assert [call for call, path in fs.calls if "/commitlog" in path] == ["write"]


@pytest.mark.parametrize("call", ["zero", "sync"])
def test_bytes_that_cannot_be_cleared_close_the_store_and_leave_the_put_uncertain(
    tmp_path: Path, call: str
) -> None:
    with on_faulty_disk(tmp_path / "a") as (store, fs):
        end = put(store, message(0, producer="p"))[0].end_offset
        assert end is not None
        records = three(1, producer="p")
        fs.torn["commitlog"] = 2 * len(records[0]) + 50, NO_SPACE
        fs.fail(call, "/commitlog/")
        results = store.put_encoded([b"".join(records)])[0]
        assert [result.status for result in results] == [Status.TIMEOUT] * 3
        assert all(result.offset is None and result.reason for result in results)
        assert store.max_offset == end
        fs.heal()
        assert "could not be cleared" in str(store.broken_reason)
        assert any("could not be cleared" in problem for problem in store.problems)
        with pytest.raises(StoreBrokenError, match="could not be cleared"):
            store.put_encoded([message(9)])
        with opened(crash_copy(store, tmp_path / "b")) as again:  # a retry finds the stored records
            found = len(bodies(again))
            assert found == (3 if call == "zero" else 1)
            retried = put(again, *records)
            assert [result.duplicate for result in retried] == [found == 3, found == 3, False]
            assert len(bodies(again)) == 4


def test_all_payloads_of_one_uncertain_write_are_uncertain(tmp_path: Path) -> None:
    with on_faulty_disk(tmp_path) as (store, fs):
        fs.torn["commitlog"] = 300, BAD_DISK
        fs.fail("zero", "/commitlog/")
        bad = message(5)[:-1] + b"x"  # its properties are malformed
        results = store.put_encoded([message(0), bad, message(1)])
        assert [[result.status.name for result in each] for each in results] == [
            ["TIMEOUT"], ["MESSAGE_ILLEGAL"], ["TIMEOUT"],
        ]  # fmt: skip


@pytest.mark.parametrize("cleared", [True, False], ids=["cleared", "not-cleared"])
@pytest.mark.parametrize("error", [NO_SPACE, BAD_DISK], ids=["full", "bad"])
def test_a_put_that_fails_after_a_new_file_keeps_its_stored_records(
    tmp_path: Path, error: OSError, cleared: bool
) -> None:
    with on_faulty_disk(tmp_path / "a") as (store, fs):
        told: list[tuple[int, int]] = []
        store.hooks.on_append = lambda start, end, _: told.append((start, end))
        first = message(0, size=FILE_SIZE - 5_000)
        second = message(1, size=9_000) + message(2)
        third = message(3)

        def rule(call: str, path: str) -> None:
            if path.endswith(f"{FILE_SIZE:020d}"):
                fs.torn["commitlog"] = 9_200, error
                if call == "zero" and not cleared:
                    raise OSError(5, "told to", path)

        fs.hook = rule
        one, two, three = store.put_encoded([first, second, third])
        assert [each.status for each in one] == [Status.PUT_OK]
        unknown = Status.SERVICE_NOT_AVAILABLE if cleared else Status.TIMEOUT
        assert [each.status for each in two] == [unknown] * 2
        # Later payloads must not overtake it, so they were not tried.
        assert [each.status for each in three] == [Status.SERVICE_NOT_AVAILABLE]
        assert told == [(0, store.max_offset)]  # a slave is told of the stored records
        fs.heal()
        assert (store.broken_reason is None) is (error is NO_SPACE and cleared)
        found = seen_after_a_kill(store, tmp_path / "b")
        assert len(found) == (1 if cleared else 2)


def test_a_failing_on_append_hook_refuses_no_put(tmp_path: Path) -> None:
    """The records are stored, although the limits could not be published afterwards."""
    with on_faulty_disk(tmp_path) as (store, fs):
        put(store, message(0))

        def publish(_start: int, end: int, _data: object) -> None:
            store.set_limits(readable=end)

        store.hooks.on_append = publish
        fs.torn["hastore"] = 0, BAD_DISK
        (result,) = store.put_encoded([message(1)])[0]
        assert result.status is Status.PUT_OK and result.offset is not None
        assert "limits page" in str(store.broken_reason)


@pytest.mark.parametrize("error", [NO_SPACE, BAD_DISK], ids=["full", "bad"])
def test_a_slave_clears_the_bytes_of_a_failed_append(tmp_path: Path, error: OSError) -> None:
    with opened(tmp_path / "m") as master, on_faulty_disk(tmp_path / "s") as (slave, fs):
        put(master, *three(0))
        with master.view(0, 1 << 20) as view:
            fs.torn["commitlog"] = len(view) - 10, error
            with pytest.raises(StoreFullError if error is NO_SPACE else StoreBrokenError):
                slave.append_replica(0, view)
            assert slave.max_offset == 0 and not any(read_log(tmp_path / "s"))
            if error is NO_SPACE:
                fs.heal()
                slave.append_replica(0, view)
        assert len(seen_after_a_kill(slave, tmp_path / "c")) == (3 if error is NO_SPACE else 0)


@pytest.mark.parametrize("error", [NO_SPACE, BAD_DISK], ids=["full", "bad"])
def test_a_slave_clears_the_bytes_of_a_failed_splice(tmp_path: Path, error: OSError) -> None:
    with opened(tmp_path / "m") as master, on_faulty_disk(tmp_path / "s") as (slave, _):
        put(master, *three(0))
        room = slave.replica_range(0, master.max_offset)
        with master.view(0, 1 << 20) as view:
            os.pwrite(room.fd, view[:-10], room.position)
        failure = slave.replica_failed(0, room.size, error)
        assert isinstance(failure, StoreError)
        assert isinstance(failure, StoreBrokenError) is (error is BAD_DISK)
        assert not any(read_log(tmp_path / "s"))
        assert seen_after_a_kill(slave, tmp_path / "c") == []


def fill_the_file(store: MessageStore) -> None:
    put(store, message(0, size=FILE_SIZE - 400))


@pytest.mark.parametrize("gone", [False, True], ids=["bad-disk", "spare-removed"])
def test_a_next_file_that_cannot_be_moved_refuses_and_the_next_put_tries_again(
    tmp_path: Path, gone: bool
) -> None:
    with on_faulty_disk(tmp_path) as (store, fs):
        fill_the_file(store)

        def rule(call: str, path: str) -> None:
            if call == "rename" and "/commitlog/" in path:
                if gone:
                    (tmp_path / "hastore" / "spare").unlink()
                else:
                    raise OSError(5, "told to", path)

        fs.hook = rule
        for _ in range(2):
            (refused,) = refusals(store, message(1, size=1000))
            assert ("No such file" if gone else "told to") in refused
            assert store.broken_reason is None
            assert any(refused in problem for problem in store.problems)
        fs.heal()
        put(store, message(1, size=1000))
        assert store.problems == []
        assert len(bodies(store)) == 2


def test_a_slave_is_refused_a_next_file_and_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as master, on_faulty_disk(tmp_path / "s") as (slave, fs):
        put(master, message(0))
        fs.fail("rename", "/commitlog/")
        with master.view(0, 1 << 20) as view:
            with pytest.raises(StoreError, match="spare"):
                slave.append_replica(0, view)
            assert slave.broken_reason is None
            fs.heal()
            assert slave.append_replica(0, view) == master.max_offset


def refusals(store: MessageStore, record: bytes) -> list[str]:
    """Return why a put is refused, by a result or an error; nothing of it is in the log."""
    try:
        results = store.put_encoded([record])[0]
    except StoreError as failure:
        return [str(failure)]
    assert {result.status for result in results} == {Status.SERVICE_NOT_AVAILABLE}
    return [str(result.reason) for result in results]


def test_a_retry_whose_original_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with on_faulty_disk(tmp_path) as (store, fs):
        put(store, message(0, producer="p"))
        fill_the_file(store)
        assert len(bodies(store)) == 2  # replay has read the file
        store.log.queue.release()
        fs.fail("open", f"{0:020d}")
        (reason,) = refusals(store, message(0, producer="p"))
        assert "Input/output error" in reason
        fs.heal()
        assert put(store, message(0, producer="p"))[0].duplicate


def test_a_log_file_that_cannot_be_opened_refuses_and_closes_nothing(tmp_path: Path) -> None:
    """As without a free descriptor: no byte was written."""
    with on_faulty_disk(tmp_path) as (store, fs):
        put(store, message(0))
        assert len(bodies(store)) == 1
        store.log.queue.release()
        fs.fail("open", "/commitlog/")
        (reason,) = refusals(store, message(1))
        assert "cannot be opened" in reason and store.broken_reason is None
        fs.heal()
        put(store, message(1))
