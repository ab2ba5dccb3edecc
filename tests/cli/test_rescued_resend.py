"""`hastore rescued resend`: what the log has is not sent, and what was sent is not sent again."""

import json
import pathlib

import pytest

from hastore.cli.message_text import parse_json
from hastore.cli.rescued import is_removed
from hastore.cli.resending import RESCUED_FROM, Rescued, names_of, read_archive
from hastore.record.codec import build_record
from hastore.record.compression import compress
from hastore.store.offline import inspect
from tests.cli.kit import as_another_user, hastore
from tests.cli.test_status import cut_three, make_group, pair
from tests.dledger.store.kit import no_op
from tests.dledger.store.kit import opened as opened_entries
from tests.dledger.store.kit import put as put_entries
from tests.store.kit import BORN, message, opened
from tests.store.kit import put as append
from tests.store.logs import GOLDEN
from tests.store.test_message_reader import inner_batch

__all__ = ["make_group", "pair"]
STORE = GOLDEN / "three-files"


def archive(tmp_path, *records):
    """Make a folder with a log of these records."""
    with opened(tmp_path / "archive") as store:
        append(store, *records)
    return str(tmp_path / "archive")


def record(topic, body, *properties, sys_flag=0):
    return build_record(
        topic, body, queue_id=0, properties=properties, sys_flag=sys_flag, born_timestamp_ms=1,
        born_host=BORN,
    )  # fmt: skip


def test_the_names_of_a_message():
    both = {"HS_PID": "p", "HS_SEQ": "7", "UNIQ_KEY": "U"}
    assert names_of(both) == {"p/7", "id U"}
    assert names_of({"HS_PID": "p"}) == names_of({}) == set()
    one = Rescued(4711, "t", 0, 5, b"", both, None)
    assert one.own_name == "id U" and one.options["properties"] == {
        "UNIQ_KEY": "U", RESCUED_FROM: "id U",
    }  # fmt: skip
    again = one._replace(properties={**both, RESCUED_FROM: "q/1"})
    assert again.own_name == "q/1" and again.names == {"p/7", "id U", "q/1"}
    bare = one._replace(properties={"KEYS": "k", "TAGS": "g"})
    assert bare.own_name == "at t 5 4711"
    assert (bare.options["key"], bare.options["tags"]) == ("k", "g")


def test_a_crc_over_another_record_is_not_sent_again():
    """Of a broker with enabledAppendPropCRC, which takes a record with a wrong one for damaged."""
    properties = {"__CRC32#": "123", "n": "1"}
    one = Rescued(4711, "t", 0, 5, b"", properties, None)
    assert one.options["properties"] == {"n": "1", RESCUED_FROM: "at t 5 4711"}
    line = json.dumps({"body": "x", "properties": properties}).encode()
    assert parse_json(line, keep_queues=False).options["properties"] == {"n": "1"}


def test_an_archive_is_read_with_its_bodies(tmp_path):
    text = b"many many many many many many many words " * 20
    packed, flag = compress(text, "zlib")
    folder = archive(
        tmp_path,
        record("a", b"\xff\x00"),
        record("b", packed, sys_flag=flag),
        record("c", b"junk", sys_flag=flag),
    )
    one, two, three = read_archive(folder, None, None)
    assert (one.body, one.problem) == (b"\xff\x00", None)
    assert (two.body, two.problem) == (text, None)
    assert three.body == b"junk" and "does not decompress" in three.problem


def test_a_batch_in_one_record_is_not_sent_as_one_message(tmp_path):
    """As RocketMQ 5 makes them; a node refuses such a record, and its body alone is no message."""
    with opened(tmp_path / "archive") as store:
        for base, count in ((0, 5), (5, 3)):
            store.append_replica(store.max_offset, inner_batch(base, count, store.max_offset))
    found = [*read_archive(str(tmp_path / "archive"), None, None)]
    assert len(found) == 2 and all("a batch of RocketMQ's" in one.problem for one in found)


def resend(group, *arguments):
    done = hastore("rescued", "resend", "-c", group.file(1), *arguments)
    return done.returncode, done.stdout.splitlines(), done.stderr


def consumed(group, topic):
    done = hastore("consume", topic, "--bootstrap", group.api(), "--json")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_cut_is_sent_again_once(pair):
    """Its messages were acknowledged with acks=1, by a master that had lost its slave."""
    group = pair
    cut_three(group)
    group.wait(2, lambda s: s["takes_default"])
    code, lines, problems = resend(group, "--cut", "1")
    assert (code, lines) == (0, ["lacking: 3 messages"]), problems
    assert "with --yes" in problems
    topic = json.loads(resend(group, "--all", "--json")[1][0])["topic"]
    assert [one["body"] for one in consumed(group, topic)] == ["on both"]
    code, lines, problems = resend(group, "--cut", "1", "--yes")
    assert (code, lines) == (0, ["sent: 3 messages"]), problems
    code, lines, problems = resend(group, "--all", "--yes")
    assert (code, lines) == (0, ["in the log: 3 messages"]), problems
    found = consumed(group, topic)
    assert sorted(one["body"] for one in found) == ["lost 1", "lost 2", "lost 3", "on both"]
    code, _, problems = resend(group, "--cut", "2")
    assert code == 1 and "has no cut 2" in problems
    group.stop(1, 2)
    code, _, problems = resend(group, "--cut", "1", "--timeout", "0.2")
    assert code == 1 and problems.count("\n") == 1


