"""Java's and Python's producers in one group: each decides the half messages of the other."""

import pytest

import hastore as clients
from hastore import Decision
from tests.interop.build import CLIENTS_4, CLIENTS_5, command
from tests.interop.rocketmq_clients import Clients
from tests.interop.test_rocketmq_sends import a_group
from tests.process.harness import wait_until

pytestmark = pytest.mark.full
FAST = {
    "transaction_timeout": "1s",
    "transaction_check_interval": "1s",
    "transaction_check_max": 60,
}


@pytest.fixture(scope="module", params=["pair", "dledger"])
def hastore(request, tmp_path_factory):
    with a_group(request.param, tmp_path_factory.mktemp(request.param), **FAST) as found:
        yield found


def polled(consumer, count):
    got = []
    while len(got) < count:
        more = consumer.poll(timeout_s=60)
        assert more, f"{len(got)} of {count}"
        got += more
    return sorted(one.body.decode() for one in got)


@pytest.mark.slow("producers are asked")
@pytest.mark.parametrize("version", ["5.3.3", "4.9.8"])
def test_each_decides_the_half_messages_of_the_other(hastore, version, tmp_path):
    site, _ = hastore
    jvm = Clients(command(CLIENTS_5 if version == "5.3.3" else CLIENTS_4), tmp_path, "clients")
    topic = f"Both_{version.replace('.', '_')}_{hastore[0].name}"
    group = f"g-{topic}"
    try:
        producer = jvm.producer(site, group=group, transactions=True)
        java = jvm.push(site, f"c-{topic}", topic)
        first = {"topic": topic, "body": "first"}  # the producer connects
        jvm.send(producer, [first], "transaction", state="COMMIT_MESSAGE")
        with clients.Producer(site.master, transaction_group=group) as python:
            for number in range(6):
                how = ("COMMIT_MESSAGE", "ROLLBACK_MESSAGE")[number % 2]
                body = f"python-{number}".encode()
                python.transaction(topic, body, properties={"whenChecked": how}).leave_open()
        by_java = ["first", *(f"python-{number}" for number in (0, 2, 4))]
        with clients.Consumer(topic, site.master) as reader:
            assert polled(reader, 4) == sorted(by_java)
            asked = set()

            def check(message):
                asked.add(message.body.decode())
                # Python's own that Java rolls back may be asked for once more, and have no way.
                commits = message.properties.get("way") == "commit"
                return Decision.COMMIT if commits else Decision.ROLLBACK

            for number in range(6):
                way = ("commit", "roll back")[number % 2]
                message = {"topic": topic, "body": f"java-{number}", "properties": {"way": way}}
                jvm.send(producer, [message], "transaction", state="UNKNOW")
            with clients.Producer(site.master, transaction_group=group, check=check):
                by_python = [f"java-{number}" for number in (0, 2, 4)]
                assert polled(reader, 3) == by_python
                wait_until(
                    lambda: {f"java-{number}" for number in range(6)} <= asked,
                    60, lambda: f"only these are asked for: {sorted(asked)}",
                )  # fmt: skip
            assert reader.poll(timeout_s=2) == []
        received = jvm.received(java, 7)
        assert sorted(one["body"] for one in received) == sorted(by_java + by_python)
    finally:
        jvm.kill()
