"""Upgrade a group node by node from an earlier commit, and go back: make upgrade FROM=COMMIT.

    three nodes of the earlier commit -> one after the other runs this one -> the master is killed
      -> one after the other runs the earlier one again

Real processes of both versions, under producers of both and a consumer group of this one. At the
end each acknowledged message must be in the log once, where its acknowledgement said, the consumer
must have had all of them in order, and the three logs must be equal up to the shortest one's end.
The exit code is 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from hastore import Admin, Consumer, NodeInfo
from hastore.errors import HastoreError
from hastore.testing.groups import Ports
from tests.process.harness import ROOT, SETTLE_S, STOP_S, wait_until

Place = tuple[int, int]  # queue and queue offset
CLIENT = pathlib.Path(__file__).with_name("client.py")
NUMBERS = (1, 2, 3)
MESSAGES = 60  # of each producer, at least, between two steps
IDLE_S = 3.0  # a reader at the log's end gets nothing for so long


class Process:
    """A process with the modules of one version; its output goes to a file."""

    def __init__(self, version: pathlib.Path, log: pathlib.Path, *words: str) -> None:
        self.version = version
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, *words], cwd=version, env=_environment(version), text=True,
                stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def end(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, and wait for the end."""
        self.process.send_signal(by)
        self.process.wait(STOP_S)


def _environment(version: pathlib.Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(version), "HASTORE_LOG": "WARNING"}


