"""All ways to change roles, and what an old master does with its unconfirmed messages."""

import json
import signal
import time

import pytest

from hastore.client.producer.producer import Producer
from hastore.errors import NotStoredError, OutcomeUnknown
from hastore.fs.filesystem import REAL
from tests.cli.kit import hastore
from tests.process.harness import wait_until
from tests.process.stores import assert_equal_stores, read_log, rescued_records


def put(group, *bodies, acks=None, timeout_s=60.0):
    with Producer(group.bootstrap, acks=acks, delivery_timeout_s=timeout_s) as producer:
        return [producer.send_sync("T", body) for body in bodies]


def finish(group, count):
    """Wait for equal logs, stop, compare; check the number of records and return the log."""
    group.wait_equal()
    group.stop()
    log = assert_equal_stores(group[1].store, group[2].store)
    assert len(log.records) == count
    return log


def test_live_by_editing_both_files(pair):
    put(pair, b"before")
    pair[1].edit_role("SLAVE")
    pair[1].wait_status(lambda s: s["role"] == "SLAVE" and not s["writable"], "demoted")
    pair[2].edit_role("SYNC_MASTER")
    pair[2].wait_writable()  # a running node notices a changed file by itself
    pair[2].wait_in_sync(1)
    assert put(pair, b"after")[0].epoch == pair[2].status()["epoch"]
    # And back, in the other order: the new master supersedes the running one.
    pair[1].edit_role("SYNC_MASTER")
    pair[1].wait_writable()
    assert pair[2].wait_log("epoch 196609 of node 1 supersedes it")
    status = pair[2].wait_status(lambda s: s["role"] == "SLAVE", "whatever its file says")
    assert "superseded by node 1" in status["reason"]
    pair[1].wait_in_sync(2)
    put(pair, b"again")
    finish(pair, 3)


def test_by_sighup(pair):
    put(pair, b"before")
    pair[1].kill()
    pair[2].edit_role("SYNC_MASTER")
    pair[2].send(signal.SIGHUP)
    pair[2].wait_writable()
    pair[1].edit_role("SLAVE")
    pair[1].start("slave")
    pair[2].wait_in_sync(1)
    put(pair, b"after")
    finish(pair, 2)


