"""The attacks: what each does to real nodes, what is measured meanwhile, and its target.

    key queries, cold readers, parked pulls, idle connections, many keys   clients
    tls handshakes, hellos, wrong tokens                                   strangers at the ports
    planted links, man in the middle, strange objects                      strangers elsewhere
    full disk

A slow disk is a delay of each read of the commit log beyond the page cache, in the node's process
(`read_ms` of tests/process/faulty_node.py); a full one refuses all growth there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec

from hastore import Producer, Security
from hastore.clock import SYSTEM_CLOCK
from hastore.demo.zookeeper import debian_jars, pyspark_jars
from hastore.errors import HastoreError
from hastore.security.tls_engine import NodeName
from tests.attack.kit import (
    LONGEST_S,
    PUTS,
    QUEUES,
    Putter,
    Row,
    Run,
    command,
    p50,
    put_row,
    settled,
)
from tests.process import faulty_node
from tests.process.faulty_node import Faults
from tests.process.harness import Group, Node, wait_until
from tests.process.stores import read_log
from tests.security.conftest import IdentitiesText
from tests.security.pki import Pki

STRANGER = "127.0.0.66"  # another host than those in `nodes`
GIVE_UP_S = 20.0  # a link or a newcomer that needs longer is counted with this time
KEPT_S, QUICK_MS = 10.0, 1_000.0
AGE_S = 3
IDLE_S = 6.0


def key_queries(run: Run) -> list[Row]:
    """One client asks again and again for a key of very many messages, and for times."""
    node = run.node()
    run.fill(node, "keyed", 1, b"x", "hot")
    oldest_ms = int(time.time() * 1000) + 1
    count = 1_000 + run.fill(node, "keyed", 400_000, b"x", "hot")
    putter = Putter(run, run.producer(node, acks=1))
    sides = run.compare(
        putter.latencies,
        lambda: run.strangers(
            "queries", address=node.api, topic="keyed", key="hot", end_ms=oldest_ms
        ),
        putter.settle,
    )
    putter.check(node)
    asked = run.counts["Found"] + run.counts["TimeFound"] + run.counts["Failed"]
    more = f"{count:,} messages with the key; {asked} queries, the slowest {run.worst_ms:,.0f} ms"
    return [put_row(run, "key-queries", sides, 3, more)]


def cold_readers(run: Run) -> list[Row]:
    """200 clients read old messages from a disk that takes 8 ms for each read."""
    group = run.group(1)
    control = run.folder / "faults"
    faults = Faults(control)
    node = group[1]
    node.launcher = [faulty_node.__file__, str(control)]
    node.start("master").wait_writable()
    count = run.fill(node, "cold", 8_000, bytes(4_096))
    node.stop()
    node.start("master").wait_writable()  # what was written before a start counts as cold
    settled(node)
    faults["read_ms"] = 8
    putter = Putter(run, run.producer(node, acks=1))
    sides = run.compare(
        putter.latencies,
        lambda: run.strangers(
            "cold_readers", address=node.api, topic="cold", readers=200, queues=QUEUES,
            messages=count // QUEUES,
        ),
        putter.settle,
    )  # fmt: skip
    delayed = faults["slow_reads"]
    faults.heal()
    putter.check(node)
    more = f"{run.counts['Pulled']} pulls, {delayed} slow reads, the slowest pull "
    more += f"{run.worst_ms:,.0f} ms"
    if run.counts["not let in"]:
        more += f", {run.counts['not let in']} refused"
    return [put_row(run, "cold-readers", sides, 3, more)]


def parked_pulls(run: Run) -> list[Row]:
    """10,000 pulls wait for messages of other queues."""
    node = run.node(store={"default_queues": 16})
    with Producer([node.api], acks=1) as producer:
        for queue in range(16):
            producer.send_sync("quiet", b"x", queue=queue)
    putter = Putter(run, run.producer(node, acks=1))
    parking = {"address": node.api, "topic": "quiet", "queues": 16, "end": 1}

    def measure(seconds: float) -> list[float]:
        rates.extend(putter.throughput(seconds / 2.0))
        return putter.latencies(seconds / 2.0, 0.0)

    rates: list[float] = []
    sides = run.compare(
        measure,
        lambda: run.strangers("parked_pulls", connections=10, each=1_000, **parking),
        putter.settle,
    )
    putter.check(node)
    more = f"{run.counts['parked']:,} parked in all, {run.counts['not parked']:,} answered at once"
    quiet, attacked = p50(rates[::2]), p50(rates[1::2])
    many = f"{quiet:.1f} and {attacked:.1f} thousand puts a second"
    return [
        put_row(run, "parked-pulls", sides, 1.1, more),
        Row("parked-pulls", "put among many, us", 1e3 / quiet, 1e3 / attacked, 1.1, True, many),
    ]


def idle_connections(run: Run) -> list[Row]:
    """A client leaks 1,000 connections; when they have been idle for a while, others come."""
    node = run.node()
    refused = 0

    def newcomers(seconds: float) -> list[float]:
        nonlocal refused
        found: list[float] = []
        until = time.monotonic() + seconds
        while not found or (time.monotonic() < until and len(found) < 50):
            begin = time.perf_counter()
            try:
                with Producer([node.api], acks=1, delivery_timeout_s=GIVE_UP_S / 4) as producer:
                    producer.send_sync("new", b"x", queue=0)
            except HastoreError:
                refused += 1
            found.append((time.perf_counter() - begin) * 1000.0)
        return found

    quiet, attacked = run.compare(
        newcomers,
        lambda: run.strangers(
            "idle_connections", address=node.api, connections=1_000, idle_s=IDLE_S
        ),
    )
    more = f"{len(attacked)} came"
    unserved = f"{refused} of them were locked out" if refused else ""
    name, what = "idle-connections", "new client's first put, p50, ms"
    return [Row(name, what, p50(quiet), p50(attacked), QUICK_MS, False, more, unserved)]


def many_keys(run: Run) -> list[Row]:
    """One client puts 150 records a second with 8,100 keys each."""
    node = run.node()
    putter = Putter(run, run.producer(node, acks=1))
    sides = run.compare(
        putter.latencies,
        lambda: run.strangers("many_keys", address=node.api, topic="keys", keys=8_100, rate=150),
        putter.settle,
    )
    putter.check(node)
    more = f"{run.counts['stored']} of {run.counts['tried']} such records were stored"
    return [put_row(run, "many-keys", sides, 3, more)]


# -- strangers at the ports


def tls_handshakes(rate: int) -> Callable[[Run], list[Row]]:
    """Return the attack of callers that begin `rate` TLS handshakes a second."""

    def attack(run: Run) -> list[Row]:
        files = Pki(run.folder / "tls").node(NodeName("test", "g0", 1))
        security = Security(tls_ca=files.ca)
        group = run.group(1)
        group[1].write(
            security={
                "ca": files.ca, "certificate": files.certificate, "key": files.key, "api": "tls"
            }
        )  # fmt: skip
        node = group[1].start("master")
        node.wait_writable()
        putter = Putter(run, run.producer(node, acks=1, security=security))
        first: list[float] = []

        def measure(seconds: float) -> list[float]:
            found = putter.latencies(seconds * 0.7)
            until = time.monotonic() + seconds * 0.3
            newcomers: list[float] = []
            while not newcomers or time.monotonic() < until:
                begin = time.perf_counter()
                with Producer(
                    [node.api], acks=1, security=security, delivery_timeout_s=LONGEST_S
                ) as producer:
                    producer.send_sync("new", b"x", queue=0)
                newcomers.append((time.perf_counter() - begin) * 1000.0)
            first.append(p50(newcomers))
            return found

        sides = run.compare(
            measure,
            lambda: run.strangers(
                "tls_handshakes", address=node.api, rate=rate, source=STRANGER, ca=files.ca
            ),
            putter.settle,
        )
        putter.check(node, security=security)
        more = f"{run.counts['called']:,} handshakes begun; a new client's first put "
        more += f"{p50(first[1::2]):,.0f} ms (quiet {p50(first[::2]):,.0f} ms)"
        return [put_row(run, f"tls-{rate}", sides, 2, more)]

    attack.__doc__ = f"Strangers begin {rate:,} TLS handshakes a second at the api port."
    return attack


def _secret(group: Group) -> None:
    path = group.folder / "secret"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    for node in group:
        node.write(ha=node.settings["ha"] | {"secret_file": str(path)})


def _behind(slave: Node, address: str) -> None:
    """Let a slave reach node 1 by another address."""
    nodes = {number: dict(each) for number, each in slave.settings["nodes"].items()}
    nodes[1]["ha"] = address
    slave.write(nodes=nodes)


def hellos(run: Run) -> list[Row]:
    """Strangers begin 400 HELLOs a second, while a slave 20 ms away wants to link."""
    group = run.group(2)
    _secret(group)
    master, slave = group[1], group[2]
    there = run.keep(run.strangers("relay", address=f"tcp://{master.ha}", delay_ms=20))
    _behind(slave, there["address"])
    master.start("master")
    slave.start("slave")
    master.wait_in_sync(2)

    def links(seconds: float) -> list[float]:
        found: list[float] = []
        until = time.monotonic() + seconds
        while not found or time.monotonic() < until:
            slave.kill()
            wait_until(lambda: not _linked(master), LONGEST_S, "the end of the link was not seen")
            begin = time.monotonic()
            slave.start("slave", wait=False)
            with contextlib.suppress(AssertionError):  # it is counted with GIVE_UP_S
                wait_until(lambda: _linked(master), GIVE_UP_S, "not linked")
            found.append(time.monotonic() - begin)
        return found

    quiet, attacked = run.compare(
        links,
        lambda: run.strangers("hellos", address=f"tcp://{master.ha}", rate=400, source=STRANGER),
    )
    more = f"{run.counts['called']:,} HELLOs begun, {len(attacked)} links tried"
    name, what = "hellos", "a slave starts and links, s"
    return [Row(name, what, p50(quiet), p50(attacked), KEPT_S, False, more)]


def _linked(master: Node) -> bool:
    status = master.status() or {}
    return any(one["node"] == 2 and one["in_sync"] for one in status.get("slaves", ()))


def wrong_tokens(run: Run) -> list[Row]:
    """Strangers at the http port, 1,000 a second: wrong tokens, and requests that never end.

    The one with the right token is 20 ms away.
    """
    key = secrets.token_hex(32)
    path = run.folder / "identities.yaml"
    IdentitiesText().add("prometheus", key).write(path)
    group = run.group(1)
    node = group[1]
    node.write(security={"identities": str(path)})
    node.start("master")
    there = run.keep(run.strangers("relay", address=f"tcp://{node.http}", delay_ms=20))
    request = urllib.request.Request(
        f"http://{there['address']}/status", headers={"Authorization": f"Bearer prometheus:{key}"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    failed = 0

    def asks(seconds: float) -> list[float]:
        nonlocal failed
        found: list[float] = []
        until = time.monotonic() + seconds
        while not found or time.monotonic() < until:
            begin = time.perf_counter()
            try:
                with opener.open(request, timeout=GIVE_UP_S) as answer:
                    json.loads(answer.read())
            except (OSError, ValueError):
                failed += 1
            found.append((time.perf_counter() - begin) * 1000.0)
            time.sleep(0.02)
        return found

    quiet, attacked = run.compare(
        asks,
        lambda: run.strangers(
            "wrong_tokens", address=node.http, rate=1_000, source=STRANGER, identity="prometheus"
        ),
    )
    more = f"{len(attacked)} right tokens beside {run.counts['called']:,} calls"
    unserved = f"{failed} right tokens got no answer" if failed else ""
    name, what = "wrong-tokens", "a right token's /status, p50, ms"
    return [Row(name, what, p50(quiet), p50(attacked), QUICK_MS, False, more, unserved)]


# -- strangers elsewhere


def planted_links(run: Run) -> list[Row]:
    """Somebody plants links at the names of all temporary files; then the node's commands run."""
    group = run.group(2)
    group.start()
    Putter(run, run.producer(*group, acks=1)).latencies(0.2)
    group.wait_equal()
    group.stop()
    victim = run.folder / "victim"
    victim.write_bytes(b"precious")
    planted = 0
    for node in group:
        for folder, _, names in os.walk(node.store):
            for name in {*names, "node.json", "checkpoint"}:
                with contextlib.suppress(FileExistsError):
                    os.symlink(victim, os.path.join(folder, f"{name}.tmp"))
                    planted += 1
    for node in group:
        node.start("slave" if node.file_role == "SLAVE" else "master", wait=False)
    failures = 0
    for node in group:
        with contextlib.suppress(AssertionError):
            node.wait_ready()
            continue
        failures += 1
    command("promote", "-c", str(group[2].path), "--no-catch-up")
    for node in group:
        node.kill()
    assert planted, "no name for a link was found"
    overwritten = float(victim.is_symlink() or victim.read_bytes() != b"precious")
    more = f"{planted} links planted, {failures} nodes refused to start"
    return [Row("planted-links", "files overwritten", None, overwritten, 0, False, more)]


