"""DLedger 0.3.1.2 as a peer: three servers, each in a JVM of its own, and DLedger's Java client.

    with Ledgers(folder) as ledgers:
        ledgers.start()
        ledgers.blocking(1_000)      # ms of each append
        ledgers.threads(64, 20_000)  # appends per second

All settings are DLedger's defaults: it acknowledges what a majority has in its page caches, and
syncs every 10 ms.
"""

import pathlib
import shutil
import time
from typing import Any

from benchmarks.common import BODY_BYTES, Cost, free_ports, wait_until
from benchmarks.jvm import Jvm
from benchmarks.maven import class_path

GROUP = "bench"
NAMES = ("n0", "n1", "n2")
HEADER_BYTES = 48
WAIT_S = 120.0
Status = dict[str, Any]


class Ledgers:
    """Three servers and a client."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Choose ports. Raises NoPeer without Java."""
        self._class_path = class_path("rocketmq")
        self.folder = folder / "dledger"
        self.folder.mkdir()
        ports = free_ports(len(NAMES))
        self._peers = {name: f"{name}-127.0.0.1:{ports.pop()}" for name in NAMES}
        self.jvms: dict[str, Jvm] = {}

    def __enter__(self) -> "Ledgers":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def launch(self) -> "Ledgers":
        """Start the servers' JVMs; no server is open yet."""
        for name in NAMES:
            self.jvm(name)
        return self

    def start(self) -> "Ledgers":
        """Open all servers and the client; return when an append was acknowledged."""
        self.launch()
        for name in NAMES:
            self.open(name)
        client = self.jvm("client")
        client.call("ledger.client", group=GROUP, peers=self.peers(), size=BODY_BYTES)
        client.call("ledger.until_acknowledged", limit_s=60)
        return self

    def peers(self, *names: str) -> str:
        """Return DLedger's text of the members."""
        return ";".join(self._peers[name] for name in names or NAMES)

    def store(self, name: str) -> pathlib.Path:
        """Where a server's files lie."""
        return self.folder / name / f"dledger-{name}"

    def jvm(self, name: str) -> Jvm:
        """Start a JVM."""
        self.jvms[name] = Jvm(self._class_path, self.folder, name)
        return self.jvms[name]

    def open(self, name: str, *members: str) -> None:
        """Open a server, whose group has `members` (all)."""
        config = {"group": GROUP, "selfId": name, "peers": self.peers(*members)}
        config["storeBaseDir"] = str(self.folder / name)
        self.jvms[name].call("ledger.open", config=config)

    def shut(self, *names: str) -> None:
        """Close servers cleanly; their JVMs go on, warm."""
        for name in names:
            self.jvms[name].call("ledger.close")

    def status(self, name: str) -> Status:
        """Return a server's state."""
        found: Status = self.jvms[name].call("ledger.status")
        return found

    def wait_leader(self, *names: str) -> str:
        """Wait until one of the open servers leads the others; return its name."""

        def found() -> str | None:
            states = {name: self.status(name) for name in names}
            leaders = [name for name, state in states.items() if state["role"] == "LEADER"]
            agreed = len({(state["leader"], state["term"]) for state in states.values()}) == 1
            return leaders[0] if len(leaders) == 1 and agreed else None

        leader: str = wait_until(found, WAIT_S, "DLedger elects no leader", poll_s=0.05)
        return leader

    def fill(self, name: str, count: int, *, seed: int, term: int | None = None) -> None:
        """Append entries of 1 KiB to a server's log while it is a group of its own."""
        if term is not None:
            (self.store(name) / "currterm").write_text(f"currTerm={term}\nvoteLeader=\n")
        self.open(name, name)
        self.wait_leader(name)
        self.jvms[name].call("ledger.fill", count=count, size=BODY_BYTES, seed=seed)
        self.shut(name)

    def empty(self) -> None:
        """Remove the files of all servers, which must be closed."""
        for name in NAMES:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    # ---- loads

    def blocking(self, count: int) -> list[float]:
        """Return the duration of each of `count` appends, in ms."""
        took: list[float] = self.jvms["client"].call("ledger.blocking", count=count)
        return took

    def threads(self, threads: int, count: int) -> float:
        """Return the appends per second of `threads` threads of the client."""
        seconds = self.jvms["client"].call("ledger.threads", threads=threads, count=count)
        return count / float(seconds)

    def fail_over(self) -> float:
        """Kill the leader; return the seconds to the next acknowledged append. It comes back."""
        name = self.wait_leader(*NAMES)
        client = self.jvms["client"]
        client.call("ledger.blocking", count=1)
        began = time.perf_counter()
        self.jvms.pop(name).kill()
        client.call("ledger.until_acknowledged", limit_s=60)
        seconds = time.perf_counter() - began
        self.jvm(name)
        self.open(name)
        self.wait_leader(*NAMES)
        return seconds

    def restart(self) -> None:
        """Begin anew: empty servers that are closed, in new JVMs."""
        self._kill()
        self.empty()
        self.launch()

    def catch_up(self, count: int) -> float:
        """Return the seconds in which an empty follower gets `count` entries of 1 KiB."""
        self.empty()
        for name in ("n0", "n1"):
            self.fill(name, count, seed=1)
        self.open("n0")
        self.open("n1")
        self.wait_leader("n0", "n1")
        self.open("n2")
        seconds = float(self.jvms["n2"].call("ledger.wait", end=count - 1, limit_s=WAIT_S))
        self.shut(*NAMES)
        return seconds

    def compare(self, count: int) -> float:
        """Return the seconds in which the leader finds where a follower's log diverges.

        The last `count` entries of the follower are of an older term than the leader's.
        """
        self.empty()
        for name in NAMES:
            self.fill(name, 1, seed=1)
            self.fill(name, count, seed=2, term=1 if name == "n2" else 2)
        self.open("n0")
        self.open("n1")
        self.wait_leader("n0", "n1")
        self.open("n2")
        seconds = float(self.jvms["n2"].call("ledger.wait", leave=count, limit_s=WAIT_S))
        self.jvms["n2"].call("ledger.wait", end=count, limit_s=WAIT_S)
        self.shut(*NAMES)
        return seconds

    # ---- processes

    def costs(self) -> dict[str, Cost]:
        """Return the CPU and memory of each process."""
        return {name: jvm.cost() for name, jvm in self.jvms.items()}

    def close(self) -> None:
        """Kill all processes at once."""
        self._kill()

    def _kill(self) -> None:
        for jvm in self.jvms.values():
            jvm.kill()
        self.jvms.clear()
