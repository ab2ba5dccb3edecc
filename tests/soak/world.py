"""The nodes of a soak and what happens to them: one comes and goes, the master changes, logs turn.

In mode classic the visitor, node 3, is stopped or killed and started again all the time. Now and
then its disk is lost: it comes back with an empty store under a new number. Nodes 1 and 2 are the
master in turn. In mode dledger all three processes stay, a follower is removed from the group and
added again as a learner, and the leader hands over.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Mode
from hastore.dledger.driver.requests import write_request
from hastore.fs.filesystem import REAL
from hastore.record.codec import decode_record
from hastore.security.identity import Identity
from hastore.security.identity_editor import IdentityEditor
from hastore.store.offline.reader import StoreReader
from tests.attack.kit import command
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import ROOT, SETTLE_S, Group, Node, Status, wait_until
from tests.soak import watched_node
from tests.soak.clients import KEPT, NEEDED, PRODUCERS

IDENTITY = "soak"
LOG_FILES, FILE_BYTES = 24, 1024 * 1024
STORE = {
    "commitlog_file_size": "1MiB",
    "consume_queue_units": 2_000,
    "index_slots": 2_000,
    "index_entries": 8_000,
    "scrub_rate": "1MiB",
}
RETENTION = {"max_size": f"{LOG_FILES}MiB", "check_interval": "1s", "hold": "60s"}
REMOTING = {
    "transaction_timeout": "2s", "transaction_check_interval": "5s", "transaction_check_max": 3,
}  # fmt: skip
CLIENT_END_S = 60.0


class Clients:
    """A process of clients.py; `counts` gets what it has counted."""

    def __init__(self, kind: str, arguments: dict[str, Any]) -> None:
        self.kind = kind
        self.counts: Counter[str] = Counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.clients", kind, json.dumps(arguments)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), f"the {kind} never began, see stderr"

    def check(self) -> None:
        """Raise AssertionError if the process has ended by itself."""
        code = self._process.poll()
        assert code is None, f"the {self.kind} ended by themselves with {code}, see stderr"

    def leave(self) -> None:
        """Let the clients go."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def ended(self) -> None:
        """Wait for their end; raise AssertionError if they failed, or did nothing."""
        assert self._process.stdout is not None
        last = self._process.stdout.read()
        self._process.stdout.close()
        code = self._process.wait(CLIENT_END_S)
        assert code == 0 and last, f"the {self.kind} failed with {code}, see stderr"
        self.counts.update(json.loads(last))
        lacking = [name for name in NEEDED[self.kind] if not self.counts[name]]
        assert not lacking, f"the {self.kind} did nothing of {lacking}: {dict(self.counts)}"
        assert not self.counts["LET IN"], f"a wrong key was let in: {dict(self.counts)}"

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