def man_in_the_middle(run: Run) -> list[Row]:
    """Somebody between two nodes with a secret and without TLS changes bodies and their CRCs."""
    group = run.group(2)
    _secret(group)
    master, slave = group[1], group[2]
    right, wrong = b"pay 100 euros to Alice", b"pay 999 euros to Mallo"
    change = [right.decode(), wrong.decode()]
    with run.strangers("relay", address=f"tcp://{master.ha}", delay_ms=0, change=change) as there:
        _behind(slave, there["address"])
        master.start("master")
        slave.start("slave")
        master.wait_in_sync(2)
        producer = run.producer(master, acks=1)
        until = time.monotonic() + min(run.left_s(), 5.0)
        sent = 0
        while time.monotonic() < until or sent < 5:
            producer.send_sync(PUTS, right, queue=0)
            sent += 1
            time.sleep(0.05)
    slave.kill()
    _behind(slave, master.ha)
    slave.start("slave")
    with contextlib.suppress(AssertionError):
        group.wait_equal(GIVE_UP_S)
    slave.kill()
    bodies = [found.body for found in read_log(slave.store).records]
    here = sum(body == wrong for body in bodies)
    missing = sent - sum(body == right for body in bodies)
    assert run.counts["changed"], "the relay has changed nothing on the way"
    more = f"{run.counts['changed']} of {sent} changed on the way"
    if missing and not here:
        run.lost.append(f"{missing} messages are missing on the slave")
    name, what = "man-in-the-middle", "changed bodies on the slave"
    return [Row(name, what, None, here, 0, False, more, lost=run.lost)]


