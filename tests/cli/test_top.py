"""`hastore top`: what a frame shows, its width, its rates; one frame of a real group; keys."""

import json
import os

import pytest

from hastore.cli import top
from hastore.cli.status import GroupAnswers
from hastore.cli.top_frame import Look, Reading, frame, lines, short
from hastore.client.producer.producer import Producer
from tests.cli.kit import hastore
from tests.cli.test_screens import on_a_terminal
from tests.cli.test_status import make_group, pair

__all__ = ["make_group", "pair"]


def slave(number, ack, lag=0):
    return {
        "node": number, "address": f"h{number}", "in_sync": lag < 1_000, "ack_offset": ack,
        "lag_bytes": lag,
    }  # fmt: skip


def status(number, role="SLAVE", end=1_000, **more):
    return {
        "node": number, "cluster": "c", "group": "g", "address": f"tcp://h{number}",
        "answers": True, "role": role, "epoch": 65537, "writable": role != "SLAVE",
        "takes_default": role != "SLAVE", "default_refused": None,
        "max_offset": end, "confirmed_offset": end, "waiting_puts": 0,
        "connections": 3, "problems": [], "slaves": [],
    } | more  # fmt: skip


def silent(number):
    return {
        "node": number, "cluster": "c", "group": "g", "address": f"tcp://h{number}",
        "answers": False, "silence": "timed out", "slaves": [],
    }  # fmt: skip


def look(at_s, *answers, errors=()):
    there = [one for one in answers if one["answers"]]
    rest = [one for one in answers if one not in there]
    return Look(at_s, [GroupAnswers(there, rest)], errors, 0)


def test_rates_are_computed_from_two_looks():
    master = status(1, "SYNC_MASTER", 1_000, slaves=[slave(2, 900)])
    later = status(
        1, "SYNC_MASTER", 21_000, confirmed_offset=20_000, slaves=[slave(2, 10_900, 10_100)]
    )
    found = frame(look(10.0, master, status(2)), look(12.0, later, status(2, end=500)), None, None)
    one, two = found["nodes"]
    assert one["bytes_per_s"] == 10_000 and one["unconfirmed_bytes"] == 1_000
    assert two["bytes_per_s"] == 0, "a log that was cut grows by nothing"
    assert found["slaves"] == [
        {"node": 2, "of": 1, "in_sync": False, "ack_offset": 10_900, "lag_bytes": 10_100,
         "bytes_per_s": 5_000},
    ]  # fmt: skip
    assert frame(None, look(1.0, master), None, None)["nodes"][0]["bytes_per_s"] is None


def test_groups_are_sorted_by_their_lag_with_its_growth():
    was, now = Reading(0.0, 100, {"a": 5, "b": 10}), Reading(5.0, 600, {"a": 30, "b": 0, "c": 7})
    found = frame(None, look(1.0, status(1)), was, now)
    assert found["messages_per_s"] == 100
    assert found["groups"] == [
        {"group": "a", "lag": 30, "lag_per_s": 5.0},
        {"group": "c", "lag": 7, "lag_per_s": None},
        {"group": "b", "lag": 0, "lag_per_s": -2.0},
    ]
    failed = Reading(9.0, 0, {}, "consumer groups: no node answers")
    found = frame(None, look(1.0, status(1)), now, failed)
    assert found["messages_per_s"] is None and "no node answers" in found["errors"][0]


@pytest.mark.parametrize("width", [20, 40, 80, 120, None])
def test_all_lines_fit(width):
    big = 123_456_789_012_345
    master = status(
        1, "SYNC_MASTER", big, confirmed_offset=5, waiting_puts=10_000, connections=1_000,
        problems=["x"], epoch=big, slaves=[slave(2, big, big), slave(None, None, 0)],
    )  # fmt: skip
    read = Reading(1.0, big, {f"a group with a long name {n}" * 3: big + n for n in range(15)})
    shown = frame(None, look(1.0, master, silent(3), errors=["an error " * 20]), None, read)
    drawn = [text for text, _ in lines(shown, width, title="a title")]
    assert width is None or all(len(line) <= width for line in drawn), drawn
    text = "\n".join(drawn)
    assert width == 20 or ("SYNC_MASTER" in text and "3  " in text and "no answer" in text)
    if width is None or width >= 80:
        assert "bytes/s" in text and "timed out" in text and "and 5 more groups" in text
        assert "RocketMQ" in text and f"{big:,}" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (0, "0"), (0.4, "0.4"), (7, "7"), (999, "999"), (999.6, "1.0k"), (1_234, "1.2k"),
     (99_999, "100k"), (34_000_000, "34M"), (2.5e18, "2500P"), (-1_500, "-1.5k")],
)  # fmt: skip
def test_numbers_are_short(number, text):
    assert short(number) == text


def once(group, *more):
    return hastore("top", "-c", group.file(1), "--once", "--every", "0.01", "--timeout", "5", *more)


def test_one_frame_of_a_pair_and_of_one_whose_slave_is_down(pair):
    with Producer(pair.api().split(",")) as producer:
        producer.send_sync("t", b"x")
    done = once(pair)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert rows[0].split()[:5] == ["node", "role", "puts", "bytes/s", "end"]
    assert rows[1].split()[:3] == ["1", "SYNC_MASTER", "yes"]
    assert rows[2].split()[:3] == ["2", "SLAVE", "no"]
    assert any(row.startswith("messages: ") for row in rows)
    pair.stop(2)
    done = once(pair, "--json", "--no-groups")
    assert done.returncode == 4
    found = json.loads(done.stdout)
    one, two = found["nodes"]
    assert one["puts"] == "acks 1" and one["connections"] >= 1 and one["bytes_per_s"] is not None
    assert two["answers"] is False and two["silence"] == "refused"
    assert found["groups"] == [] and found["messages_per_s"] is None
    assert "puts that do not set acks are refused" in found["errors"][0]
    done = once(pair, "--no-groups")
    assert done.stderr.startswith("error: puts that do not set acks are refused")
    assert done.stdout.startswith("node  role") and "error: " not in done.stdout


def test_without_any_node_it_says_so(pair):
    pair.stop(1, 2)
    done = once(pair, "--timeout", "0.2")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and not done.stdout.strip()


def test_wrong_usage(pair):
    assert hastore("top", "-c", pair.file(1)).returncode == 2, "no terminal"
    assert hastore("top", "--once", "--every", "0", "-c", pair.file(1)).returncode == 2
    assert hastore("top", "--once", "-c", pair.file(1), "--bootstrap", pair.api()).returncode == 2


def test_json_follows_until_ctrl_c(pair, monkeypatch):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(top, "_pause", pause)
    done = hastore("top", "-c", pair.file(1), "--json")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2


def test_q_is_noticed_at_once_and_other_keys_are_not():
    out, into = os.pipe()
    try:
        os.write(into, b"xyz")
        assert not top.quit_typed(out, 0.01)
        os.write(into, b"aQ")
        assert top.quit_typed(out, 600.0)
    finally:
        os.close(into)
    assert top.quit_typed(out, 600.0), "the terminal is gone"
    os.close(out)


def test_on_a_terminal_of_80_columns(pair):
    drawn = on_a_terminal(80, "top", "-c", pair.file(1), "--every", "0.1", typed=b"q")
    text = "\n".join(drawn)
    assert "q ends" in text and "SYNC_MASTER" in text
