"""Each answer to a read is that of a RocketMQ 5.3.3 broker: the same frames are sent to both."""

import contextlib

import pytest

from hastore.protocol.remoting import ROCKETMQ, Answer, Code
from hastore.record.codec import decode_record
from hastore.record.hashes import java_hash_code
from tests.interop.rocketmq import Peer
from tests.interop.rocketmq_clients import HastoreSite, RocketSite
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, Ports
from tests.server.remoting.kit import RemotingClient
from tests.server.remoting.test_groups import java, subscribed

pytestmark = pytest.mark.full
TOPIC, GROUP = "Reads", "readers"
UNLIKE = "unlike"
NUMBERS = ("nextBeginOffset", "minOffset", "maxOffset", "topicSysFlag", "groupSysFlag")


def send(client, queue, body, **properties):
    """Send a message, and return its message id's offset in the log."""
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    fields = {
        "a": "writers", "b": TOPIC, "c": "TBW102", "d": "4", "e": str(queue), "f": "0",
        "g": "1700000000000", "h": "0", "i": text, "j": "0", "k": "false", "m": "false",
    }  # fmt: skip
    sent = client.ask(Code.SEND_MESSAGE_V2, fields, body.encode())
    assert sent.code == 0, sent
    return int(sent.fields["msgId"][-16:], 16)


def records_in(body):
    found, at = [], 0
    while at < len(body):
        found.append(decode_record(body, at))
        at += found[-1].size
    return found


def told(frame, *names):
    """Return what must be the same: code, remark, numbers, and what the records say."""
    remark = frame.remark
    if remark and "consumer:[" in remark:  # RocketMQ adds the client's address
        remark = remark[: remark.index(" consumer:[")]
    remark = remark and remark.split(" See https://")[0].split("\nSee")[0].strip()
    if frame.code == 23:  # hastore says what is wrong
        remark = None
    numbers = {name: frame.fields.get(name) for name in names}
    records = [(record.queue_offset, record.body) for record in records_in(frame.body)]
    return frame.code, remark or None, numbers, records


def pull(client, at, code=Code.PULL_MESSAGE, **more):
    fields = {
        "consumerGroup": GROUP, "topic": TOPIC, "queueId": 0, "queueOffset": at, "maxMsgNums": 32,
        "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 1_000, "subscription": "*",
        "subVersion": 1, "expressionType": "TAG", **more,
    }  # fmt: skip
    kind = fields.pop("kind", 0)
    given = {name: str(value) for name, value in fields.items() if value is not None}
    return client.ask(code, given, kind=kind)


def pulls(client):
    """Pulls of each place of queue 0, which has six messages, and of queues without any."""
    cases = {
        "all": pull(client, 0),
        "binary": pull(client, 0, kind=ROCKETMQ),
        "lite": pull(client, 2, code=Code.LITE_PULL_MESSAGE),
        "from 3": pull(client, 3),
        "two": pull(client, 1, maxMsgNums=2),
        "end": pull(client, 6),
        "beyond": pull(client, 7),
        "far beyond": pull(client, 1 << 40),
        "below": pull(client, -1),
        "no record": pull(client, 0, queueId=3),
        "no record, offset": pull(client, 5, queueId=3),
        "waits in vain": pull(client, 6, sysFlag=6),
        "no such queue": pull(client, 0, queueId=4),
        "negative queue": pull(client, 0, queueId=-1),
        "no such topic": pull(client, 0, topic="Nobody"),
        "red": pull(client, 0, subscription="red"),
        "spaces": pull(client, 0, subscription=" red  ||  blue "),
        "empty": pull(client, 0, subscription=""),
        "nobody's": pull(client, 0, subscription="green"),
        "nobody's, later": pull(client, 4, subscription="green", sysFlag=6),
        "nobody's, at the end": pull(client, 6, subscription="green", sysFlag=6),
        "bars": pull(client, 0, subscription="||"),
        "bar": pull(client, 0, subscription="|"),
        "blank": pull(client, 0, subscription=" "),
        "sql": pull(client, 0, expressionType="SQL92", subscription="TAGS = 'red'"),
        "sql, none": pull(client, 0, expressionType="SQL92", subscription="a > 1"),
        "sql, end": pull(client, 6, expressionType="SQL92", subscription="a > 1"),
        "sql, two": pull(
            client,
            1,
            maxMsgNums=2,
            expressionType="SQL92",
            subscription="TAGS IS NULL OR KEYS STARTSWITH 'k4' AND UNIQ_KEY NOT IN ('UNIQUE3')",
        ),
        "broken bars": pull(client, 1, subscription="red||"),
    }
    return {name: told(frame, *NUMBERS) for name, frame in cases.items()}


