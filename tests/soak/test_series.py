"""What counts as growth, on made-up series; samples, their files, and the exit code of a soak."""

import csv
import json
import pathlib
import random

import pytest

from tests.soak import __main__ as command
from tests.soak.clients import KINDS, NEEDED
from tests.soak.sampler import (
    ORDER,
    Sample,
    metric_values,
    not_idle,
    process_values,
    store_values,
    write_csv,
)
from tests.soak.series import COLUMNS, MIB, RULES, WARM_UP_MOST_S, cells, judge, trend_of, warm_up_s

SEED = random.SystemRandom().getrandbits(32)
HALF_HOUR_S, EVERY_S = 1_800, 10


def points(value, length_s=HALF_HOUR_S, every_s=EVERY_S):
    return [(at, value(at)) for at in range(0, length_s + 1, every_s)]


def noise(width, seed=SEED):
    chance = random.Random(seed)
    return lambda _at: chance.uniform(-width, width)


def grows(value, name="memory"):
    return judge(1, name, points(value), restarted=False).grows


def test_a_noisy_level_does_not_grow():
    wobble = noise(10)
    assert not grows(lambda at: 100 + wobble(at)), SEED


def test_a_slow_leak_in_noise_grows():
    """In half an hour the noise hides 60 MiB an hour in 4 of 100 walks, and 90 MiB in none."""
    walks = 50
    for per_hour, least in ((60, 40), (90, walks)):
        seen = 0
        for walk in range(walks):
            wobble = noise(5, SEED + walk)
            seen += grows(lambda at, each=per_hour, w=wobble: 100 + at * each / 3_600 + w(at))
        assert seen >= least, (per_hour, SEED)


def test_what_stays_below_the_allowance_does_not_grow():
    assert not grows(lambda at: 100 + at * 20 / 3_600)


def test_a_steep_slope_within_the_slack_does_not_grow():
    """The trend of a few samples may be anything."""
    assert not grows(lambda at: 100 + max(0, at - 1_700) * 0.05)


def test_a_table_that_fills_and_stays_full_does_not_grow():
    assert not grows(lambda at: 100 + min(at, 600) * 0.2)


def test_one_that_fills_until_the_end_grows():
    assert grows(lambda at: 100 + at * 0.05)


def test_the_warm_up_counts_for_nothing():
    one = judge(1, "memory", points(lambda at: 500 if at < 400 else 100), restarted=False)
    assert one.first == one.last == 100
    assert warm_up_s(HALF_HOUR_S) == HALF_HOUR_S / 4
    assert warm_up_s(1e9) == WARM_UP_MOST_S


@pytest.mark.parametrize("period_s", [70, 400])
def test_the_saw_tooth_of_retention_does_not_grow(period_s):
    wobble = noise(0.2)
    assert not grows(lambda at: 24 + at % period_s / period_s * 8 + wobble(at), "store"), SEED


def test_single_bursts_do_not_grow():
    chance = random.Random(SEED)
    assert not grows(lambda _at: 100 + (chance.random() < 0.05) * 200), SEED


