"""The demo at 1/20 of its size, with Spark; each of its proofs can fail."""

import json
import os
import pathlib
import subprocess
import sys

import psutil
import pytest

from hastore.demo.flights import ROWS, count_rows, read_delays, read_flights, row_of
from hastore.demo.proof import (
    Acknowledged,
    ProofError,
    count_archived,
    prove_exactly_once,
    prove_identical_logs,
)
from hastore.record.codec import decode_record
from hastore.store.offline.reader import StoreReader
from tests.process.harness import ROOT, hastore

SCALE = "0.05"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Run the demo once; return its folder, its JSON and its stderr.

    The environment names the security file of another group, which the demo's nodes know nothing
    of. When it reports that nothing is left running, it must have no child processes.
    """
    folder = tmp_path_factory.mktemp("demo") / "stores"
    left, text = [], ""
    with subprocess.Popen(
        [sys.executable, str(ROOT / "bin" / "hastore"), "demo", "--json"]
        + ["--scale", SCALE, "--folder", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HASTORE_SECURITY": str(folder.parent / "another-group.yaml")},
    ) as demo:
        assert demo.stdout is not None and demo.stderr is not None
        for line in demo.stderr:
            text += line
            if "nothing is left running" in line:
                left = [child.name() for child in psutil.Process(demo.pid).children(recursive=True)]
        found = demo.stdout.read()
    assert demo.returncode == 0, text
    assert left == []
    return folder, json.loads(found), text


@pytest.mark.timeout(900)
def test_all_steps_run_and_all_proofs_hold(told):
    folder, facts, text = told
    rows = count_rows(float(SCALE))
    assert facts["messages"] == facts["spark_messages"] == rows
    assert facts["levels"] == {"SYNC_MEM(1)": rows}
    assert facts["flip"]["seconds_without_acknowledgement"] > 0
    assert facts["queue_units_identical"] == rows
    assert facts["log_bytes_identical"] > rows * 300
    assert pathlib.Path(facts["plot"]).read_bytes().startswith(b"\x89PNG")
    assert text.startswith("HASTORE_SECURITY is not used: the demo makes a group of its own")
    for number in range(1, 7):
        assert f"{number}/6 " in text
    for number in (1, 2):
        assert (folder / f"node{number}" / "commitlog").is_dir()


def test_nothing_is_left_running(told):
    folder, _, _ = told
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(folder).encode() not in process.read_bytes(), process
        except (FileNotFoundError, ProcessLookupError):
            pass  # the process has ended since


def test_a_folder_is_not_used_twice(told):
    folder, _, _ = told
    done = hastore("demo", "--folder", str(folder))
    assert done.returncode == 2 and "already contains a demo" in done.stderr


# -- each proof can fail


@pytest.fixture
def known(told):
    """Return the store of node 1 and what the producer would know of each row."""
    store = told[0] / "node1"
    flights = list(read_flights(count_rows(float(SCALE))))
    known = [None] * len(flights)
    with StoreReader(str(store)) as reader:
        for offset, raw in reader.raw_records():
            record = decode_record(raw)
            if record.topic == "flights":
                row = row_of(record.body)
                known[row] = Acknowledged(offset, flights[row].digest)
    return store, known


def prove(store, known):
    return prove_exactly_once(store, "flights", known, lambda count: None)


def test_the_proof_holds_for_what_was_sent(known):
    store, rows = known
    assert prove(store, rows) == len(rows)


def test_a_missing_message_is_noticed(known):
    store, rows = known
    with pytest.raises(ProofError, match="1 acknowledged messages are missing"):
        prove(store, [*rows, Acknowledged(1, 1)])


def test_an_unknown_message_is_noticed(known):
    store, rows = known
    with pytest.raises(ProofError, match="never sent"):
        prove(store, rows[:-1])


def test_a_changed_or_moved_message_is_noticed(known):
    store, rows = known
    one = rows[10]
    with pytest.raises(ProofError, match="row 10 at offset .* is not what was sent"):
        prove(store, [*rows[:10], Acknowledged(one.offset, one.digest + 1), *rows[11:]])
    with pytest.raises(ProofError, match="row 10 was acknowledged at"):
        prove(store, [*rows[:10], Acknowledged(one.offset + 1, one.digest), *rows[11:]])


def test_logs_that_differ_are_noticed(told, tmp_path):
    folder, facts, _ = told
    one, other = folder / "node1", tmp_path / "copy"
    assert prove_identical_logs(one, folder / "node2") == facts["log_bytes_identical"]
    subprocess.run(["cp", "-r", "--sparse=always", str(folder / "node2"), str(other)], check=True)
    with open(other / "commitlog" / f"{0:020}", "r+b") as file:
        file.seek(1_000_003)
        byte = file.read(1)
        file.seek(1_000_003)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ProofError, match="differ at offset 1000003"):
        prove_identical_logs(one, other)


def test_archived_records_are_counted(told, tmp_path):
    store = told[0] / "node1"
    assert count_archived(tmp_path) == (0, 0)
    with StoreReader(str(store)) as reader:
        entries = [entry for entry, _ in zip(reader.raw_records(), range(9), strict=False)]
    folder = tmp_path / "rescued" / "65537-100"
    folder.mkdir(parents=True)
    start = entries[4][0]
    data = b"".join(raw for _, raw in entries[4:])
    (folder / f"{start:020}").write_bytes(data + bytes(100))
    assert count_archived(tmp_path) == (5, len(data))
    (folder / f"{start:020}").unlink()
    (folder / f"{0:020}").write_bytes(bytes(start) + data)
    assert count_archived(tmp_path) == (5, len(data))


# -- the data


def test_the_data_is_whole():
    assert count_rows(1.0) == ROWS and count_rows(0.05) == 16_839
    delays = read_delays(ROWS)
    assert sum(one.flights for one in delays.values()) == ROWS
    assert len(delays) == 16 and delays["UA"].flights == 58_665


def test_a_flight_is_json_with_its_row_first():
    first = next(iter(read_flights(1)))
    assert json.loads(first.body)["row"] == first.row == row_of(first.body) == 0
    assert first.key == "UA-1545" and json.loads(first.body)["dep_delay"] == 2
    assert row_of(b"no flight") is None and row_of(b'{"row":x,') is None
