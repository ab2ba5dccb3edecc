"""Requests of every code with fields and bodies that are missing, wrong, lying or huge.

Each has one clear answer, whatever it says, and no handler fails by it. HASTORE_SEED repeats the
choices of a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import re
from collections import Counter

import pytest

from hastore.protocol.remoting import Answer, Code, Frame
from hastore.server.remoting.door import MAX_REMARK
from tests.process.harness import Group
from tests.server.remoting.kit import RemotingClient
from tests.server.remoting.test_groups import java
from tests.server.remoting.test_request_codes import rows_of_the_page

pytestmark = pytest.mark.full
SEED = int(os.environ.get("HASTORE_SEED", "0")) or random.SystemRandom().getrandbits(32)
HANDLERS = pathlib.Path(__file__).resolve().parents[2] / "hastore" / "server" / "remoting"
ROUNDS = 60  # of each code
# What a client would say; every other field that a handler asks for gets a number.
RIGHT = {
    **dict.fromkeys(("topic", "b", "originTopic"), "T"),
    **dict.fromkeys(("consumerGroup", "group", "producerGroup", "a"), "G"),
    **dict.fromkeys(("clientID", "clientId", "clientAddr"), "c1"),
    **dict.fromkeys(("defaultTopic", "c"), "TBW102"),
    **dict.fromkeys(("properties", "i"), "TAGS\x01a\x02"),
    **dict.fromkeys(("batch", "m", "k", "unitMode", "isForce", "order"), "false"),
    **{"expressionType": "TAG", "subscription": "a", "key": "k", "boundaryType": "LOWER"},
    **{"topicFilterType": "SINGLE_TAG", "cluster": "c", "brokerName": "g", "attributes": "+a=b"},
    **{"msgId": "7F00000100002A9F0000000000000000", "commitOffset": "0", "sysFlag": "0"},
}
WRONG = (
    *(None, "", " ", "-1", "x", "1.5", "true", "0x10", "\0", "%", "null", "[]"),
    *("9" * 30, "-" + "9" * 30, str(2**31), str(2**63 - 1), str(-(2**63)), "1e9"),
    *("ü" * 300, "\U0001f680", "x" * 40_000, "\x01\x02" * 500, "HASTORE_TOPICS", "%DLQ%"),
)
BODIES = (
    *(b"", b"x", b"\xff" * 100, b"{", b"[]", b"{}", b"null", b'"text"', b"7"),
    *(b"[" * 50_000, b'{"a":' * 20_000, b'{"clientID":null}', b'{"consumerGroup":7}'),
    *(b"\0\0\0\x05hello", b"\xff\xff\xff\xff" * 8, b"\x7f\xff\xff\xff", bytes(100_000)),
    *(java(), json.dumps({"consumerGroup": "G", "clientId": "c1", "mqSet": [{}]}).encode()),
    json.dumps({"topicConfigList": [{"topicName": 7}], "groupName": ["G"]}).encode(),
    b'{"topicConfigList":[{"topicName":"\xff"}],"groupName":"\xff","groupConfigList":["\xff"]}',
)


def names() -> list[str]:
    """Return the names of all fields that the handlers ask for."""
    found = set(RIGHT)
    for path in HANDLERS.glob("*.py"):
        found.update(re.findall(r'fields(?:\.get\(|, |\[)"(\w+)"', path.read_text()))
        found.update(re.findall(r'needed\([\w.]+, "(\w+)"\)', path.read_text()))
    assert {"queueOffset", "maxMsgNums", "queueId", "timestamp", "readQueueNums"} <= found
    return sorted(found | set("abcdefghijklmn"))


def wrong(chance: random.Random, fields: list[str]) -> dict[str, str]:
    """Return right fields, of which some are wrong, or all of which are the same nonsense."""
    if chance.random() < 0.1:
        value = chance.choice([one for one in WRONG if one is None or len(one) <= 100])
        return {} if value is None else dict.fromkeys(fields, value)
    given = {name: RIGHT.get(name, "0") for name in fields}
    for name in chance.sample(fields, chance.choice((1, 1, 1, 2, 5))):
        value = chance.choice(WRONG)
        if value is None:
            del given[name]
        else:
            given[name] = value
    return given


class Client(RemotingClient):
    """A client that has many requests under way, and answers no question of the node."""

    def answers(self, opaques: set[int]) -> dict[int, Frame]:
        """Return the answer to each of these requests; none of them has two."""
        found: dict[int, Frame] = {}
        while len(found) < len(opaques):
            frame = self.next()
            if frame.is_answer:
                assert frame.opaque in opaques and frame.opaque not in found, frame
                found[frame.opaque] = frame
        return found


def test_every_request_with_wrong_fields_has_one_clear_answer(tmp_path: pathlib.Path) -> None:
    chance, fields = random.Random(SEED), names()
    told: Counter[int] = Counter()
    with Group(tmp_path) as group:
        for node in group.start():  # the master, and a slave that forwards to it
            with contextlib.closing(Client(node.api)) as client:
                for row in rows_of_the_page():
                    if row.answer in ("served", "forwarded"):
                        told.update(ask(client, row.code, fields, chance))
                assert client.ask(Code.GET_BROKER_CLUSTER_INFO).code == 0
        for node in group:
            said = node.last_lines(40)
            assert "because of a bug" not in node.log, f"HASTORE_SEED={SEED}: {said}"
    print(f"HASTORE_SEED={SEED}: answers by code {dict(sorted(told.items()))}")
    assert told[Answer.SUCCESS] and len(told) > 8, told


def ask(client: Client, code: int, fields: list[str], chance: random.Random) -> list[int]:
    """Send many requests of a code; return the codes of their answers."""
    sent = {}
    for _ in range(ROUNDS):
        given, body = wrong(chance, fields), chance.choice(BODIES)
        sent[client.send(code, given, body)] = given, body
    found = client.answers(set(sent))
    for opaque, (given, body) in sent.items():
        answer = found[opaque]
        what = f"HASTORE_SEED={SEED}: {Code(code).name} {given!r:.2000} {body[:200]!r}"
        assert "does not support request code" not in str(answer.remark), what
        assert len(answer.remark or "") <= MAX_REMARK, f"{what}: {answer.remark}"
        assert answer.code == 0 or answer.remark, what
    return [answer.code for answer in found.values()]
