"""`hastore log` on the entries of a DLedger directory."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.kit import hastore
from tests.dledger.store.kit import opened, put
from tests.store.kit import message, scribble

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dledger-rocketmq" / "store"


def run(*words):
    return hastore("log", *map(str, words))


def test_dump_prints_entries_with_their_records():
    found = run("dump", "--store", GOLDEN, "--json", "--body")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.returncode == 0 and len(lines) == 69  # 68 entries and a blank
    first = lines[0]
    assert (first["index"], first["term"], first["pos"], first["size"]) == (0, 0, 0, 550)
    assert first["record"]["offset"] == 48 and first["record"]["topic"] == "Orders"
    assert {"body", "body_base64"} & set(first["record"])
    assert [line for line in lines if "blank" in line] == [
        {"pos": 32501, "size": 267, "blank": True}
    ]
    part = run("dump", "--store", GOLDEN, "--json", "--from", 551, "--to", 2000)
    assert [json.loads(line)["index"] for line in part.stdout.splitlines()] == [2, 3]
    text = run("dump", "--store", GOLDEN / "dledger-n0").stdout.splitlines()
    assert text[0].split() == "0 550 entry 0 of term 0, 502 bytes".split()
    assert "Orders[0]@0" in text[1]


def test_stat_and_verify_name_the_entries():
    found = run("stat", "--store", GOLDEN)
    assert "68 entries, [0, 67], the last one of term 0" in " ".join(found.stdout.split())
    assert "Orders" in found.stdout
    checked = json.loads(run("verify", "--store", GOLDEN, "--json").stdout)
    assert checked["ok"] and checked["entries"] == checked["index_units"] == 68


@pytest.mark.parametrize("what", ["record", "header", "index"])
def test_verify_finds_damage(tmp_path, what):
    root = shutil.copytree(GOLDEN, tmp_path / "store")
    ledger = root / "dledger-n0"
    if what == "index":
        scribble(str(ledger / "index" / f"{0:020}"), 32 * 5 + 10, b"\7")
    else:
        at = 2227 + (20 if what == "header" else 300)
        scribble(str(ledger / "data" / f"{0:020}"), at, b"\x55\x55")
    found = run("verify", "--store", root, "--json")
    assert found.returncode == 3
    shown = json.loads(found.stdout)
    assert not shown["ok"]
    if what == "index":
        assert shown["units_wrong"] == 1 and "entry 5" in shown["wrong"][0]
    else:
        # A term that was raised hides what follows; the checkpoint shows that something is missing.
        lost = (2227, 3206) if what == "record" else (3206, 39643)
        assert [(one["offset"], one["end_offset"]) for one in shown["damages"]] == [lost]


def test_a_store_of_hastore_its_archives_and_what_it_is_not(tmp_path):
    with opened(tmp_path / "s") as store:
        put(store, 1, *(message(number) for number in range(600)))
        store.flush()
        assert store.messages.wait_dispatched(store.messages.max_offset, 60)
        in_use = json.loads(run("verify", "--store", tmp_path / "s", "--json").stdout)
        assert in_use["ok"] and in_use["units"] == in_use["index_units"] == 600
        cut = store.end_position(299)
        store.truncate(300)
        store.install(900, 1 << 20, 1)
    rescued = tmp_path / "s" / "rescued"
    tail = run("dump", "--store", rescued / f"1-{cut}", "--json").stdout.splitlines()
    entries = [json.loads(line) for line in tail if "blank" not in line]
    assert [one["index"] for one in entries] == list(range(300, 600))
    old = json.loads(run("stat", "--store", rescued / "1-0", "--json").stdout)
    assert (old["entries"], old["ledger_end_index"]) == (300, 299)
    shutil.copytree(tmp_path / "s" / "dledger-n1", tmp_path / "s" / "dledger-n2")
    several = run("stat", "--store", tmp_path / "s")
    assert several.returncode == 3 and "several DLedger directories" in several.stderr