def test_what_a_producer_has_sent_again_is_known_by_producer_and_number(pair, tmp_path):
    folder = archive(
        tmp_path,
        *(message(number, producer="p") for number in range(5)),
        record("TopicA", b"by RocketMQ", ("UNIQ_KEY", "U1")),
        record("TopicA", b"by another", ("UNIQ_KEY", "U2")),
    )
    kept = [message(number, producer="p", size=120) for number in (1, 3)]
    kept.append(record("TopicA", b"by RocketMQ", ("UNIQ_KEY", "U1")))
    pair[1].backend.put_encoded(kept)
    pair.wait(1, lambda s: s["confirmed_offset"] == s["max_offset"])
    code, lines, problems = resend(pair, "--folder", folder, "--json")
    assert code == 0, problems
    outcomes = {one["name"]: one["outcome"] for one in map(json.loads, lines)}
    assert outcomes == {
        "p/0": "lacking", "p/1": "in the log", "p/2": "lacking", "p/3": "in the log",
        "p/4": "lacking", "id U1": "in the log", "id U2": "lacking",
    }  # fmt: skip
    code, lines, problems = resend(pair, "--folder", folder, "--folder", folder, "--yes")
    assert (code, lines) == (0, ["in the log: 10 messages", "sent: 4 messages"]), problems
    found = {one["properties"].get(RESCUED_FROM): one["key"] for one in consumed(pair, "TopicA")}
    assert found == {None: found[None], "p/0": "key0", "p/2": "key2", "p/4": "key4", "id U2": None}


def test_a_message_is_known_by_its_name_in_its_own_topic_only(pair, tmp_path):
    """A consumer may pass a message on with its properties; a retry has the id of its message."""
    given = "UNIQ_KEY", "U1"
    first = record("TopicA", b"first", given)
    folder = archive(tmp_path, first, record("TopicB", b"passed on", given))
    pair[1].backend.put_encoded([first, record("TopicB", b"other")])
    pair.wait(1, lambda s: s["confirmed_offset"] == s["max_offset"])
    outcomes = [json.loads(one) for one in resend(pair, "--folder", folder, "--json")[1]]
    assert {one["topic"]: one["outcome"] for one in outcomes} == {
        "TopicA": "in the log", "TopicB": "lacking",
    }  # fmt: skip
    code, lines, problems = resend(pair, "--folder", folder, "--yes")
    assert (code, lines) == (0, ["in the log: 1 message", "sent: 1 message"]), problems
    assert [one["body"] for one in consumed(pair, "TopicB")].count("passed on") == 1
    code, lines, problems = resend(pair, "--folder", folder, "--yes")
    assert (code, lines) == (0, ["in the log: 2 messages"]), problems


def test_what_lies_behind_damage_is_sent_and_the_damage_is_told(pair, tmp_path):
    """Else these messages would be forgotten with the cut: the command said that all was sent."""
    records = [
        record("TopicD", b"%d" % number * 99, ("UNIQ_KEY", f"D{number}")) for number in range(6)
    ]
    folder = archive(tmp_path, *records)
    (file,) = (tmp_path / "archive" / "commitlog").iterdir()
    size = len(records[0])
    raw = bytearray(file.read_bytes())
    raw[size + 4 : size + 8] = b"junk"  # the header of the second one
    raw[3 * size + 120] ^= 1  # in the body of the fourth one
    file.write_bytes(raw)
    code, lines, problems = resend(pair, "--folder", folder)
    assert (code, lines) == (1, ["lacking: 4 messages"]), problems
    for number in (1, 3):
        assert f"bytes [{number * size}, {(number + 1) * size}) of {folder} are damaged" in problems
    code, lines, problems = resend(pair, "--folder", folder, "--yes")
    assert (code, lines) == (1, ["sent: 4 messages"]) and "dismiss" not in problems
    assert sorted(one["body"][0] for one in consumed(pair, "TopicD")) == ["0", "2", "4", "5"]


