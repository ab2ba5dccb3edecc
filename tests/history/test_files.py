"""Histories in files, the log of a real store beside them, and `hastore check`."""

import json
import pathlib
import random
import re

import pytest

from hastore.errors import CorruptRecordError, UsageError
from hastore.history import Recorder, check
from hastore.history.files import Lines, record_event, records_of
from hastore.history.rules import events as e
from hastore.history.rules.findings import PROMISES
from hastore.record.codec import build_record, decode_record
from tests.cli.kit import ROOT, hastore
from tests.history.healthy import healthy
from tests.store.kit import BORN, opened, put

KINDS = [kind for kind in vars(e).values() if isinstance(kind, type) and issubclass(kind, e.Event)]


def write(path: pathlib.Path, lines: list[e.Event]) -> pathlib.Path:
    path.write_bytes(b"".join(map(e.encode, lines)))
    return path


def test_every_kind_of_event_is_read_as_it_was_written() -> None:
    lines = healthy(1)
    lines += [e.Fail("c", 1, 2, "BUSY"), e.Reset(1, "g"), e.Rescued(1, "0" * 16)]
    for event in lines:
        assert e.decode(e.encode(event), "line") == event
    assert {type(one) for one in lines} == set(KINDS) - {e.Event}


def test_the_page_has_every_kind_and_field() -> None:
    """docs/testing.md."""
    text = (ROOT / "docs" / "testing.md").read_text().partition("### The format of a history")[2]
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| `")][1:]
    page = {
        kind: re.findall(r"`(\w+)`", fields)
        for kinds, fields in rows
        for kind in re.findall(r"`(\w+)`", kinds)
    }
    assert page == {
        str(kind.__struct_config__.tag): list(kind.__struct_fields__)
        for kind in KINDS
        if kind is not e.Event
    }


def test_the_page_has_every_promise() -> None:
    """docs/reliability.md."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert [name for name, what in PROMISES.items() if f"| `{name}` | {what} |" not in text] == []


def test_one_path_is_a_history_too(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "a.jsonl", healthy(2))
    assert check(str(path)).counts == check(path).counts == check([path]).counts


def test_a_history_in_files_is_judged_as_in_memory(tmp_path: pathlib.Path) -> None:
    header, *lines = healthy(2)
    one = write(tmp_path / "a.jsonl", [header, *lines])
    report = check([one], expect=["flip", "kill"])
    assert report.ok and report.counts["acknowledged"] > 50
    # Two recorders: each has the lines of its clients.
    rng = random.Random(2)
    names = {getattr(line, "client", "") for line in lines}
    mine = {name for name in sorted(names) if rng.random() < 0.5}
    parts = [line for line in lines if getattr(line, "client", "") in mine]
    rest = [line for line in lines if getattr(line, "client", "") not in mine]
    paths = [write(tmp_path / "b.jsonl", [header, *parts])]
    paths.append(write(tmp_path / "c.jsonl", [header, *rest]))
    assert check(paths).counts == report.counts and check(paths).ok


def test_a_finding_names_file_and_line(tmp_path: pathlib.Path) -> None:
    header, *lines = healthy(3)
    dropped = next(one for one in lines if isinstance(one, e.Record))
    first = write(tmp_path / "a.jsonl", [header, e.Fault(1, "start", 1)])
    lines = [one for one in lines if one is not dropped]
    second = write(tmp_path / "b.jsonl", [header, *lines])
    names = Lines()
    report = check([first, second], lines=names)
    (found,) = [one for one in report.findings if one.promise in ("durable", "queues")][:1]
    path, _, number = names.name(found.lines[0]).rpartition(":")
    event = e.decode(second.read_bytes().splitlines()[int(number) - 1], "line")
    assert path == str(second) and isinstance(event, e.Send | e.Record)


def test_what_is_no_history_is_refused_with_its_place(tmp_path: pathlib.Path) -> None:
    def refusal(text: bytes) -> str:
        path = tmp_path / "h.jsonl"
        path.write_bytes(text)
        with pytest.raises(UsageError) as refused:
            check([path])
        return str(refused.value).removeprefix(f"{path}:")

    header = e.encode(e.Header())
    assert refusal(b"").startswith("1: not an event of a history")
    assert refusal(b'{"kind":"fault","t":1,"fault":"kill"}\n').startswith("1: a history begins")
    later = b'{"kind":"history","version":2}\n'
    assert "a history of version 2; this hastore reads version 1" in refusal(later)
    assert refusal(header + b"{\n").startswith("2: not an event of a history")
    assert refusal(header + b'{"kind":"crash","t":1}\n').startswith("2: not an event")
    assert refusal(header + b'{"kind":"fault","t":-1,"fault":"kill"}\n').startswith("2: not an ev")
    assert refusal(header + header) == "2: a second header"
    huge = b'{"kind":"fault","t":%d,"fault":"kill"}\n' % (1 << 70)
    assert refusal(header + huge).startswith("2: not an event of a history")


def test_a_last_line_that_was_not_written_whole_is_left_out(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "h.jsonl", healthy(4))
    whole = check([path]).counts
    with open(path, "ab") as file:
        file.write(b'{"kind":"fault","t":1,"fa')
    assert check([path]).counts == whole


# -- with a store


@pytest.fixture
def recorded(tmp_path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A store with 60 messages of a producer, and the history of their sends."""
    store, history = tmp_path / "store", tmp_path / "h.jsonl"
    with opened(store) as messages, Recorder(history) as recorder:
        for number in range(60):
            body = b"body %d" % number
            digest = e.digest_of("orders", f"k{number}", body)
            recorder.add(e.Send("p", number, recorder.now(), "orders", digest))
            properties = [("KEYS", f"k{number}"), ("HS_PID", "p"), ("HS_SEQ", str(number))]
            record = build_record("orders", body, queue_id=number % 4, properties=properties,
                                  born_timestamp_ms=1, born_host=BORN)  # fmt: skip
            (result,) = put(messages, record)
            ok = e.Ok("p", number, recorder.now(), "SYNC_MEM(1)", result.offset, number % 4,
                      result.queue_offset, 1)  # fmt: skip
            recorder.add(ok)
        put(messages, build_record("others", b"x", queue_id=0, born_timestamp_ms=1, born_host=BORN))
        end = messages.max_offset
        messages.set_limits(confirmed=end, readable=end)
    return store, history


def test_the_log_of_a_store_is_compared(recorded: tuple[pathlib.Path, pathlib.Path]) -> None:
    store, history = recorded
    report = check([history], store=store)
    assert report.ok and report.counts["records"] == report.counts["acknowledged_and_found"] == 60
    assert report.counts["numbered_by_producers"] == 60
    log, first, *_ = records_of(store, {"orders"})
    assert isinstance(log, e.Log) and isinstance(first, e.Record)
    assert (log.begin, first.offset, first.producer, first.sequence) == (0, 0, "p", 0)


def test_what_nobody_sent_is_found_in_each_topic_that_the_history_names(
    recorded: tuple[pathlib.Path, pathlib.Path],
) -> None:
    """Also in one without a send: there is a message of another topic in the store."""
    store, history = recorded
    lines = history.read_bytes().splitlines(keepends=True)
    lines[0] = e.encode(e.Header(topics=["orders", "others"]))
    history.write_bytes(b"".join(lines))
    assert check([history], store=store).broken == {"phantom": 1}


def test_a_key_that_is_no_utf_8_is_the_same_in_the_store_as_in_the_history() -> None:
    """As of a message of another client that a producer sends again."""
    key = b"k\xff".decode("utf-8", "surrogateescape")
    raw = build_record("orders", b"x", queue_id=0, properties=[("KEYS", key)],
                       born_timestamp_ms=1, born_host=BORN)  # fmt: skip
    event = record_event(0, len(raw), decode_record(raw))
    assert event.digest == e.digest_of("orders", key, b"x")


def test_a_range_alone_is_compared_with_the_store(
    recorded: tuple[pathlib.Path, pathlib.Path],
) -> None:
    store, history = recorded
    rows = [(place, f"k{4 * place}", b"body %d" % (4 * place)) for place in range(15)]
    with Recorder(history, topics=[]) as recorder:
        recorder.rows("orders", 0, 0, 15, rows)
        recorder.rows("orders", 0, 3, 9, rows[3:9])
        recorder.rows("orders", 0, 0, 15, [*rows[1:], rows[1]])
    report = check([history], store=store)
    assert report.counts["ranges"] == 3 and report.broken == {"ranges": 1}, report.findings


def test_a_message_that_the_store_lacks_is_found(
    recorded: tuple[pathlib.Path, pathlib.Path],
) -> None:
    store, history = recorded
    lines = history.read_bytes()
    digest = e.digest_of("orders", None, b"lost")
    more = e.Send("q", 1, 1, "orders", digest), e.Ok("q", 1, 2, "SYNC_MEM(1)", 1 << 20, 0, 99, 1)
    history.write_bytes(lines + b"".join(map(e.encode, more)))
    report = check([history], store=store)
    assert report.broken == {"durable": 1}


def test_damage_of_the_store_is_no_finding(recorded: tuple[pathlib.Path, pathlib.Path]) -> None:
    store, history = recorded
    log = next((store / "commitlog").iterdir())
    raw = bytearray(log.read_bytes())
    raw[raw.index(b"body 7")] ^= 1
    log.write_bytes(raw)
    with pytest.raises(CorruptRecordError):
        check([history], store=store)
    done = hastore("check", str(history), "--store", str(store))
    assert done.returncode == 3 and "no valid record at offset" in done.stderr


# -- the command


def test_the_command_says_what_was_checked(recorded: tuple[pathlib.Path, pathlib.Path]) -> None:
    store, history = recorded
    done = hastore("check", str(history), "--store", str(store))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("60 sends: 60 acknowledged in 1 epoch, of these 60 found; ")
    assert done.stdout.endswith("all promises were kept\n")
    done = hastore("check", str(history), "--store", str(store), "--json")
    told = json.loads(done.stdout)
    assert told["ok"] and told["counts"]["records"] == 60 and told["findings"] == []


def test_the_command_takes_the_store_of_a_node(
    recorded: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    store, history = recorded
    assert hastore("init", str(tmp_path / "conf")).returncode == 0
    config = tmp_path / "conf" / "node1.yaml"
    text = config.read_text()
    (root,) = [line for line in text.splitlines() if line.strip().startswith("root:")]
    config.write_text(text.replace(root, f"  root: {store}"))
    done = hastore("check", str(history), "-c", str(config))
    assert done.returncode == 0 and "60 records of the log" in done.stdout, done.stderr
    done = hastore("check", str(history), "-c", str(config), "--store", str(store))
    assert done.returncode == 2 and "--store or -c, not both" in done.stderr


def test_the_command_fails_for_a_broken_promise_and_for_a_vacuous_history(
    tmp_path: pathlib.Path,
) -> None:
    lines = healthy(5)
    dropped = next(one for one in lines if isinstance(one, e.Range))
    dropped.count += 1
    path = write(tmp_path / "h.jsonl", lines)
    done = hastore("check", str(path))
    assert done.returncode == 4 and "all promises" not in done.stdout
    assert done.stderr.startswith("lost beyond the fault budget: durable: acknowledged at ")
    assert f"error: ranges: orders[0] from {dropped.start} to" in done.stderr
    assert f"({path}:{lines.index(dropped) + 1})\n" in done.stderr
    told = json.loads(hastore("check", str(path), "--json").stdout)
    assert told["broken"] == {"ranges": 1}
    assert told["findings"][0]["lines"] == [f"{path}:{lines.index(dropped) + 1}"]
    path = write(tmp_path / "h.jsonl", [e.Header()])
    done = hastore("check", str(path), "--expect", "flip")
    assert done.returncode == 4
    assert "error: the history proves nothing: no send was acknowledged\n" in done.stderr
    assert "error: the history proves nothing: there was no flip\n" in done.stderr
    assert hastore("check", str(tmp_path / "none")).returncode == 2
    path.write_text("no history")
    done = hastore("check", str(path))
    assert done.returncode == 2 and f"error: {path}:1: not an event" in done.stderr