def strange_objects(run: Run) -> list[Row]:
    """Strangers make a group's objects in ZooKeeper before its first start with credentials."""
    from tests.registry.servers import CREDENTIALS, Servers

    servers = run.keep(contextlib.closing(Servers(run.folder))).start()
    group = run.group(2)
    acl = run.folder / "acl"
    acl.write_text(CREDENTIALS)
    acl.chmod(0o600)
    roles = {1: "SLAVE", 2: "SYNC_MASTER"}  # the files say the opposite
    with servers.client() as client:
        for node in group:
            addresses = dict(node.settings["nodes"][node.number])
            words = json.dumps({"role": roles[node.number], **addresses}).encode()
            client.create(f"/hastore/test/g0/{node.number}", words, makepath=True)
        for node in group:
            node.write(registry=servers.registry, registry_acl_file=str(acl))
            node.start(wait=False)
        for node in group:
            node.wait_ready()
        deadline = SYSTEM_CLOCK.monotonic_ms() + 1_000.0 * min(run.left_s(), 6.0)
        obeyed: set[int] = set()
        seen: set[int] = set()
        while SYSTEM_CLOCK.monotonic_ms() < deadline:
            for node in group:
                status = node.status() or {}
                if "role" in status:
                    seen.add(node.number)
                if status.get("role") == roles[node.number]:
                    obeyed.add(node.number)
            time.sleep(0.1)
    assert seen == roles.keys(), f"only {seen} said which role they have"
    problems = [" ".join((node.status() or {}).get("problems", ())) for node in group]
    named = sum("ACL" in each or "credentials" in each for each in problems)
    more = f"{named} of 2 nodes name the problem"
    name, what = "strange-objects", "roles that strangers set"
    return [Row(name, what, None, len(obeyed), 0, False, more)]