def test_a_master_that_changes_does_not_grow():
    """Each second part of the time a node has more to do."""
    assert not grows(lambda at: 100 + at // 60 % 2 * 20)


def test_an_honest_level_is_hardly_ever_said_to_grow():
    """Noise as large as the slack."""
    rule = RULES["memory"]
    seen = 0
    for walk in range(100):
        wobble = noise(rule.slack, SEED + walk)
        seen += grows(lambda at, wobble=wobble: 100 + wobble(at))
    assert seen == 0, SEED


def test_the_slope_and_its_interval():
    trend = trend_of(points(lambda at: at / 3_600))
    assert trend.low == pytest.approx(1) and trend.high == pytest.approx(1)
    assert trend_of(points(float, 100)) is None


def test_what_is_not_judged():
    steep = points(float)
    assert judge(1, "memory", steep, restarted=False).grows
    assert not judge(1, "memory", steep, restarted=True).grows
    assert not judge(1, "connections", steep, restarted=False).grows
    assert not judge(1, "memory", steep[:3], restarted=False).grows


def test_a_verdict_as_a_row():
    leak = judge(2, "memory", points(lambda at: 100 + at), restarted=False)
    assert cells(leak)[:2] == ["2", "memory"] and cells(leak)[-1] == "grows"
    calm = judge(2, "threads", points(lambda _at: 7), restarted=False)
    assert cells(calm)[2:] == ["7", "7", "0", "0 to 0", "6/h", "bounded"]
    unknown = judge(3, "connections", [(0.0, 5.0)], restarted=False)
    assert cells(unknown)[2:] == ["5", "5", "", "", "", "not judged"]
    assert {len(cells(one)) for one in (leak, calm, unknown)} == {len(COLUMNS)}


# -- samples


def test_the_values_of_this_process_and_of_a_folder(tmp_path):
    before = process_values(pathlib.Path("/proc/self").resolve().name)
    with open(tmp_path / "a", "wb") as file:
        file.write(bytes(MIB))
        file.flush()
        now = process_values(pathlib.Path("/proc/self").resolve().name)
        assert now["open files"] == before["open files"] + 1
    assert before["memory"] > 1 and before["threads"] >= 1
    (tmp_path / "rescued").mkdir()
    (tmp_path / "rescued" / "b").write_bytes(b"x" * 5_000)
    found = store_values(tmp_path)
    assert found["store files"] == 2
    assert found["store"] >= 1 and 0 < found["archives"] < 0.1


def test_the_values_of_a_page_of_metrics():
    page = (
        "# HELP hastore_connections open connections\n# TYPE hastore_connections gauge\n"
        'hastore_connections{cluster="c",group="g",node="1"} 12\n'
        'hastore_delayed_messages{cluster="c",level="1"} 2\n'
        'hastore_delayed_messages{cluster="c",level="2"} 3\n'
        'hastore_unknown{cluster="c"} 5\nprocess_open_fds 9\n'
    )
    assert metric_values(page) == {"connections": 12, "delayed": 5}


def test_an_idle_node():
    idle = dict.fromkeys(("connections", "other sockets", "threads"), 10.0)
    idle |= {"parked pulls": 0.0, "waiting puts": 0.0}
    assert not_idle(idle, {**idle, "threads": 18.0}) == []
    assert not_idle(idle, {**idle, "connections": 11.0}) == [
        "connections: 11, before the clients 10"
    ]


def test_samples_as_a_table(tmp_path):
    write_csv(tmp_path / "all.csv", [Sample(1.25, 2, 1, {"memory": 3.5})])
    with open(tmp_path / "all.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["time_s", "node", "life", *ORDER]
    assert rows[1][:4] == ["1.2", "2", "1", "3.5"] and set(rows[1][4:]) == {""}


# -- the command


@pytest.mark.parametrize(
    ("wrong", "slope", "code"), [([], 0, 0), (["LOST"], 0, 1), ([], 1, 1), (None, 0, 2)]
)
def test_the_exit_code(monkeypatch, capsys, tmp_path, wrong, slope, code):
    def run(folder, given):
        assert given.seed == 7 and folder.is_dir()
        if wrong is None:
            raise AssertionError("the crowd did nothing")
        verdict = judge(1, "memory", points(lambda at: 100 + at * slope), restarted=False)
        return command.Outcome([verdict], [Sample(1.0, 1, 0, {"memory": 1.0})], wrong, 5)

    monkeypatch.setattr(command, "soak", run)
    monkeypatch.setattr(command, "raise_descriptors", lambda: None)
    monkeypatch.setattr(command, "write_plot", lambda path, _samples: path.touch() or False)
    files = [f"--{kind}={tmp_path / kind}" for kind in ("json", "csv", "plot")]
    assert command.main(["--seed", "7", *files]) == code
    said = capsys.readouterr()
    assert "seed 7" in said.err
    if wrong is not None:
        assert ("GROWS: node 1, memory" in said.out) == bool(slope)
        assert json.loads((tmp_path / "json").read_text())["series"][0]["grows"] == bool(slope)
        assert (tmp_path / "csv").read_text().count("\n") == 2
        assert (tmp_path / "plot").exists() and "no plot" in said.err


def test_each_kind_of_clients_says_what_it_must_have_done():
    assert set(KINDS) == set(NEEDED)
