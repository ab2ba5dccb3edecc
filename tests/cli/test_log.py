"""`hastore log` with a store that RocketMQ wrote."""

import base64
import json
import pathlib
import shutil

import pytest

from tests.cli.kit import as_another_user, hastore
from tests.dledger.store.kit import opened as entries_opened
from tests.dledger.store.kit import put as put_entries
from tests.store.kit import message, opened, put

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "three-files"
FIELDS = [
    *("offset", "size", "magic", "topic", "queue_id", "queue_offset", "body_crc", "body_size"),
    *("sys_flag", "flag", "born_ms", "born_host", "store_ms", "store_host", "reconsume_times"),
    *("prepared_offset", "properties", "sha256"),
]


def dump(*arguments):
    done = hastore("log", "dump", "--store", str(GOLDEN), "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_dump_lists_every_record_and_blank_without_a_gap():
    entries = dump()
    records = [entry for entry in entries if not entry.get("blank")]
    blanks = [entry for entry in entries if entry.get("blank")]
    assert all(list(entry) == FIELDS for entry in records)
    assert blanks and all(list(entry) == ["offset", "size", "blank"] for entry in blanks)
    assert entries[0]["offset"] == 0
    for entry, following in zip(entries, entries[1:], strict=False):
        assert entry["offset"] + entry["size"] == following["offset"]
    assert len(records[0]["sha256"]) == 64
    assert all(len(pair) == 2 for entry in records for pair in entry["properties"])


def test_dump_selects_entries_by_their_start():
    entries = dump()
    start, end = entries[3]["offset"], entries[7]["offset"]
    assert dump("--from", str(start), "--to", str(end)) == entries[3:7]
    assert dump("--from", str(start - 1), "--to", str(end)) == entries[3:7]


def test_stat_and_verify_agree_with_the_dump():
    records = sum(not entry.get("blank") for entry in dump())
    stat = json.loads(hastore("log", "stat", "--store", str(GOLDEN), "--json").stdout)
    done = hastore("log", "verify", "--store", str(GOLDEN), "--json")
    verified = json.loads(done.stdout)
    assert done.returncode == 0 and verified["ok"] is True
    assert stat["records"] == verified["records"] == records


def test_without_json_the_output_is_text():
    done = hastore("log", "stat", "--store", str(GOLDEN))
    assert done.returncode == 0 and "TopicA" in done.stdout
    done = hastore("log", "dump", "--store", str(GOLDEN))
    assert done.returncode == 0 and "TopicA[" in done.stdout


def test_damage_is_exit_code_3_with_its_offsets(tmp_path):
    store = tmp_path / "store"
    shutil.copytree(GOLDEN, store)
    victim = dump()[5]
    with open(store / "commitlog" / f"{0:020}", "r+b") as file:
        file.seek(victim["offset"] + 88)  # the start of the body, which the CRC covers
        file.write(b"\xff" * 4)
    done = hastore("log", "verify", "--store", str(store))
    assert done.returncode == 3
    assert f"[{victim['offset']}, {victim['offset'] + victim['size']})" in done.stderr


@pytest.mark.parametrize("kind", ["body", "file", "end"])
def test_a_stat_that_ends_before_damage_says_so(tmp_path, kind):
    """It counted a part as if it were all."""
    store, end = tmp_path / "store", 65536
    if kind == "end":
        with opened(store) as one:
            end = put(one, *(message(number) for number in range(6)))[5].offset
    else:
        shutil.copytree(GOLDEN, store)
    file = store / "commitlog" / f"{0 if kind == 'end' else 65536:020}"
    if kind == "file":
        file.unlink()
    else:
        with open(file, "r+b") as opened_file:
            opened_file.seek(end % 65536 + 88)
            opened_file.write(b"\xff" * 4)
    done = hastore("log", "stat", "--store", str(store), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 3 and f"counted up to {end}: damaged at {end}" in done.stderr
    assert (found["damaged_at"], found["max_offset"]) == (end, end) and found["damage"]
    done = hastore("log", "stat", "--store", str(store))
    assert done.returncode == 3 and "records" in done.stdout
    whole = hastore("log", "stat", "--store", str(GOLDEN), "--json")
    assert whole.returncode == 0 and json.loads(whole.stdout)["damaged_at"] is None


def test_pending_messages_of_a_log_that_lacks_a_file(tmp_path):
    """Retention removes no file from the middle."""
    store = shutil.copytree(GOLDEN, tmp_path / "store")
    (store / "commitlog" / f"{65536:020}").unlink()
    done = hastore("log", "pending", "--store", str(store))
    assert done.returncode == 3 and "retention" not in done.stderr
    assert "files of the log are missing between 65536 and 131072" in done.stderr


@pytest.mark.parametrize("part", ["dump", "stat", "verify"])
def test_a_missing_store_is_exit_code_3(tmp_path, part):
    done = hastore("log", part, "--store", str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"error: {tmp_path} is no store: it has no commitlog/ or dledger-*/\n"


def test_a_store_of_another_user_names_the_remedy(tmp_path):
    dump()  # imports what another user may not be able to import
    (tmp_path / "store").mkdir(mode=0)
    with as_another_user():
        done = hastore("log", "stat", "--store", str(tmp_path / "store"))
    assert done.returncode == 1
    assert done.stderr.endswith("the user who owns it; for a store see also store.group_read\n")


def test_a_dump_that_ends_before_damage_says_so(tmp_path):
    """Of RocketMQ's store, of hastore's, and of files in a folder, as under rescued/."""
    for kind in ("rocketmq", "hastore", "bare"):
        store = tmp_path / kind
        if kind == "hastore":
            with opened(store) as one:
                put(one, *(message(number) for number in range(6)))
        else:
            shutil.copytree(GOLDEN / "commitlog" if kind == "bare" else GOLDEN, store)
        whole = hastore("log", "dump", "--store", str(store), "--json")
        entries = [json.loads(line) for line in whole.stdout.splitlines()]
        assert (whole.returncode, whole.stderr) == (0, "")
        file = sorted((store if kind == "bare" else store / "commitlog").iterdir())[0]
        raw = bytearray(file.read_bytes())
        bad, following = entries[2], entries[3]["offset"]
        raw[bad["offset"] + 4] ^= 1
        file.write_bytes(raw)
        done = hastore("log", "dump", "--store", str(store), "--json")
        assert [json.loads(line) for line in done.stdout.splitlines()] == entries[:2]
        assert done.returncode == 3 and f"no record at offset {bad['offset']}" in done.stderr
        assert f"--from {following}" in done.stderr
        done = hastore("log", "dump", "--store", str(store), "--json", "--from", str(following))
        assert [json.loads(line) for line in done.stdout.splitlines()] == entries[3:]
        assert done.returncode == 0
        done = hastore("log", "dump", "--store", str(store), "--to", str(bad["offset"]))
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", ["store", "tail", "tail inside a file"])
def test_a_dump_of_a_log_whose_first_record_is_damaged_says_so(tmp_path, kind):
    """It listed nothing, or the records after it, as if the damaged one had never been there."""
    with opened(tmp_path / "s") as one:
        places = [put(one, message(number))[0].offset for number in range(6)]
    folder, first = tmp_path / "s", 0
    if kind != "store":
        first = 3 if kind == "tail inside a file" else 0
        folder = tmp_path / f"65537-{places[first]}"
        shutil.copytree(tmp_path / "s" / "commitlog", folder)
    (file,) = (folder / "commitlog" if kind == "store" else folder).iterdir()
    raw = bytearray(file.read_bytes())
    raw[: places[first]] = bytes(places[first])
    file.write_bytes(raw)
    whole = hastore("log", "dump", "--store", str(folder))
    assert (whole.returncode, len(whole.stdout.splitlines())) == (0, 6 - first)
    raw[places[first] + 4] ^= 1
    file.write_bytes(raw)
    done = hastore("log", "dump", "--store", str(folder))
    assert done.returncode == 3 and f"no record at offset {places[first]}" in done.stderr
    if kind == "tail inside a file":
        assert done.stdout.splitlines() == whole.stdout.splitlines()[1:]
    else:
        assert f"--from {places[first + 1]}" in done.stderr
    (tmp_path / "empty" / "commitlog").mkdir(parents=True)
    (tmp_path / "empty" / "commitlog" / file.name).write_bytes(bytes(1000))
    assert hastore("log", "dump", "--store", str(tmp_path / "empty")).returncode == 0


@pytest.mark.parametrize("kind", ["hastore", "rocketmq", "entries"])
def test_a_log_whose_first_sector_is_lost_is_damaged(tmp_path, kind):
    """A sector that is lost reads as zeros, as what lies before the begin after a resync does."""
    store, folder = tmp_path / "store", "commitlog"
    if kind == "hastore":
        with opened(store) as one:
            put(one, *(message(number) for number in range(20)))
    elif kind == "entries":
        folder = "dledger-n1/data"
        with entries_opened(store) as one:
            put_entries(one, 1, *(message(number) for number in range(20)))
            one.flush()
    else:
        shutil.copytree(GOLDEN, store)
    rows = [json.loads(line) for line in hastore("log", "dump", "--store", str(store),
                                                 "--json").stdout.splitlines()]  # fmt: skip
    with open(store / folder / f"{0:020}", "r+b") as file:
        file.write(bytes(600))
    places = [row["pos"] if kind == "entries" else row["offset"] for row in rows]
    following = min(place for place in places if place >= 600)
    for root in (store, store / "dledger-n1") if kind == "entries" else (store,):
        done = hastore("log", "verify", "--store", str(root), "--json")
        found = json.loads(done.stdout)
        assert done.returncode == 3 and found["min_offset"] == 0
        (damage,) = found["damages"]
        assert (damage["offset"], damage["end_offset"]) == (0, following)
        assert found["records"] == sum(
            place >= following and not row.get("blank")
            for place, row in zip(places, rows, strict=True)
        )
    for start in ((), ("--from", "0")):
        done = hastore("log", "dump", "--store", str(store), *start)
        assert (done.returncode, done.stdout) == (3, "")
        assert f"--from {following} has the rest" in done.stderr


def test_a_log_that_begins_inside_a_file_is_sound(tmp_path):
    with opened(tmp_path) as store:
        store.begin_at(1000)
        put(store, *(message(number) for number in range(3)))
    done = hastore("log", "verify", "--store", str(tmp_path), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["min_offset"] == 1000
    done = hastore("log", "dump", "--store", str(tmp_path))
    assert (done.returncode, done.stdout.count("blank"), done.stderr) == (0, 0, "")
    with open(tmp_path / "commitlog" / f"{0:020}", "r+b") as file:
        file.seek(1000)
        file.write(bytes(50))
    assert hastore("log", "verify", "--store", str(tmp_path)).returncode == 3
    assert hastore("log", "dump", "--store", str(tmp_path)).returncode == 3


def test_dump_shows_bodies_and_reads_a_folder_of_files(tmp_path):
    tail = tmp_path / "65537-0"
    shutil.copytree(GOLDEN / "commitlog", tail)
    done = hastore("log", "dump", "--store", str(tail), "--json", "--body", "--to", "1")
    (entry,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and entry["body_size"]
    assert len(base64.b64decode(entry.pop("body_base64"))) == entry["body_size"]
    assert [entry] == dump("--to", "1")
    done = hastore("log", "dump", "--store", str(tail), "--body", "--to", "1")
    assert done.returncode == 0 and "base64 " in done.stdout.splitlines()[1]
    for part in ("stat", "verify"):
        assert hastore("log", part, "--store", str(tail)).returncode == 0