def full_disk(run: Run) -> list[Row]:
    """The disk is full, and only what retention deletes can make room."""
    group = run.group(
        1,
        store={"commitlog_file_size": "1MiB"},
        retention={"max_age": f"{AGE_S}s", "check_interval": "200ms", "hold": "0s"},
    )
    control = run.folder / "faults"
    faults = Faults(control)
    node = group[1]
    node.launcher = [faulty_node.__file__, str(control)]
    node.start("master").wait_writable()
    run.fill(node, "big", 3_000, bytes(3_000))
    faults["full"] = 1
    begin = time.monotonic()
    full = node.wait_status(lambda s: True, "any")["min_offset"]
    took = GIVE_UP_S
    with contextlib.suppress(AssertionError):
        node.wait_status(lambda s: s["min_offset"] > full, "room", GIVE_UP_S)
        took = max(0.0, time.monotonic() - begin - AGE_S)
    refused = faults["refused_writes"]
    assert refused, "the disk was not full"
    faults.heal()
    if node.running:
        putter = Putter(run, run.producer(node, acks=1))
        putter.latencies(0.2)
        putter.check(node)
    else:
        run.lost.append("THE NODE HAS ENDED")
    more = f"{refused} writes refused meanwhile"
    what = "retention makes room, s"
    return [Row("full-disk", what, None, took, KEPT_S, False, more, lost=run.lost)]


ATTACKS: dict[str, Callable[[Run], list[Row]]] = {
    "key-queries": key_queries,
    "cold-readers": cold_readers,
    "parked-pulls": parked_pulls,
    "idle-connections": idle_connections,
    "many-keys": many_keys,
    "tls-600": tls_handshakes(600),
    "tls-2400": tls_handshakes(2_400),
    "hellos": hellos,
    "wrong-tokens": wrong_tokens,
    "planted-links": planted_links,
    "man-in-the-middle": man_in_the_middle,
    "full-disk": full_disk,
}
LEFT_OUT = ""
if shutil.which("java") and find_spec("kazoo") and (debian_jars() or pyspark_jars()):
    ATTACKS["strange-objects"] = strange_objects
else:
    LEFT_OUT = "strange-objects is left out: it needs Java, ZooKeeper and the extra zk"
