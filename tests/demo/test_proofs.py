"""Each proof of the demo can fail; the demo's data are whole."""

import json
import shutil

import pytest

from hastore.demo.flights import ROWS, count_rows, read_delays, read_flights, row_of
from hastore.demo.proof import (
    Acknowledged,
    ProofError,
    count_archived,
    prove_exactly_once,
    prove_identical_logs,
    prove_identical_queues,
)
from hastore.record.codec import build_record
from hastore.store.offline.reader import StoreReader
from tests.store.kit import BORN, opened, put

SENT = 400


@pytest.fixture
def known(tmp_path):
    """Put flights into a store and close it; return it and what the producer would know."""
    store, rows = tmp_path / "node1", []
    with opened(store) as messages:
        for flight in read_flights(SENT):
            (result,) = put(
                messages,
                build_record(
                    "flights",
                    flight.body,
                    queue_id=flight.row % 4,
                    properties=[("KEYS", flight.key)],
                    born_timestamp_ms=1_700_000_000_000,
                    born_host=BORN,
                ),
            )
            rows.append(Acknowledged(result.offset, flight.digest))
        confirm(messages)
    return store, rows


def confirm(messages):
    """Make all that is in a store readable, as a node does when its slaves have it."""
    end = messages.max_offset
    messages.set_limits(confirmed=end, readable=end)
    assert messages.wait_dispatched(end, 60), messages.problems


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


def test_a_message_that_is_there_twice_is_noticed(known):
    store, rows = known
    with opened(store) as messages:
        again = next(read_flights(1))
        put(
            messages,
            build_record("flights", again.body, queue_id=0, born_timestamp_ms=1, born_host=BORN),
        )
        confirm(messages)
    with pytest.raises(ProofError, match="row 0 is in the log twice"):
        prove(store, rows)


def test_logs_that_differ_are_noticed(known, tmp_path):
    one, other = known[0], tmp_path / "node2"
    shutil.copytree(one, other)
    with StoreReader(str(one)) as reader:
        assert prove_identical_logs(one, other) == reader.limit_offset > SENT * 300
    assert prove_identical_queues(one, other, "flights") == SENT
    with open(other / "commitlog" / f"{65_536:020}", "r+b") as file:
        file.seek(1_003)
        byte = file.read(1)
        file.seek(1_003)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ProofError, match=f"differ at offset {65_536 + 1_003}"):
        prove_identical_logs(one, other)


def test_logs_of_different_length_are_noticed(known, tmp_path):
    one, other = known[0], tmp_path / "node2"
    with opened(other):
        pass
    with pytest.raises(ProofError, match="the logs end at"):
        prove_identical_logs(one, other)


def test_archived_records_are_counted(known, tmp_path):
    store = known[0]
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
