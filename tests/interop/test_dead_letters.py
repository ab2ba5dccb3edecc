"""Messages that a Java consumer gives up while the master is killed: each ends in %DLQ%.

The consumer refuses every message, and each of them may be tried twice. What the nodes do not take
back, the client sends as a copy of its own.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections import Counter

import pytest

from tests.interop.build import CLIENTS_4, CLIENTS_5, command
from tests.interop.rocketmq_clients import LIMIT_S, Clients, Found, HastoreSite
from tests.interop.rocketmq_scenes import bodies, on, ready
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until

pytestmark = pytest.mark.full
COUNT = 120  # messages
BEFORE, DEAD_BEFORE = 60, 10  # sent, and given up, when the master is killed


def killed(group: Group | DLedgerGroup, site: HastoreSite) -> None:
    """Kill the master, and wait until another node takes puts; start it again."""
    master = site.writable()
    master.kill()
    if isinstance(group, Group):
        master.edit_role("SLAVE")
        heir = next(node for node in group if node is not master)
        heir.edit_role("SYNC_MASTER")
    site.writable(besides=master.number)
    master.start()


@pytest.mark.slow("each message is tried again after a second, and clients look for the new master")
@pytest.mark.parametrize(
    ("kind", "program"),
    [(Group, CLIENTS_5), (DLedgerGroup, CLIENTS_5), (Group, CLIENTS_4)],
    ids=["classic", "dledger", "classic, 4.9.8"],
)
def test_each_message_that_is_given_up_is_a_dead_letter_over_a_kill(
    tmp_path: pathlib.Path, kind: type[Group | DLedgerGroup], program: tuple[str, pathlib.Path]
) -> None:
    with contextlib.ExitStack() as ends:
        (tmp_path / "nodes").mkdir()
        group = ends.enter_context(kind(tmp_path / "nodes", 3))
        site = HastoreSite(group.start(), "three")
        jvm = Clients(command(program), tmp_path, "clients")
        ends.callback(jvm.kill)
        topic, dead = "GivenUp", "%DLQ%careless"
        producer = jvm.producer(site)
        ready(jvm, producer, topic)
        jvm.push(site, "careless", topic, refuse=9, delay_level=1, max_reconsume=1)
        for number in range(BEFORE):
            send(jvm, producer, topic, number)

        def letters() -> list[Found]:
            puller = jvm.puller(site, "reader")  # a new one knows the new master at once
            try:
                return jvm.all_of(puller, dead)
            except AssertionError:  # the topic comes with its first message
                return []
            finally:
                jvm.call("pull.stop", name=puller)

        wait_until(lambda: len(letters()) >= DEAD_BEFORE, LIMIT_S, "no dead letters")
        killed(group, site)
        for number in range(BEFORE, COUNT):
            send(jvm, producer, topic, number)
        wanted = {"first", *(f"m{number}" for number in range(COUNT))}
        wait_until(
            lambda: wanted <= set(bodies(letters())), LIMIT_S,
            lambda: f"missing: {sorted(wanted - set(bodies(letters())))}",
        )  # fmt: skip
        found = letters()
        again = sum(count > 1 for count in Counter(bodies(found)).values())
        print(f"{len(wanted)} messages, {again} of them more than once among the dead letters")
        for node in group:
            node.wait_ready()
        for body in ("m0", f"m{BEFORE - 1}", f"m{COUNT - 1}"):
            one = next(each for each in found if each["body"] == body)
            said = jvm.mqadmin(site, "queryMsgByKey", "-t", dead, "-k", f"key-{body}")
            assert one["msgId"] in said, said
            said = jvm.mqadmin(site, "queryMsgByUniqueKey", "-t", dead, "-i", one["msgId"])
            assert re.search(rf"Topic: +{re.escape(dead)}", said), said
        said = jvm.mqadmin(site, "topicStatus", "-t", dead)
        assert re.search(rf"^g0 +0 +0 +{len(found)} ", said, re.MULTILINE), said


def send(jvm: Clients, producer: str, topic: str, number: int) -> None:
    """Send a message until it is acknowledged, as an application does."""
    message = {"topic": topic, "body": f"m{number}", "keys": f"key-m{number}"}

    def sent() -> bool:
        (result,) = jvm.send(producer, [message], "queue", **on(("g0", number % 4), topic))
        return result.get("status") == "SEND_OK" or sent_by_twin()

    def sent_by_twin() -> bool:
        (result,) = jvm.send(producer, [message])
        return result.get("status") == "SEND_OK"

    wait_until(sent, LIMIT_S, f"{message['body']} is not sent")
