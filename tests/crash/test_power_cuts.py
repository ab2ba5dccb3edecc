"""Power cuts of real nodes whose stores are on a file system that loses what was not synced.

`make power-cuts` makes 300 of them, half of a master alone, half of a group of mode dledger.
HASTORE_POWER_CUTS_SEED repeats the seeds of the cuts, but not the machine's timing.
"""

import os
import pathlib
import random
import subprocess
import sys
import threading
import uuid
from functools import partial

import pytest

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from hastore.errors import HastoreError
from tests.crash import rebooted
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until

CUTS = int(os.environ.get("HASTORE_POWER_CUTS", "0"))
SEED = int(os.environ.get("HASTORE_POWER_CUTS_SEED", "0")) or random.SystemRandom().getrandbits(31)
STORE = {"flush": "sync", "commitlog_file_size": "64KiB"}
PATIENCE_S = 120.0
CHECKED = 3  # topics of so many cuts are read after each; all of them at the end
GROUPS = {
    "classic": (partial(Group, count=1, acks=0, master_role="ASYNC_MASTER"), "MASTER_DISK"),
    "dledger": (partial(DLedgerGroup, count=3), "QUORUM_DISK"),
}


class Mounted:
    """The file system; its server is a process of its own, and unmounts when this one ends."""

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.fuse_disk", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=rebooted.ROOT,
        )  # fmt: skip
        self.answer = self._line()

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()

    def cut(self, seed: int) -> str:
        """Cut the power; return how many writes and names were not synced."""
        assert self._server.stdin is not None
        self._server.stdin.write(f"cut {seed}\n")
        self._server.stdin.flush()
        return self._line()

    def close(self) -> None:
        """Unmount."""
        assert self._server.stdin is not None
        self._server.communicate(timeout=60)


class Load:
    """Puts one message after the other; `acked` has those whose reply says that disks have them."""

    def __init__(self, group: Group | DLedgerGroup, topic: str, level: str) -> None:
        self.acked: list[bytes] = []
        self.sent: set[bytes] = set()
        self.failures: list[BaseException] = []
        self._group, self._topic, self._level = group, topic, level
        self.stopping = threading.Event()
        self._threads = [threading.Thread(target=self._put, args=(n,)) for n in range(3)]
        for one in self._threads:
            one.start()

    def _put(self, number: int) -> None:
        chance, count = random.Random(number), 0
        try:
            with Producer(self._group.bootstrap) as producer:
                while not self.stopping.is_set():
                    count += 1
                    body = b"%d-%d " % (number, count) + bytes(chance.choice((0, 100, 3000)))
                    self.sent.add(body)
                    result = producer.send_sync(self._topic, body)
                    if result.level == self._level:
                        self.acked.append(body)
        except HastoreError:  # the cut
            return
        except BaseException as failure:
            self.failures.append(failure)

    def end(self) -> None:
        """Wait for the threads."""
        for one in self._threads:
            one.join(PATIENCE_S)
        assert not self.failures, self.failures


def restart(group: Group | DLedgerGroup) -> None:
    if isinstance(group, DLedgerGroup):
        group.start()
        return
    node = group[1].start("master")
    node.wait_writable(PATIENCE_S)


def read(group: Group | DLedgerGroup, topic: str, wanted: set[bytes]) -> list[bytes]:
    """Read a topic until all that is wanted was read, or nothing has come for a long time."""
    found: list[bytes] = []
    with Consumer(topic, group.bootstrap) as consumer:
        while wanted - set(found):
            more = consumer.poll(1000, timeout_s=PATIENCE_S)
            if not more:
                words = [f"node {node.number}: {node.last_words(3)}" for node in group]
                print(f"{topic}: {len(found)} messages were read", *words, sep="\n")
                return found
            found += [one.body for one in more]
    return found


def run_cuts(
    folder: pathlib.Path, kind: str, count: int, seed: int, mistake: str = ""
) -> dict[str, int]:
    """Cut the power so often; return figures."""
    mounted = Mounted(folder / "disk")
    if mounted.answer != "mounted":
        mounted.close()
        pytest.skip(f"no power cuts: {mounted.answer or 'the file system did not start'}")
    chance, (make, level) = random.Random(seed), GROUPS[kind]
    boot = folder / f"boot{mistake}"
    boot.write_text(f"{uuid.uuid4()}\n")
    figures = {"cuts": 0, "acknowledged": 0, "writes in doubt": 0, "names in doubt": 0}
    loads: dict[str, Load] = {}
    try:
        with make(folder, store=STORE) as group:
            for node in group:
                node.launcher = [str(rebooted.__file__), str(boot)]
                node.write(store={"root": str(folder / "disk" / f"store{node.number}")})
            restart(group)
            for number in range(count):
                topic = f"cut{number}"
                load = loads[topic] = Load(group, topic, level)
                enough = chance.randrange(1, 60)
                wait_until(
                    lambda: load.failures or len(load.acked) >= enough,  # noqa: B023
                    PATIENCE_S, "nothing is acknowledged",
                )  # fmt: skip
                for node in group:
                    node.kill()
                load.stopping.set()
                lost = mounted.cut(chance.getrandbits(31))
                boot.write_text(f"{uuid.uuid4()}\n")
                restart(group)
                load.end()  # what was under way is sent again, or was lost
                print(f"{kind} cut {number + 1}: {len(load.acked)} acknowledged, {lost} in doubt")
                last = number == count - 1
                judge(group, dict(list(loads.items())[0 if last else -CHECKED :]))
                figures["cuts"] += 1
                figures["acknowledged"] += len(load.acked)
                for name, text in zip(list(figures)[2:], lost.split(), strict=True):
                    figures[name] += int(text)
    finally:
        mounted.close()
    return figures


def judge(group: Group | DLedgerGroup, loads: dict[str, Load]) -> None:
    """What was acknowledged is there, once; nothing else than what was sent."""
    for topic, load in loads.items():
        found = read(group, topic, set(load.acked))
        lost, twice = set(load.acked) - set(found), len(found) - len(set(found))
        assert not lost, f"{topic}: {len(lost)} of {len(load.acked)} messages are lost"
        assert not twice, f"{topic}: {twice} messages are there twice"
        assert not set(found) - load.sent, f"{topic}: messages are there that nobody has sent"


@pytest.mark.full
@pytest.mark.slow("real nodes, and a file system in Python")
@pytest.mark.timeout(600 + 30 * CUTS)
@pytest.mark.parametrize("kind", [*GROUPS, "a planted mistake"] if CUTS else ["classic"])
def test_nothing_acknowledged_is_lost_in_a_power_cut(tmp_path: pathlib.Path, kind: str) -> None:
    print(f"HASTORE_POWER_CUTS_SEED={SEED}")
    if kind not in GROUPS:
        with pytest.raises(AssertionError, match="lost|node 1 ended") as found:
            run_cuts(tmp_path, "classic", 20, SEED, rebooted.UNSYNCED)
        print(f"without syncs: {found.value}")
        return
    figures = run_cuts(tmp_path, kind, CUTS // 2 or 1, SEED)
    print(f"{kind}: {figures}")
    assert figures["writes in doubt"] + figures["names in doubt"] > 0
