"""The audit log: complete lines, bounded in every way, and a failing disk that stops nobody."""

import errno
import json
import os
import subprocess
import sys
import threading

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.fs.filesystem import REAL, RealFileSystem
from hastore.security import audit_log
from hastore.security.audit_log import ACTION_LINES, KEPT_FILES, SOURCE_LINES, WINDOW_MS, AuditLog
from hastore.service import raise_failure
from tests.ha.nodes import wait_for


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "audit.log"


@pytest.fixture
def make(path):
    made = []

    def make(fs=REAL, clock=SYSTEM_CLOCK, **options):
        one = AuditLog(fs, str(path), 7, clock=clock, on_failure=raise_failure, **options)
        made.append(one)
        return one

    yield make
    for one in made:
        assert one.stop()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_what_and_why(make, path, clock):
    log = make(clock=clock)
    log.note("promote", outcome="done", reason="epoch 3")  # before the start: it waits
    log.start()
    log.note(
        "authenticate",
        outcome="refused",
        identity="orders",
        address="10.0.0.7:4",
        reason='a "quoted"\nreason \x1b[31m \u202e\ud800',
    )
    log.stop()
    first, second = lines(path)
    assert first == {
        **{"time": "2027-01-15T08:00:00.000Z", "node": 7, "action": "promote"},
        **{"outcome": "done", "reason": "epoch 3"},
    }
    assert second["identity"] == "orders" and second["address"] == "10.0.0.7:4"
    assert second["reason"] == 'a "quoted"\nreason \x1b[31m \u202e\ud800'
    data = path.read_bytes()
    assert data.count(b"\n") == 2 and all(32 <= byte < 127 or byte == 10 for byte in data)


def test_what_is_noted_as_a_whole_is_never_left_out(make, path, clock):
    log = make(clock=clock)
    for number in range(ACTION_LINES * 2):
        log.note(
            "administer nodes", outcome="done", address="10.0.0.7:1", reason=str(number), whole=True
        )
    log.start()
    log.stop()
    assert [one["reason"] for one in lines(path)] == [str(one) for one in range(ACTION_LINES * 2)]


def test_a_flood_of_one_source_is_counted_and_hides_nobody(make, path, clock):
    log = make(clock=clock)
    for number in range(5_000):
        log.note("authenticate", outcome="refused", address=f"10.0.0.7:{number}", reason="r" * 9999)
    log.note("authenticate", outcome="refused", address="10.0.0.8:1", reason="another source")
    log.note("promote", outcome="done", reason="another action")
    clock.pass_ms(WINDOW_MS)
    log.note("authenticate", outcome="refused", address="10.0.0.7:1", reason="the next window")
    log.start()
    log.stop()
    found = lines(path)
    assert len(found) == SOURCE_LINES + 4
    assert [one["reason"] for one in found if one.get("reason", "r")[0] != "r"] == [
        *("another source", "another action", "the next window")
    ]
    left_out = [one for one in found if "left_out" in one]
    assert [(one["action"], one["left_out"]) for one in left_out] == [
        ("authenticate", 5_000 - SOURCE_LINES)
    ]
    assert max(map(len, path.read_bytes().splitlines())) < 700
    counted = {("authenticate", "refused"): 5_002, ("promote", "done"): 1}
    assert dict(log.counted()) == counted, "also what was left out"


def test_a_flood_of_many_sources_is_bounded_too(make, path, clock):
    log = make(clock=clock)
    for number in range(20_000):
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:1"
        log.note("authenticate", outcome="refused", address=address, identity="n" * 10_000)
    assert len(log._window.of_source) <= ACTION_LINES
    log.start()
    log.stop()  # which counts what was left out, too
    found = lines(path)
    assert len(found) == ACTION_LINES + 1 and found[-1]["left_out"] == 20_000 - ACTION_LINES
    assert len(found[0]["identity"]) == 64


def test_what_was_left_out_is_written_when_the_window_ends_without_another_line(
    make, path, monkeypatch
):
    monkeypatch.setattr(audit_log, "WINDOW_MS", 50.0)
    log = make()
    log.start()
    for _ in range(SOURCE_LINES + 5):
        log.note("authenticate", outcome="refused", address="a:1")
    wait_for(lambda: path.exists() and sum(o.get("left_out", 0) for o in lines(path)) >= 1)


def test_files_are_rotated_and_the_oldest_goes(make, path, clock):
    log = make(clock=clock, max_bytes=1_000)
    log.start()
    for number in range(100):
        log.note("promote", outcome=f"o{number}", address=f"{number}:1", reason="x" * 50)
    log.stop()
    names = sorted(os.listdir(path.parent))
    assert names == ["audit.log", *(f"audit.log.{n}" for n in range(1, KEPT_FILES + 1))]
    assert all(os.path.getsize(path.parent / name) <= 1_000 for name in names)
    order = [path.parent / f"audit.log.{n}" for n in range(KEPT_FILES, 0, -1)] + [path]
    found = [one["outcome"] for file in order for one in lines(file)]
    assert found == [f"o{n}" for n in range(100 - len(found), 100)] and len(found) > 20