def test_by_promote_and_demote(pair):
    put(pair, b"before")
    before = pair[2].path.read_text()
    pair[2].replace_file("# my comment\n" + before)
    done = hastore("demote", "-c", str(pair[1].path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["role"] == "SLAVE" == pair[1].file_role
    done = hastore("promote", "-c", str(pair[2].path), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["node"], said["role"], said["writable"]) == (2, "SYNC_MASTER", True)
    assert said["epoch"] == pair[2].status()["epoch"] == 2 << 16 | 2
    assert pair[2].path.read_text().startswith("# my comment\n")
    assert pair[2].file_role == "SYNC_MASTER"
    pair[2].wait_in_sync(1)
    put(pair, b"after")
    # A new promotion of the present master begins a new epoch.
    done = hastore("promote", "-c", str(pair[2].path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epoch"] > said["epoch"]
    assert not (pair[2].store / "hastore" / "once.json").exists()
    pair[2].wait_in_sync(1)
    put(pair, b"last")
    finish(pair, 3)


@pytest.mark.full
def test_while_both_are_down(pair):
    put(pair, b"before")
    pair.wait_equal()
    pair.stop()
    pair[1].edit_role("SLAVE")
    pair[2].edit_role("SYNC_MASTER")
    pair[1].start("slave", wait=False)
    pair[2].start("master")
    pair[1].wait_ready()
    assert pair[2].wait_writable()["epoch"] == 2 << 16 | 2
    pair[2].wait_in_sync(1)
    put(pair, b"after")
    finish(pair, 2)


@pytest.mark.full
def test_async_and_sync_live(pair):
    epoch = pair[1].status()["epoch"]
    pair[1].edit_role("ASYNC_MASTER")
    pair[1].wait_status(lambda s: s["role"] == "ASYNC_MASTER", "asynchronous")
    assert put(pair, b"a")[0].level == "MASTER_MEM"
    assert put(pair, b"b", acks="all")[0].level == "SYNC_MEM(1)"
    pair[2].kill()
    assert put(pair, b"c")[0].level == "MASTER_MEM"
    status = pair[1].status()
    assert status["readable_offset"] == status["max_offset"] > status["confirmed_offset"]
    with pytest.raises((NotStoredError, OutcomeUnknown), match="SLAVE_NOT_AVAILABLE"):
        put(pair, b"d", acks="all", timeout_s=1.5)
    pair[1].edit_role("SYNC_MASTER")
    pair[1].wait_status(lambda s: s["role"] == "SYNC_MASTER", "synchronous")
    status = pair[1].status()
    assert status["readable_offset"] == status["confirmed_offset"] < status["max_offset"]
    with pytest.raises((NotStoredError, OutcomeUnknown), match="SLAVE_NOT_AVAILABLE"):
        put(pair, b"e", timeout_s=1.0)
    pair[2].start("slave")
    assert put(pair, b"f")[0].level == "SYNC_MEM(1)"
    assert pair[1].status()["epoch"] == epoch
    log = finish(pair, 4)
    assert [found.body for found in log.records] == [b"a", b"b", b"c", b"f"]


def test_an_invalid_edit_changes_nothing(pair):
    good = pair[1].path.read_text()
    for bad, words in (
        (good.replace("role: SYNC_MASTER", "role: MASTER"), "role"),
        (good.replace("acks: 1", "acks: 7"), "acks"),
        (good + "colour: red\n", "colour"),
        ("role: [", "node1.yaml"),
        ("", "node1.yaml"),
    ):
        said = len(pair[1].log)
        pair[1].replace_file(bad)
        pair[1].send(signal.SIGHUP)
        assert words in pair[1].wait_log("not followed", since=said)
        pair[1].wait_status(lambda s: "not followed" in str(s["problems"]), "the problem is told")
        assert put(pair, bad.encode())[0].level == "SYNC_MEM(1)"
    pair[1].path.unlink()
    time.sleep(0.5)
    assert pair[1].status()["writable"]
    pair[1].replace_file(good)
    assert pair[1].status()["epoch"] == 1 << 16 | 1
    pair[1].edit_role("SLAVE")
    pair[1].wait_status(lambda s: s["role"] == "SLAVE", "a right file is followed again")


def test_a_master_without_its_slave_says_so(pair):
    assert pair[1].status()["problems"] == []
    pair[2].kill()
    told = pair[1].wait_status(lambda s: s["problems"], "the master tells of its missing slave")
    assert "synchronous puts are refused: 0 of 1 slaves in sync" in told["problems"][0]
    assert told["writable"], "asynchronous puts still go"
    pair[2].start("slave")
    pair[1].wait_status(lambda s: not s["problems"], "all is well again")


def test_an_old_master_follows_and_its_tail_is_archived(pair):
    put(pair, b"both")
    end = pair.wait_equal()
    pair[2].kill()
    tail = [b"tail %d" % number * 100 for number in range(300)]  # more than one file
    results = put(pair, *tail, acks=1)
    assert {r.level for r in results} == {"MASTER_MEM"}
    assert results[-1].offset > 2 * 65536
    pair[1].kill()
    pair[2].edit_role("SYNC_MASTER")
    pair[2].start("master")
    pair[2].wait_writable()
    assert pair[1].file_role == "SYNC_MASTER"
    pair[1].start("master")
    status = pair[1].wait_status(lambda s: s["role"] == "SLAVE", "a follower")
    assert not status["writable"] and "superseded by node 2" in status["reason"]
    with Producer(pair.bootstrap) as producer:
        assert producer.send_sync("T", b"after").epoch == 2 << 16 | 2
    pair[2].wait_in_sync(1)
    (folder,) = (pair[1].store / "rescued").iterdir()
    assert folder.name == f"{1 << 16 | 1}-{end}"
    rescued = rescued_records(pair[1].store)
    assert [found.body for found in rescued] == tail
    assert [found.offset for found in rescued] == [r.offset for r in results]
    # It stays a follower after a restart, whatever its file says, until the operator acts.
    pair[1].kill()
    pair[1].start("master")
    assert pair[1].status()["role"] == "SLAVE"
    done = hastore("promote", "-c", str(pair[1].path))
    assert done.returncode == 0, done.stderr
    pair[1].wait_in_sync(2)
    put(pair, b"node 1 again")
    log = finish(pair, 3)
    assert [found.body for found in log.records] == [b"both", b"after", b"node 1 again"]


@pytest.mark.full
def test_a_partitioned_master_confirms_nothing(pair):
    """Stop the master (SIGSTOP) like a partition would, and promote another: it then steps down."""
    put(pair, b"before")
    pair[1].pause()
    pair[2].edit_role("SYNC_MASTER")
    pair[2].wait_writable()
    pair[1].resume()
    pair[1].wait_status(lambda s: s["role"] == "SLAVE" and not s["writable"], "superseded")
    pair[2].wait_in_sync(1)
    assert put(pair, b"after")[0].epoch == 2 << 16 | 2
    finish(pair, 2)


@pytest.mark.full
def test_no_catch_up_is_refused(pair):
    """With --no-catch-up a node that is behind refuses, names the node ahead, changes nothing."""
    put(pair, b"before")
    pair.wait_equal()
    pair[2].kill()
    put(pair, b"tail", acks=1)
    pair[1].edit_role("SLAVE")
    pair[1].wait_status(lambda s: s["role"] == "SLAVE", "a slave")
    pair[2].start("slave")  # no master is open, so it stays behind
    before = pair[2].status()
    assert before["max_offset"] < pair[1].status()["max_offset"]
    done = hastore("promote", "-c", str(pair[2].path), "--no-catch-up")
    assert done.returncode == 1, done.stderr
    assert "node 1 is ahead" in done.stderr and done.stderr.count("\n") == 1
    assert pair[2].file_role == "SYNC_MASTER", "the file stays edited"
    after = pair[2].status()
    for key in ("role", "epoch", "max_offset", "writable", "promised_epoch"):
        assert after[key] == before[key]
    done = hastore("promote", "-c", str(pair[2].path))
    assert done.returncode == 0, done.stderr
    assert pair[2].status()["history"][-1]["start_offset"] > before["max_offset"]
    pair[2].wait_in_sync(1)
    put(pair, b"after")
    log = finish(pair, 3)
    assert [found.body for found in log.records] == [b"before", b"tail", b"after"]


def test_stale_notes_are_ignored(pair):
    put(pair, b"before")
    epoch = pair[2].status()["epoch"]
    path = pair[2].store / "hastore" / "once.json"
    now = time.time_ns() // 1_000_000
    for note in (
        {"command": "promote", "epoch": epoch - 1, "wall_ms": now, "force_unclean": True},
        {"command": "promote", "epoch": epoch, "wall_ms": now - 61_000, "no_catch_up": True},
        {"command": "promote", "epoch": epoch, "wall_ms": now + 3_600_000},
        {"command": "demote", "epoch": epoch, "wall_ms": now - 61_000, "accept_loss": True},
        {"colour": "red"},
        [1],
    ):
        REAL.replace_bytes(str(path), json.dumps(note).encode())
        wait_until(lambda: not path.exists(), 60, f"{note} was not removed")
    REAL.replace_bytes(str(path), b"\xff\xfe{")
    wait_until(lambda: not path.exists(), 60, "garbage was not removed")
    assert pair[2].log.count("once.json is removed") == 7
    assert pair[1].status()["epoch"] == pair[2].status()["epoch"] == epoch
    path = pair[1].store / "hastore" / "once.json"
    note = {"command": "promote", "epoch": epoch - 1, "wall_ms": now}
    REAL.replace_bytes(str(path), json.dumps(note).encode())
    wait_until(lambda: not path.exists(), 60, "a master's stale note was not removed")
    assert pair[1].status()["epoch"] == epoch
    put(pair, b"after")
    assert len(read_log(pair[1].store).records) == 2


@pytest.mark.full
def test_a_slave_that_cannot_make_a_folder_does_not_stop_the_master(pair):
    """Replay needs a folder for each topic. Something else is in the place of one."""
    put(pair, b"before")
    pair.wait_equal()
    in_the_way = pair[2].store / "consumequeue" / "T2"
    in_the_way.write_bytes(b"")
    with Producer(pair.bootstrap, delivery_timeout_s=60.0) as producer:
        producer.send_sync("T2", b"blocks")
    pair[2].wait_status(lambda s: "replay stopped" in " ".join(s["problems"]), "blocked replay")
    epoch = pair[1].status()["epoch"]
    refused = hastore("promote", "-c", str(pair[2].path), "--patience", "1")
    assert refused.returncode == 1
    assert "replay stopped at" in refused.stderr and "it asks for no promises" in refused.stderr
    assert "`hastore demote" in refused.stderr
    assert put(pair, b"during")[0].status == "PUT_OK"
    assert pair[1].status()["writable"] and pair[1].status()["promised_epoch"] == epoch
    in_the_way.unlink()
    pair[2].wait_writable()  # it goes on by itself
    pair[2].wait_in_sync(1)
    put(pair, b"after")
    pair[2].kill()  # a sync of the folder has failed too: the next start builds the rest anew
    pair[2].start("master")
    pair[2].wait_in_sync(1)
    finish(pair, 4)