def offsets(client, times):
    """Offsets of queues, also by time."""

    def ask(code, *names, queue=0, **more):
        fields = {"topic": TOPIC, "queueId": str(queue), **more}
        return told(client.ask(code, fields), *names)

    found = {
        (code.name, queue): ask(code, "offset", "timestamp", queue=queue)
        for code in (Code.GET_MAX_OFFSET, Code.GET_MIN_OFFSET)
        for queue in (0, 3, 9)
    }
    empty = ask(Code.GET_EARLIEST_MSG_STORETIME, "timestamp", queue=3)
    first = ask(Code.GET_EARLIEST_MSG_STORETIME, "timestamp")
    found["earliest"] = empty, first[0], first[2]["timestamp"] == str(times[0])
    asked = [("0", "0"), ("late", times[-1] + 50), ("latest", (1 << 63) - 1)]
    asked += [(f"at {n}{more:+}", at + more) for n, at in enumerate(times) for more in (-1, 0, 1)]
    for boundary in ({}, {"boundaryType": "LOWER"}, {"boundaryType": "UPPER"}):
        for name, at in asked:
            answer = ask(Code.SEARCH_OFFSET_BY_TIMESTAMP, "offset", timestamp=str(at), **boundary)
            found["time", name, boundary.get("boundaryType")] = answer
    nowhere = ask(Code.SEARCH_OFFSET_BY_TIMESTAMP, "offset", queue=3, timestamp="5")
    found["time without queue"] = nowhere
    return found


def messages(client, places):
    """Messages by key, by unique key, and by id."""

    def query(key, **more):
        fields = {
            "topic": TOPIC, "key": key, "maxNum": "64", "beginTimestamp": "0",
            "endTimestamp": str((1 << 63) - 1), **more,
        }  # fmt: skip
        return told(client.ask(Code.QUERY_MESSAGE, fields))

    def view(offset):
        code, remark, _, found = told(
            client.ask(Code.VIEW_MESSAGE_BY_ID, {"offset": str(offset), "topic": TOPIC})
        )
        return code, remark if offset not in places else None, found

    return {
        "key": query("k1"),
        "many": query("every"),
        "two": query("every", maxNum="2"),
        "unique": query("UNIQUE3", _UNIQUE_KEY_QUERY="true", maxNum="1"),
        "none": query("k77"),
        "other topic": query("k1", topic="Nobody"),
        "early": query("k1", endTimestamp="5"),
        "views": [view(place) for place in places],
        "not there": view(1 << 40),
    }