def test_a_restart_goes_on_after_a_line_that_a_crash_cut(make, path):
    log = make()
    log.start()
    log.note("promote", outcome="done")
    log.stop()
    with path.open("ab") as file:
        file.write(b'{"time": "20')
    log = make()
    log.start()
    log.note("demote", outcome="done")
    log.stop()
    texts = path.read_text().splitlines()
    assert len(texts) == 3 and texts[1] == '{"time": "20'
    assert [json.loads(texts[at])["action"] for at in (0, 2)] == ["promote", "demote"]


class Failing(RealFileSystem):
    """Fails when it is told to."""

    def __init__(self):
        self.failure = None
        self.partly = False

    def open(self, path, **options):
        if self.failure is not None:
            raise self.failure
        file = super().open(path, **options)
        write = file.pwrite

        def pwrite(data, position):
            if self.failure is not None:
                if self.partly:
                    write(data[: len(data) // 2], position)
                raise self.failure
            write(data, position)

        file.pwrite = pwrite
        return file


@pytest.mark.parametrize("partly", [False, True])
def test_a_full_disk_stops_nobody_and_is_a_problem_until_there_is_room(
    make, path, monkeypatch, partly
):
    monkeypatch.setattr(audit_log, "RETRY_MS", 20.0)
    monkeypatch.setattr(audit_log, "MAX_WAITING", 3)
    fs = Failing()
    log = make(fs)
    log.start()
    log.note("promote", outcome="done", reason="before")
    wait_for(lambda: path.exists() and len(lines(path)) == 1)
    fs.partly, fs.failure = partly, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for number in range(10):
        log.note("demote", outcome="done", reason=f"during {number}")
    wait_for(lambda: log.problem is not None)
    assert "No space left" in log.problem and "make room" in log.problem and log.alive
    fs.failure = None
    wait_for(lambda: log.problem is None)
    log.note("promote", outcome="done", reason="after")
    log.stop()
    found = lines(path)
    assert [one.get("lost") for one in found if "lost" in one] == [7]
    assert [one["reason"] for one in found if "reason" in one] == [
        *("before", "during 0", "during 1", "during 2", "after")
    ]


def test_a_path_that_cannot_be_is_a_problem_and_no_failure(tmp_path):
    (tmp_path / "file").write_text("")
    for wrong in (
        tmp_path / "file" / "audit.log",
        tmp_path,
        "/dev/full",
        "/proc/nothing/audit.log",
    ):
        log = AuditLog(REAL, str(wrong), 1, on_failure=raise_failure)
        log.start()
        log.note("promote", outcome="done")
        wait_for(lambda log=log: log.problem is not None)
        assert (
            str(wrong) in log.problem and "; make room or correct security.audit_log" in log.problem
        )
        assert log.stop() and log.failure is None


def test_a_moved_file_is_made_anew(make, path):
    log = make()
    log.start()
    log.note("promote", outcome="done")
    wait_for(lambda: path.exists() and len(lines(path)) == 1)
    os.rename(path, path.with_name("taken"))
    log.note("demote", outcome="done")
    wait_for(lambda: path.exists() and len(lines(path)) == 1)
    assert lines(path)[0]["action"] == "demote" and len(lines(path.with_name("taken"))) == 1


def test_only_its_owner_reads_a_new_file_and_a_mode_that_was_chosen_stays(make, path):
    log = make()
    log.start()
    log.note("promote", outcome="done")
    wait_for(lambda: path.exists() and lines(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert log.stop()
    path.chmod(0o640)
    log = make()
    log.start()
    log.note("demote", outcome="done")
    wait_for(lambda: len(lines(path)) == 2)
    assert path.stat().st_mode & 0o777 == 0o640


def test_two_processes_do_not_share_a_file(make, path, monkeypatch):
    monkeypatch.setattr(audit_log, "RETRY_MS", 20.0)
    path.parent.mkdir()
    script = (
        "import sys, hastore.fs.filesystem as f\n"
        "held = f.REAL.lock(sys.argv[1]); print('held', flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    try:
        assert other.stdout.readline() == b"held\n"
        log = make()
        log.start()
        log.note("promote", outcome="done")
        wait_for(lambda: log.problem is not None)
        assert "another process writes it" in log.problem
    finally:
        other.stdin.close()
        other.wait()
        other.stdout.close()
    wait_for(lambda: log.problem is None)
    assert lines(path)[0]["action"] == "promote"


def test_many_threads_note_at_once(make, path, monkeypatch):
    monkeypatch.setattr(audit_log, "SOURCE_LINES", 1_000)
    monkeypatch.setattr(audit_log, "ACTION_LINES", 10_000)
    log = make()
    log.start()

    def note(number):
        for count in range(200):
            log.note("promote", outcome="done", reason=f"{number} {count}")

    threads = [threading.Thread(target=note, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    log.stop()
    reasons = [one["reason"] for one in lines(path)]
    assert len(reasons) == 800
    for number in range(4):
        own = [reason for reason in reasons if reason.startswith(f"{number} ")]
        assert own == [f"{number} {count}" for count in range(200)]


def test_a_file_that_somebody_empties_goes_on_at_its_start(make, path):
    """`: > audit.log`, to make room, or logrotate's copytruncate."""
    log = make()
    log.start()
    log.note("promote", outcome="done", reason="before")
    wait_for(lambda: path.exists() and path.stat().st_size)
    os.truncate(path, 0)
    log.note("promote", outcome="done", reason="after")
    log.stop()
    assert [one["reason"] for one in lines(path)] == ["after"]
