"""Each proof of the demo can fail; the demo's data are whole."""

import json
import shutil

import pytest

from hastore.demo.flights import ROWS, count_rows, read_delays, read_flights
from hastore.demo.proof import (
    ProofError,
    count_archived,
    prove_history,
    prove_identical_logs,
    prove_identical_queues,
)
from hastore.history.rules import events as e
from hastore.record.codec import build_record
from hastore.store.offline.reader import StoreReader
from tests.store.kit import BORN, opened, put

SENT = 400


@pytest.fixture
def known(tmp_path):
    """Put flights into a store and close it; return it and what the producer would have seen."""
    store, events = tmp_path / "node1", [e.Header(nodes=2)]
    with opened(store) as messages:
        for flight in read_flights(SENT):
            (result,) = put(messages, record_of(flight))
            digest = e.digest_of("flights", flight.key, flight.body)
            t, epoch = 10 * flight.row, 1 if flight.row < SENT // 2 else 2
            events.append(e.Send("p", flight.row, t, "flights", digest))
            if flight.row == SENT // 2:
                events.append(e.Fault(t, "kill", 1))
            events.append(
                e.Ok("p", flight.row, t + 5, "SYNC_MEM(1)", result.offset, flight.row % 4,
                     result.queue_offset, epoch)
            )  # fmt: skip
        confirm(messages)
    return store, events


def record_of(flight):
    return build_record(
        "flights",
        flight.body,
        queue_id=flight.row % 4,
        properties=[("KEYS", flight.key)],
        born_timestamp_ms=1_700_000_000_000,
        born_host=BORN,
    )


def confirm(messages):
    """Make all that is in a store readable, as a node does when its slaves have it."""
    end = messages.max_offset
    messages.set_limits(confirmed=end, readable=end)
    assert messages.wait_dispatched(end, 60), messages.problems


def prove(store, events, kills=1):
    history = store.parent / "history.jsonl"
    history.write_bytes(b"".join(map(e.encode, events)))
    return prove_history(history, store, SENT, kills, lambda done: None)


def test_the_proof_holds_for_what_was_sent(known):
    assert prove(*known) == SENT


def test_a_missing_message_is_noticed(known):
    store, events = known
    more = e.Send("p", SENT, 1, "flights", "0" * 16), e.Ok("p", SENT, 2, "SYNC_MEM(1)", 9, 0, 9, 1)
    with pytest.raises(ProofError, match="durable: acknowledged at 9 .*, not in the log"):
        prove(store, [*events, *more])


def test_an_unknown_message_is_noticed(known):
    store, events = known
    with pytest.raises(ProofError, match=r"phantom: nobody has sent the record of flights\[3\]"):
        prove(store, events[:-2])


def test_a_changed_or_moved_message_is_noticed(known):
    store, events = known
    ok = events[2]
    ok.offset += 1
    with pytest.raises(ProofError, match="durable: acknowledged at 1 .*, not there in the log"):
        prove(store, events)
    ok.offset -= 1
    events[1].digest = "0" * 16
    with pytest.raises(ProofError, match="durable: acknowledged at 0 .*, not in the log"):
        prove(store, events)


def test_a_message_that_is_there_twice_is_noticed(known):
    store, events = known
    with opened(store) as messages:
        put(messages, record_of(next(iter(read_flights(1)))))
        confirm(messages)
    with pytest.raises(ProofError, match="once: a message is once more in flights"):
        prove(store, events)


def test_a_proof_without_a_kill_or_an_acknowledgement_is_none(known):
    store, events = known
    with pytest.raises(ProofError, match="proves nothing: there was no kill"):
        prove(store, [one for one in events if not isinstance(one, e.Fault)])
    unknown = e.Send("p", SENT, 1, "flights", "0" * 16), e.Info("p", SENT, 2, "TIMEOUT")
    assert prove(store, [*events, *unknown]) == SENT
    events[-1] = e.Info("p", SENT - 1, events[-1].t, "TIMEOUT")
    with pytest.raises(ProofError, match=f"{SENT - 1} messages are found, {SENT} were sent"):
        prove(store, events)


def test_a_kill_after_the_last_message_proves_nothing(known):
    with pytest.raises(ProofError, match="has 1 of 2 kills: all was sent before the others"):
        prove(*known, kills=2)


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
    assert json.loads(first.body)["row"] == first.row == 0
    assert first.key == "UA-1545" and json.loads(first.body)["dep_delay"] == 2