def test_what_a_tail_in_rescued_lacks_is_told(tmp_path):
    """Also at its begin and at its end, as the cut says it."""
    records = [record("TopicD", b"%d" % number * 99) for number in range(4)]
    folder = tmp_path / "65537-0"
    size = len(records[0])
    (whole,) = pathlib.Path(archive(tmp_path, *records), "commitlog").iterdir()
    folder.mkdir()
    raw = bytearray(whole.read_bytes()[: 4 * size])
    for number in (0, 3):
        raw[number * size + 120] ^= 1
    (folder / whole.name).write_bytes(raw)
    gaps = []
    found = [*read_archive(str(folder), 0, 4 * size, lambda *gap: gaps.append(gap))]
    assert [one.offset for one in found] == [size, 2 * size]
    assert gaps == [(0, size), (3 * size, 4 * size)]
    gaps.clear()  # without the places of a cut, as with --folder
    found = [*read_archive(str(folder), None, None, lambda *gap: gaps.append(gap))]
    assert [one.offset for one in found] == [size, 2 * size]
    assert gaps == [(0, size)]


def test_a_tail_that_begins_with_a_blank_lacks_nothing(tmp_path):
    """The cut lay before the end of a log file; the blank was told as damage."""
    rows = [row for row in inspect.dump(str(STORE)) if row["offset"] < 100_000]
    at = next(number for number, row in enumerate(rows) if "blank" in row)
    cut, end = rows[at]["offset"], rows[-1]["offset"] + rows[-1]["size"]
    folder = tmp_path / f"65537-{cut}"
    folder.mkdir()
    for start in (0, 65536):
        raw = (STORE / "commitlog" / f"{start:020}").read_bytes()
        gap = max(0, cut - start)
        (folder / f"{start:020}").write_bytes(bytes(gap) + raw[gap:])
    gaps = []
    found = [*read_archive(str(folder), cut, end, lambda *gap: gaps.append(gap))]
    assert ([one.offset for one in found], gaps) == ([row["offset"] for row in rows[at + 1 :]], [])


def test_a_tail_of_mode_dledger_begins_with_its_leaders_empty_entry(tmp_path):
    """Which has no record, and is no damage."""
    with opened_entries(tmp_path / "s") as store:
        put_entries(store, 1, *(message(number) for number in range(10)))
        start = store.end_position(9)
        no_op(store, 2)
        put_entries(store, 2, *(message(number) for number in range(10, 15)))
        end = store.messages.max_offset
        store.flush()
        store.truncate(10)
    (folder,) = (tmp_path / "s" / "rescued").iterdir()
    gaps = []
    found = [*read_archive(str(folder), start, end, lambda *gap: gaps.append(gap))]
    assert (len(found), gaps) == (5, [])


def test_what_cannot_be_sent_is_named(pair, tmp_path):
    _, flag = compress(b"x" * 1_000, "zlib")
    waits = record("t", b"later", ("DELAY", "3"))
    folder = archive(tmp_path, record("c", b"junk", sys_flag=flag), waits)
    code, lines, _ = resend(pair, "--folder", folder, "--yes")
    assert code == 0 and len(lines) == 2
    assert "left out: 1 message: it waits for its delay" in "\n".join(lines)
    assert any("does not decompress" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [((), 2), (("--cut", "1", "--all"), 2), (("--folder", "nosuch"), 2), (("--cut", "1"), 1),
     (("--all",), 0)],
)  # fmt: skip
def test_wrong_usage_and_no_cut(pair, arguments, code):
    found, lines, problems = resend(pair, *arguments)
    assert found == code and lines == [] and problems.count("\n") == 1


def test_a_folder_that_is_no_archive(pair, tmp_path):
    (tmp_path / "empty").mkdir()
    assert resend(pair, "--folder", str(tmp_path / "empty"))[0] == 3


def test_an_archive_that_another_user_may_not_see_is_not_called_removed(tmp_path):
    folder = tmp_path / "rescued" / "65537-0"
    assert is_removed(str(folder))
    folder.mkdir(parents=True)
    folder.parent.chmod(0)
    try:
        with as_another_user():
            assert not is_removed(str(folder))
    finally:
        folder.parent.chmod(0o700)


def test_no_store_is_not_one_of_which_nothing_was_cut(tmp_path, monkeypatch):
    """In another folder than that of the node's start, a relative store.root leads nowhere."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("node.yaml").write_text(
        "cluster: c\ngroup: g\nnode: 1\nrole: ASYNC_MASTER\nstore: {root: data/node1}\n"
        "nodes: {1: {api: 'tcp://127.0.0.1:1', ha: '127.0.0.1:2', http: '127.0.0.1:3'}}\n"
    )
    for command in (("list",), ("dismiss", "--all"), ("resend", "--all")):
        done = hastore("rescued", *command, "-c", "node.yaml")
        assert (done.returncode, done.stdout) == (2, ""), command
        assert "data/node1 is no store of a node that has run; give the node's file" in done.stderr