def members(site):
    """Pulls of two members of a group that want different messages, without their subscription."""
    with contextlib.ExitStack() as ends:
        one, two = (
            ends.enter_context(contextlib.closing(RemotingClient(f"tcp://{site.master}")))
            for _ in range(2)
        )

        def beat(client, expression, version, topic=TOPIC):
            wanted = subscribed(topic, expression, version)
            if expression != "*":  # RocketMQ takes the hashes from the client
                wanted |= {"codeSet": [java_hash_code(expression)], "tagsSet": [expression]}
            body = java(f"of {client is one}", (UNLIKE,), wanted)
            assert client.ask(Code.HEART_BEAT, {}, body).code == 0

        def read(client, version):
            answer = pull(
                client, 0, consumerGroup=UNLIKE, sysFlag=0, subscription=None, subVersion=version
            )
            return answer.code, [record.body for record in records_in(answer.body)]

        found = {}
        beat(one, "red", 1)
        found["one member"] = read(one, 1)
        beat(two, "blue", 2)
        found["the later one"] = read(one, 1), read(two, 2)
        beat(one, "red", 1)
        found["no later for being said again"] = read(one, 1), read(two, 2)
        beat(one, "red", 3)
        found["later again"] = read(one, 3), read(two, 2)
        beat(two, "*", 4, "Elsewhere")
        return found, read(one, 3)


def scene(site):
    """Return everything that the place answers."""
    client = RemotingClient(f"tcp://{site.master}")
    try:
        places = []
        for n, tag in enumerate(("red", "blue", None, "red", "red", "blue")):
            own = {"KEYS": f"k{n} every", "UNIQ_KEY": f"UNIQUE{n}"}
            places.append(send(client, 0, f"m{n}", **own, **({"TAGS": tag} if tag else {})))
            while len(records_in(pull(client, n).body)) != 1:  # it is in the queue
                continue
            now = records_in(pull(client, n).body)[0].store_timestamp_ms
            while send_time(client) <= now + 3:  # the times around each message are nobody else's
                continue
        times = [record.store_timestamp_ms for record in records_in(pull(client, 0).body)]
        index_of(client)
        while pull(client, 7).code == 20:  # hastore moves no offset before all is in the queues
            continue
        seen = {**pulls(client), **messages(client, places)}
        seen["members"], seen[UNLIKE] = members(site)
        return {**seen, **offsets(client, times)}
    finally:
        client.close()


def send_time(client):
    """Send to queue 1, and return when that message was stored."""
    send(client, 1, "clock", UNIQ_KEY="CLOCK")
    end = int(client.ask(Code.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": "1"}).fields["offset"])
    found = records_in(pull(client, max(0, end - 1), queueId=1).body)
    return found[-1].store_timestamp_ms if found else 0


def index_of(client):
    """Wait until the last message is in the index."""
    fields = {
        "topic": TOPIC, "key": "k5", "maxNum": "1", "beginTimestamp": "0",
        "endTimestamp": str((1 << 63) - 1),
    }  # fmt: skip
    while client.ask(Code.QUERY_MESSAGE, fields).code:
        continue


@pytest.fixture(scope="module")
def expected(rocketmq_5, tmp_path_factory):
    """What RocketMQ answers."""
    folder = tmp_path_factory.mktemp("rocketmq")
    with contextlib.ExitStack() as ends:
        ports = ends.enter_context(contextlib.closing(Ports()))
        peer = Peer(rocketmq_5, folder, "rocketmq")
        ends.callback(peer.kill)
        return scene(RocketSite(peer, ports, folder / "store"))


@pytest.mark.slow("RocketMQ's broker looks for ended waits every 5 s")
@pytest.mark.parametrize("kind", [Group, DLedgerGroup], ids=["pair", "dledger"])
def test_reads_are_answered_as_by_rocketmq(expected, tmp_path, kind):
    (tmp_path / "hastore").mkdir()
    with kind(tmp_path / "hastore") as group:
        seen = scene(HastoreSite(group.start(), "hastore"))
    # Who wants other topics does not take a topic away from the others of its group.
    assert expected[UNLIKE][0] == Answer.SUBSCRIPTION_NOT_EXIST
    assert seen[UNLIKE] == (0, [b"m0", b"m3", b"m4"])
    other = [name for name in expected if seen[name] != expected[name] and name != UNLIKE]
    for name in other:
        print(f"{name}:\n  RocketMQ {expected[name]}\n  hastore  {seen[name]}")
    assert not other