class World:
    """The nodes and what happens to them; `on_start` runs before the visitor starts anew."""

    def __init__(
        self,
        folder: pathlib.Path,
        mode: Mode,
        chance: random.Random,
        *,
        connections: int,
        leak: str | None = None,
    ) -> None:
        self.folder = folder
        self.mode = mode
        self.chance = chance
        self.done: Counter[str] = Counter()
        self.pause_s = 1.0  # between two things that happen, on average
        self.on_start: Callable[[], None] = lambda: None
        self._ended = threading.Event()
        self._key = secrets.token_hex(32)
        self._prepare_identity()
        options: dict[str, Any] = {"store": STORE, "retention": RETENTION}
        if mode is Mode.CLASSIC:
            self.group = Group(folder, 3, ha={"slave_timeout": "2s"}, **options)
        else:
            self.group = DLedgerGroup(folder, 3, **options)
        steady = (1, 2) if mode is Mode.CLASSIC else (1, 2, 3)
        self.steady = tuple(self.group[number] for number in steady)
        self.visitor = self.group[3]
        for node in self.group:
            node.write(
                security={"identities": str(folder / "ids.yaml")}, remoting=REMOTING,
                api={"max_connections": connections},
                log={"file": str(folder / f"node{node.number}.log")},
            )  # fmt: skip
            node.token = f"{IDENTITY}:{self._key}"
            leaks = leak if leak is not None and node.number == 1 else "-"
            script = str(pathlib.Path(watched_node.__file__))
            node.launcher = [script, str(folder / f"gauges{node.number}"), leaks]

    def slots(self) -> dict[int, Node]:
        """Return the nodes by their place: the visitor is 3, whatever its number."""
        return {1: self.group[1], 2: self.group[2], 3: self.visitor}

    def _prepare_identity(self) -> None:
        editor = IdentityEditor(str(self.folder / "ids.yaml"), create=True)
        all_rights = Identity(IDENTITY, ("*",), ("*",), is_admin=True, groups=("*",))
        editor.add(all_rights, self._key, SYSTEM_CLOCK.wall_ms(), secret=self._key)
        editor.save()
        for name, key in (("key", self._key), ("wrong", secrets.token_hex(32))):
            path = self.folder / name
            path.touch(0o600)
            path.write_text(key)
        (self.folder / "client.yaml").write_text(f"identity: {IDENTITY}\nkey_file: key\n")

    def gauges_of(self, node: Node) -> pathlib.Path:
        """Return where watched_node.py writes what a node's heap holds."""
        return pathlib.Path(node.launcher[1])

    def log_of(self, node: Node) -> pathlib.Path:
        """Return the file of a node's log."""
        return pathlib.Path(node.settings["log"]["file"])

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Return the arguments of clients."""
        return {
            "seed": self.chance.getrandbits(32), "identity": IDENTITY, "key": self._key,
            "key_file": str(self.folder / "key"), "wrong_key_file": str(self.folder / "wrong"),
            "acknowledged": str(self.folder / "acknowledged"), "producers": PRODUCERS,
            "nodes": [{"api": one.api, "http": one.http, "ha": one.ha} for one in self.group],
            **more,
        }  # fmt: skip

    def __enter__(self) -> World:
        self.group.start()
        if self.mode is Mode.CLASSIC:
            self.group[1].wait_in_sync(2, 3)
        return self

    def __exit__(self, *_failure: object) -> None:
        self.end()
        self.group.close()

    def end(self) -> None:
        """Let nothing more happen to the nodes."""
        self._ended.set()

    def nap(self, seconds: float) -> None:
        """Wait, at most until the end."""
        self._ended.wait(seconds)

    # -- what happens

    def rounds(self) -> Iterator[str]:
        """Let something happen every `pause_s` until the end; yield what it was."""
        things = [self.come_and_go, self.hand_over, self.come_and_go, self.turn_logs]
        while True:
            for thing in things:
                self.nap(self.chance.uniform(0.5, 1.5) * self.pause_s)
                if self._ended.is_set():
                    return
                thing()
                self.done[thing.__name__] += 1
                yield thing.__name__

    def come_and_go(self) -> None:
        """Let the visitor leave and come back, now and then without its disk; or a member."""
        if self.mode is Mode.DLEDGER:
            leader = self.master()
            member = self.chance.choice([one for one in self.group if one is not leader])
            everybody = sorted(self.group.nodes)
            self._change("remove", member, [one for one in everybody if one != member.number])
            self.nap(self.chance.uniform(0.1, 0.3) * self.pause_s)  # away
            self._change("add", member, everybody)
            return
        node = self.visitor
        if self.chance.random() < 0.5:
            node.kill()
        else:
            assert node.stop() == 0, f"it did not stop well: {node.last_words()}"
        self.nap(self.chance.uniform(0.1, 0.3) * self.pause_s)  # away
        master = self.master()
        others = [one.number for one in self.steady if one is not master]
        lost_disk = self.done["come_and_go"] % 3 == 1
        if lost_disk:
            self._replace(node)
        self.on_start()
        self.visitor.start("slave")
        master.wait_in_sync(*others, self.visitor.number)
        if lost_disk:  # the new list is in force with the next epoch
            self._command("promote", "-c", str(master.path))
            master.wait_in_sync(*others, self.visitor.number)
            self.done["with an empty store"] += 1

    def _replace(self, old: Node) -> None:
        """Let another number take the place of a node whose disk is lost."""
        number = old.number + 1
        where = ("--api", old.api, "--ha", old.ha, "--http", old.http)
        files = [str(one.path) for one in self.steady]
        numbers = ("--node", str(old.number), "--by", str(number))
        self._command("node", "replace", *files, *numbers, *where)
        shutil.rmtree(old.store)
        listed = yaml.safe_load(self.steady[0].path.read_text())["nodes"]
        store = {**old.settings["store"], "root": str(self.folder / f"store{number}")}
        settings = {**old.settings, "node": number, "nodes": listed, "store": store}
        new = Node(number, self.folder, settings)
        new.token, new.launcher = old.token, old.launcher
        del self.group.nodes[old.number]
        self.group.nodes[number] = self.visitor = new

    def _command(self, *words: str) -> None:
        given = {**os.environ, "HASTORE_SECURITY": str(self.folder / "client.yaml")}
        done = command(*words, environment=given)
        assert done.returncode == 0, f"hastore {' '.join(words)}: {done.stderr.decode()}"

    def hand_over(self) -> None:
        """Let another node be the master: 1 or 2; in mode dledger any."""
        old = self.master()
        if self.mode is Mode.DLEDGER:
            target = self.chance.choice([one for one in self.group if one is not old])
            self._request(old, "transfer", target)
            self.group.wait_leader(timeout_s=SETTLE_S)  # type: ignore[attr-defined]
            return
        new = self.group[2] if old is self.group[1] else self.group[1]
        old.edit_role("SLAVE")
        new.edit_role("SYNC_MASTER")
        new.wait_writable()
        new.wait_in_sync(old.number, self.visitor.number)

    def turn_logs(self) -> None:
        """Move each node's log away, and let it open another one: SIGHUP."""
        for node in self.group:
            path = self.log_of(node)
            with contextlib.suppress(FileNotFoundError):
                path.replace(path.with_suffix(".log.1"))
            node.send(signal.SIGHUP)

    def master(self) -> Node:
        """Return the node that takes puts; waits for one."""

        def look() -> Node | None:
            for node in self.group:
                status = node.status() if node.running else None
                if status is not None and status["writable"]:
                    return node
            return None

        found: Node = wait_until(look, SETTLE_S, "no node takes puts")
        return found

    def _request(self, leader: Node, command: str, node: Node) -> None:
        status: Status = leader.wait_status(lambda _: True, "an answer")
        write_request(
            REAL, str(leader.store), command, node.number, term=status["term"],
            members=tuple(status["members"]), wall_ms=SYSTEM_CLOCK.wall_ms(),
        )  # fmt: skip

    def _change(self, command: str, node: Node, wanted: list[int]) -> None:
        def done() -> bool:
            leader = self.master()
            status = leader.wait_status(lambda _: True, "an answer")
            if status["members"] == wanted and not status["learners"]:
                return True
            if leader is node:  # elected meanwhile; it cannot remove itself
                other = next(one for one in self.group if one is not leader)
                self._request(leader, "transfer", other)
            elif not (status["learners"] or status["leaving"]):
                self._request(leader, command, node)
            time.sleep(0.3)
            return False

        wait_until(done, SETTLE_S, f"the members do not become {wanted}")

    # -- what is left

    def dump(self, node: Node) -> dict[str, Any]:
        """Return how many objects of each type a node has (watched_node.py)."""
        folder = self.gauges_of(node)
        (folder / "dumped").unlink(missing_ok=True)
        (folder / "dump").touch()
        wait_until((folder / "dumped").exists, SETTLE_S, f"node {node.number} dumps nothing")
        found: dict[str, Any] = json.loads((folder / "dumped").read_text())
        return found

    def removed_bytes(self) -> int:
        """Return how much of the log retention has removed on node 1."""
        status = self.group[1].wait_status(lambda _: True, "an answer")
        return int(status["min_offset"])

    def lost(self) -> tuple[int, list[str]]:
        """Stop the nodes; return how many acknowledged messages were looked for, and what is wrong.

        Each that retention has not removed must be on each node, once, where its reply said.
        """
        if self.mode is Mode.CLASSIC:
            self.group.wait_equal()
        else:
            self.group.wait_same()  # type: ignore[attr-defined]
        self.group.stop()
        lines = (self.folder / "acknowledged").read_text().split("\n")[:-1]
        acknowledged = {int(number): int(at) for at, number in map(str.split, lines)}
        wrong: list[str] = []
        looked = 0
        for node in self.group:
            found: dict[int, int] = {}
            with StoreReader(str(node.store)) as reader:
                first = reader.min_offset
                for _, raw in reader.raw_records():
                    record = decode_record(raw)
                    if record.topic == KEPT and record.body.startswith(b"kept-"):
                        number = int(record.body[5 : record.body.index(b":")])
                        if number in found:
                            wrong.append(f"node {node.number} has {number} twice")
                        found[number] = record.physical_offset
            there = {one: at for one, at in acknowledged.items() if at >= first}
            looked += len(there)
            missing = [one for one, at in there.items() if found.get(one) != at]
            if missing:
                text = f"{len(missing)} acknowledged messages, first {missing[:3]}"
                wrong.append(f"LOST on node {node.number}: {text}")
        return looked, wrong


def raise_descriptors() -> None:
    """Let this process, and the nodes that it starts, have as many descriptors as they may."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def cpu_count() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))