class Trial:
    """A group, its clients, and what the clients know."""

    def __init__(self, folder: pathlib.Path, old: pathlib.Path, mode: str, secret: bool) -> None:
        self.folder, self.old, self.mode = folder, old, mode
        self._ports = Ports()
        ports = {n: [self._ports.take() for _ in range(3)] for n in NUMBERS}
        self.addresses = [f"tcp://127.0.0.1:{ports[n][0]}" for n in NUMBERS]
        self.nodes: dict[int, Process] = {}
        self.producers: list[Process] = []
        self.seen: list[tuple[Place, bytes]] = []
        self._ends = threading.Event()
        self._reader = threading.Thread(target=self._read, name="reader")
        if secret:
            (folder / "secret").write_text("a secret of 32 bytes or more, for links\n")
            (folder / "secret").chmod(0o600)
        lines = [
            f'  {n}: {{api: "tcp://127.0.0.1:{api}", ha: "127.0.0.1:{ha}", '
            f'http: "127.0.0.1:{http}"}}\n'
            for n, (api, ha, http) in ports.items()
        ]
        for number in NUMBERS:
            role = "SYNC_MASTER" if number == 1 else "SLAVE"
            kind = "mode: dledger" if mode == "dledger" else f"role: {role}\nacks: 1"
            ha = f"ha:\n  secret_file: {folder}/secret\n" if secret else ""
            self.file(number).write_text(
                f"cluster: c\ngroup: g0\nnode: {number}\n{kind}\nnodes:\n{''.join(lines)}{ha}"
                f"store:\n  root: {folder}/store{number}\n  commitlog_file_size: 1MiB\n"
            )

    def file(self, number: int) -> pathlib.Path:
        """Return a node's configuration file."""
        return self.folder / f"node{number}.yaml"

    def start(self, number: int, version: pathlib.Path) -> None:
        """Start a node, of the earlier version or this one."""
        words = ("-m", "hastore", "serve", "-c", str(self.file(number)))
        self.nodes[number] = Process(version, self.folder / f"node{number}.log", *words)

    def command(self, version: pathlib.Path, *words: str) -> None:
        """Run a command of one version."""
        done = subprocess.run(
            [sys.executable, "-m", "hastore", *words], cwd=version, env=_environment(version),
            capture_output=True, text=True, timeout=SETTLE_S,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout, done.stderr)

    # -- clients

    def begin_clients(self) -> None:
        """Start a producer of each version, and the consumer."""
        for name, version in (("old", self.old), ("new", ROOT)):
            log = self.folder / f"producer-{name}.log"
            words = (str(CLIENT), ",".join(self.addresses), name)
            self.producers.append(Process(version, log, *words))
        self._reader.start()

    def end_clients(self) -> None:
        """Let the clients end by themselves."""
        for one in self.producers:
            one.process.communicate("end\n", STOP_S)
        self._ends.set()
        if self._reader.ident is not None:
            self._reader.join()

    def told(self) -> tuple[dict[bytes, Place], set[bytes]]:
        """Return what was acknowledged, with its place, and what has no known outcome."""
        acknowledged: dict[bytes, Place] = {}
        unknown = set()
        for log in self.folder.glob("producer-*.log"):
            for line in log.read_text().splitlines():
                if line.startswith("["):
                    body, *place = json.loads(line)
                    if place:
                        acknowledged[body.encode()] = (place[0], place[1])
                    else:
                        unknown.add(body.encode())
        return acknowledged, unknown

    def _read(self) -> None:
        with Consumer("T", self.addresses, group="g", start="earliest") as consumer:
            while not self._ends.is_set():
                try:
                    for one in consumer.poll(timeout_s=0.3):
                        self.seen.append(((one.queue_id, one.queue_offset), one.body))
                    consumer.commit()
                except HastoreError as failure:  # in a flip; the next poll goes on
                    print(f"    the consumer: {failure}")

    # -- steps

    def wait_whole(self) -> int:
        """Wait until all nodes are in sync; return the master's number."""
        found: dict[int, dict[str, Any]] = {}

        def look() -> int | None:
            found.clear()
            with contextlib.suppress(HastoreError), Admin(self.addresses, timeout_s=3.0) as admin:
                found.update(
                    (one.node, one.status) for one in admin.nodes() if isinstance(one, NodeInfo)
                )
            masters = [number for number, status in found.items() if status["writable"]]
            if len(found) < len(NUMBERS) or len(masters) != 1:
                return None
            slaves = found[masters[0]].get("slaves", [])
            ends = [status["max_offset"] for status in found.values()]
            whole = self.mode == "dledger" or sum(one["in_sync"] for one in slaves) == 2
            return masters[0] if whole and max(ends) - min(ends) < 1 << 18 else None

        return int(wait_until(look, SETTLE_S, lambda: f"not in sync: {found}"))

    def wait_messages(self) -> None:
        """Wait until each producer has had so many messages acknowledged since now."""

        def counts() -> Counter[bytes]:
            return Counter(body.partition(b"-")[0] for body in self.told()[0])

        before = counts()
        wait_until(
            lambda: all(counts()[name] >= before[name] + MESSAGES for name in (b"old", b"new")),
            SETTLE_S, lambda: f"the producers do not go on: {before}, {counts()}",
        )  # fmt: skip

    def roll(self, version: pathlib.Path, what: str) -> None:
        """Let one node after the other run a version, the master last."""
        master = self.wait_whole()
        others = [number for number in reversed(NUMBERS) if number != master]
        for number in (*others, master):
            if number == master and self.mode == "classic":
                self._flip(master, others[-1], version)
            began = time.monotonic()
            self.nodes.pop(number).end()
            self.start(number, version)
            self.wait_whole()
            self.wait_messages()
            took = time.monotonic() - began
            print(f"  node {number} runs {what}, all in sync after {took:.1f} s")

    def _flip(self, master: int, to: int, version: pathlib.Path) -> None:
        self.command(version, "promote", "-c", str(self.file(to)))
        self.command(self.nodes[master].version, "demote", "-c", str(self.file(master)))
        self.wait_whole()

    def kill_master(self) -> None:
        """Kill the master, and let it come back."""
        master = self.wait_whole()
        self.nodes.pop(master).end(signal.SIGKILL)
        if self.mode == "classic":
            self.command(ROOT, "promote", "-c", str(self.file(1 if master != 1 else 2)))
            file = self.file(master)
            file.write_text(file.read_text().replace("role: SYNC_MASTER", "role: SLAVE"))
        self.start(master, ROOT)
        self.wait_whole()
        self.wait_messages()
        print(f"  node {master} was killed and is back")

    # -- the end

    def stop(self) -> None:
        """End all that runs."""
        self._ends.set()
        for one in (*self.nodes.values(), *self.producers):
            if one.process.poll() is None:
                one.process.kill()
            one.process.wait()
        self._ports.close()

    def judge(self) -> list[str]:
        """Return what is wrong."""
        acknowledged, unknown = self.told()
        found: dict[bytes, list[Place]] = defaultdict(list)
        with Consumer("T", self.addresses, start="earliest", read_from="master") as consumer:
            while messages := consumer.poll(timeout_s=IDLE_S):
                for one in messages:
                    found[one.body].append((one.queue_id, one.queue_offset))
        wrong = [
            f"{body.decode()} was acknowledged at {place}, and is at {found.get(body)}"
            for body, place in acknowledged.items()
            if found.get(body) != [place]
        ]
        wrong += [f"{b.decode()} was never sent" for b in found.keys() - acknowledged - unknown]
        lacking = acknowledged.keys() - {body for _, body in self.seen}
        wrong += [f"the consumer never had {body.decode()}" for body in sorted(lacking)]
        by_queue: dict[int, list[int]] = defaultdict(list)
        for (queue, offset), _ in self.seen:
            by_queue[queue].append(offset)
        wrong += [
            f"queue {queue} was not read in order"
            for queue, offsets in by_queue.items()
            if offsets != sorted(set(offsets))
        ]
        print(f"  {len(acknowledged)} acknowledged, {len(unknown)} unknown, {len(found)} stored")
        return wrong

    def judge_logs(self) -> list[str]:
        """Return what differs between the stopped nodes' logs."""
        for number in NUMBERS:
            self.nodes.pop(number).end()
        logs = sorted((self._log(number) for number in NUMBERS), key=len)
        same = all(logs[-1].startswith(one) for one in logs)
        return [] if same and logs[0] else ["the logs differ"]

    def _log(self, number: int) -> bytes:
        store = self.folder / f"store{number}"
        folder = store / "commitlog"
        if self.mode == "dledger":
            (folder,) = store.glob("dledger*/data")
        return b"".join(one.read_bytes() for one in sorted(folder.iterdir())).rstrip(b"\0")


