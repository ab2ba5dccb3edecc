"""A full disk (a tmpfs of a few MiB): puts are refused, links stay up, and the node recovers."""

import os
import pathlib
import subprocess
import time

import pytest

from hastore.client.producer.producer import Producer
from hastore.errors import DurabilityError, NotStoredError, OutcomeUnknown
from tests.process.harness import wait_until
from tests.process.history import ACKED, REFUSED, UNKNOWN, Recorder, check
from tests.process.stores import assert_equal_stores, assert_queues_fit

DISK_BYTES = 6 * 1024 * 1024
LEFT_BYTES = 700 * 1024
FILL_S = 120.0


@pytest.fixture
def small_disk(tmp_path):
    """Mount a tmpfs of 6 MiB; needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "hastore-test", str(folder)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no right to mount a tmpfs here: {done.stderr.decode().strip()}")
    yield Disk(folder)
    # A lazy unmount works even if a node has outlived its test.
    subprocess.run(["umount", "-l", str(folder)], check=True)


class Disk:
    """A small disk, and a file of ballast that fills it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    @property
    def free_bytes(self) -> int:
        """Return the free bytes."""
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_bsize

    def fill(self, left_bytes: int) -> None:
        """Fill the disk up to `left_bytes` free bytes."""
        size = self.free_bytes - left_bytes
        with open(self._ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def make_room(self) -> None:
        """Remove the ballast."""
        self._ballast.unlink()


def fill_with_puts(group, recorder, is_full):
    """Put until three puts have failed, `is_full(error)` one of them; return the errors."""
    errors = []
    deadline = time.monotonic() + FILL_S
    number = len(recorder.puts)
    with Producer(group.bootstrap, delivery_timeout_s=1.0) as producer:
        while time.monotonic() < deadline:
            if len(errors) >= 3 and any(map(is_full, errors)):
                break
            bodies = [b"%d:" % (number + n) + bytes(3000) for n in range(20)]
            number += len(bodies)
            futures = [recorder.send(producer, "T", body, f"k{number}") for body in bodies]
            for future in futures:
                error = future.exception(20)
                if error is not None:
                    errors.append(error)
    assert any(map(is_full, errors)), f"the disk was never full: {errors}"
    for error in errors:
        assert isinstance(error, NotStoredError | OutcomeUnknown | DurabilityError), repr(error)
    return errors


def says_so(error):
    """Whether the node refused a put because of its disk."""
    return "SERVICE_NOT_AVAILABLE" in str(error)


def finish(group, recorder):
    """Put more, now that there is room; stop, compare, check that no acknowledged put is lost."""
    with Producer(group.bootstrap, delivery_timeout_s=60) as producer:
        futures = [recorder.send(producer, "T", b"room %d" % n, "r") for n in range(50)]
        assert {future.result(60).level for future in futures} == {"SYNC_MEM(1)"}
    group.wait_equal()
    for node in group:
        assert "Traceback" not in node.log and "died" not in node.log, node.last_lines(30)
    group.stop()
    log = assert_equal_stores(group[1].store, group[2].store)
    assert_queues_fit(group[1].store, log.records)
    assert check(recorder.events, log.records) == []
    assert recorder.count(ACKED) > 100


def test_the_masters_disk_is_full(make_group, small_disk):
    group, recorder = make_group(), Recorder()
    group[1].write(store={"root": str(small_disk.folder / "store")})
    group[1].store = small_disk.folder / "store"
    group.start()
    small_disk.fill(LEFT_BYTES)
    fill_with_puts(group, recorder, says_so)
    assert recorder.count(REFUSED) + recorder.count(UNKNOWN) > 0
    # It still serves status requests, reads and its slave.
    group[1].wait_in_sync(2)
    group[1].wait_status(
        lambda s: not s["writable"] and "the disk is full" in s["reason"], "it refuses puts"
    )
    group[1].wait_status(lambda s: s["problems"], "the operator is told")
    group[1].wait_log("no room")
    assert group[1].log.count("nothing was appended") < 10, "not one log line for each refusal"
    small_disk.make_room()
    finish(group, recorder)


@pytest.mark.full
def test_the_slaves_disk_is_full(make_group, small_disk):
    group, recorder = make_group(ha={"slave_timeout": "1s"}), Recorder()
    group[2].write(store={"root": str(small_disk.folder / "store")})
    group[2].store = small_disk.folder / "store"
    group.start()
    small_disk.fill(LEFT_BYTES)
    errors = fill_with_puts(group, recorder, lambda one: not isinstance(one, NotStoredError))
    # The master has stored them, the slave cannot: no node may claim that they are not stored. The
    # client may, of a message that it has not sent in its time; `finish` checks that it is right.
    sent = [error for error in errors if not isinstance(error, NotStoredError)]
    assert all("did not answer in time" in str(each) for each in errors if each not in sent), errors
    assert group[2].running and group[1].running
    group[1].wait_status(lambda s: len(s["slaves"]) == 1 and s["writable"], "the link stays")
    group[2].wait_log("disk is full")
    group[2].wait_status(lambda s: "no room" in str(s["problems"]), "the operator is told")
    # Asynchronous puts still work.
    with Producer(group.bootstrap, acks=1) as producer:
        future = recorder.send(producer, "T", b"the master alone", "a")
        assert future.result(60).level == "MASTER_MEM"
    small_disk.make_room()
    finish(group, recorder)


@pytest.mark.full
def test_no_room_at_all_at_the_start(make_group, small_disk):
    """A node that finds no free byte either ends with a reason, or serves only reads."""
    group = make_group()
    group[1].write(store={"root": str(small_disk.folder / "store")})
    small_disk.fill(0)
    group[1].start("master", wait=False)
    wait_until(lambda: not group[1].running or group[1].status(), 60, "it neither serves nor ends")
    if not group[1].running:
        code = group[1].exit_code()
        assert code in (1, 3), code
        assert group[1].log.count("error: ") == 1 and "Traceback" not in group[1].log
        assert "No space" in group[1].log
    small_disk.make_room()
    if group[1].process is None:
        group[1].start("master", wait=False)
    group[2].start("slave")
    group[1].wait_writable()


@pytest.mark.full
def test_a_kill_while_the_disk_is_full(make_group, small_disk):
    group, recorder = make_group(), Recorder()
    group[1].write(store={"root": str(small_disk.folder / "store")})
    group[1].store = small_disk.folder / "store"
    group.start()
    small_disk.fill(LEFT_BYTES)
    fill_with_puts(group, recorder, says_so)
    end = group[1].status()["max_offset"]
    group[1].kill()
    small_disk.make_room()
    group[1].start("master")
    assert int(group[1].ready["max_offset"]) == end
    finish(group, recorder)