def run(old: pathlib.Path, mode: str, *, secret: bool, back: bool) -> list[str]:
    """Upgrade a group, and go back; return what is wrong."""
    with tempfile.TemporaryDirectory(prefix="hastore-upgrade-") as folder:
        trial = Trial(pathlib.Path(folder), old, mode, secret)
        try:
            for number in NUMBERS:
                trial.start(number, old)
            trial.wait_whole()
            trial.begin_clients()
            trial.wait_messages()
            trial.roll(ROOT, "this version")
            trial.kill_master()
            if back:
                trial.roll(old, "the earlier version again")
            trial.end_clients()
            trial.wait_whole()
            return trial.judge() + trial.judge_logs()
        except BaseException:
            for log in sorted(trial.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-2_000:]}", file=sys.stderr)
            raise
        finally:
            trial.stop()


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[pathlib.Path]:
    """Write the modules of a commit to a folder."""
    with tempfile.TemporaryDirectory(prefix="hastore-old-") as folder:
        words = ["git", "-C", str(ROOT), "archive", commit, "hastore"]
        archive = subprocess.run(words, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)
        yield pathlib.Path(folder)


def main() -> int:
    """Try what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=__doc__)
    parser.add_argument("commit", help="the earlier version: whatever git knows")
    parser.add_argument("--mode", choices=["classic", "dledger", "both"], default="both")
    parser.add_argument("--no-secret", action="store_true", help="links without ha.secret_file")
    parser.add_argument("--no-back", action="store_true", help="only the upgrade")
    options = parser.parse_args()
    wrong = []
    with checked_out(options.commit) as old:
        for mode in ("classic", "dledger") if options.mode == "both" else (options.mode,):
            print(f"mode {mode}, from {options.commit}")
            wrong += run(old, mode, secret=not options.no_secret, back=not options.no_back)
    print("\n".join(wrong[:20]) or "nothing lost, nothing twice, all in order")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
