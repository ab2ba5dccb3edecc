"""Run each node in a network namespace of its own, with a veth pair as its cable to a bridge.

The bridge is in one more namespace, that of the clients: the thread that enters this context, and
all processes that it starts. Nothing is created in the namespace in which the tests began, and no
namespace has a name in the system. A namespace exists as long as a process in it. The first of
these is `cat`, which ends when its stdin pipe closes. So the kernel removes everything even after a
SIGKILL of the tests, once the nodes, which survive that, have ended.

Loss in one direction is a filter at the bridge's port (classic BPF, which has random numbers), so
the kernel needs neither netem nor nftables.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import secrets
import subprocess
from typing import Any

from tests.process.networks import Network

CLONE_NEWNET = 0x40000000
HUB = 254  # the last byte of the clients' address
RATE, BURST, QUEUE = "1mbit", "16kb", "300ms"  # of a slow link
# Classic BPF: load a word of the frame or a random one, compare, return a verdict.
LOAD, IF_EQUAL, IF_AT_LEAST, VERDICT = 32, 21, 53, 6
RANDOM = 0xFFFFF038  # SKF_AD_OFF + SKF_AD_RANDOM
DROP, GO_ON = 2, 0xFFFFFFFF  # TC_ACT_SHOT, TC_ACT_UNSPEC
MAC_AT = 2  # the last four bytes of the destination
PREFIX = 0x0A4D0000  # 10.77.0.0, the end of each MAC as well
_LIBC = ctypes.CDLL(None, use_errno=True)


def _address(number: int) -> str:
    return f"10.77.0.{number}"


def _mac(number: int) -> str:
    return f"02:00:0a:4d:00:{number:02x}"


def _program(lost: dict[int, float]) -> str:
    """Return the filter that drops a share of the frames to each node, in tc's notation."""
    steps: list[tuple[int, int, int, int]] = []
    for target, share in sorted(lost.items()):
        steps.append((LOAD, 0, 0, MAC_AT))
        if share >= 1:
            steps.append((IF_EQUAL, 0, 1, PREFIX | target))
        else:
            steps.append((IF_EQUAL, 0, 3, PREFIX | target))
            steps.append((LOAD, 0, 0, RANDOM))
            steps.append((IF_AT_LEAST, 1, 0, int(share * (1 << 32))))
        steps.append((VERDICT, 0, 0, DROP))
    steps.append((VERDICT, 0, 0, GO_ON))
    return ",".join([str(len(steps)), *(" ".join(map(str, step)) for step in steps)]) + ","


class Namespaces(Network):
    """The nodes 10.77.0.1 and so on. Raises OSError if the system refuses namespaces."""

    name = "namespaces"

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        self._before: int | None = None
        self.addresses = {
            number: {
                "api": f"tcp://{_address(number)}:109{number}1",
                "ha": f"{_address(number)}:109{number}2",
                "http": f"{_address(number)}:109{number}3",
            }
            for number in range(1, count + 1)
        }
        try:
            for number in (HUB, *self.addresses):
                self._hold(number)
            self._wire()
            self._changed(1)  # raises now if the kernel lacks this filter
            self._slow.add(1)
            self._paced(1)
            self.heal()
        except BaseException:
            self.close()
            raise

    # ---- creation and end

    def _hold(self, number: int) -> None:
        """Start the process that keeps a namespace alive."""
        command = ["unshare", "--net", "sh", "-c", "echo made; exec cat"]
        pipe = subprocess.PIPE
        holder = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._holders[number] = holder
        assert holder.stdout is not None
        said = holder.stdout.readline()
        if said != b"made\n":
            raise OSError(said.decode(errors="replace").strip() or "unshare printed nothing")

    def _inside(self, number: int) -> list[str]:
        return ["nsenter", f"--net={self.namespace(number)}"]

    def _run(self, number: int, *command: str, text: str = "") -> None:
        done = subprocess.run(
            [*self._inside(number), *command],
            input=text.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stdout.decode(errors='replace').strip()}")

    def _wire(self) -> None:
        hub = [
            "link set lo up",
            f"link add br0 address {_mac(HUB)} type bridge",
            f"addr add {_address(HUB)}/24 dev br0",
            "link set br0 up",
        ]
        for number in self.addresses:
            holder = self._holders[number].pid
            hub.append(f"link add port{number} type veth peer name eth0 netns {holder}")
            hub.append(f"link set port{number} master br0 up")
        self._run(HUB, "ip", "-batch", "-", text="\n".join(hub) + "\n")
        for number in self.addresses:
            own = [
                "link set lo up",
                f"link set eth0 address {_mac(number)}",
                f"addr add {_address(number)}/24 dev eth0",
                "link set eth0 up",
            ]
            # Permanent entries: else a cut of one direction would stop both, without ARP replies.
            for other in {HUB, *self.addresses} - {number}:
                address = f"{_address(other)} lladdr {_mac(other)}"
                own.append(f"neigh add {address} dev eth0 nud permanent")
            self._run(number, "ip", "-batch", "-", text="\n".join(own) + "\n")
            self._run(HUB, "tc", "qdisc", "add", "dev", f"port{number}", "clsact")

    def __enter__(self) -> Namespaces:
        self._before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        hub = os.open(f"/proc/{self._holders[HUB].pid}/ns/net", os.O_RDONLY)
        try:
            enter(hub)
        finally:
            os.close(hub)
        return self

    def close(self) -> None:
        """Leave the clients' namespace, and end all namespaces."""
        if self._before is not None:
            enter(self._before)
            os.close(self._before)
            self._before = None
        for holder in self._holders.values():
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.close()
            holder.wait(60)
            holder.stdout.close()
        self._holders.clear()

    def settings(self, folder: pathlib.Path) -> dict[str, dict[str, Any]]:
        """Return the settings that addresses beyond loopback need: a secret for the HA link."""
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(16))
        return {"ha": {"secret_file": str(secret)}, "api": {"allow_unauthenticated": True}}

    def namespace(self, number: int) -> str:
        """Return the path of the node's namespace."""
        return f"/proc/{self._holders[number].pid}/ns/net"

    # ---- the faults

    def unplug(self, number: int) -> None:
        """Set the bridge's port down, so that the node's interface has no carrier."""
        self._run(HUB, "ip", "link", "set", f"port{number}", "down")

    def plug(self, number: int) -> None:
        """Set the port up again."""
        self._run(HUB, "ip", "link", "set", f"port{number}", "up")

    def _changed(self, source: int) -> None:
        lost = {to: share for (by, to), share in self._lost.items() if by == source}
        where = ["dev", f"port{source}", "ingress", "prio", "1", "handle", "1", "protocol", "all"]
        self._run(
            *(HUB, "tc", "filter", "replace", *where),
            *("bpf", "da", "bytecode", _program(lost)),
        )

    def _paced(self, number: int) -> None:
        for place, device in ((HUB, f"port{number}"), (number, "eth0")):
            if number in self._slow:
                shape = ["tbf", "rate", RATE, "burst", BURST, "latency", QUEUE]
                self._run(place, "tc", "qdisc", "replace", "dev", device, "root", *shape)
            else:
                self._run(place, "tc", "qdisc", "del", "dev", device, "root")


def enter(namespace: int) -> None:
    """Move this thread, and all that it starts afterwards, into the namespace of a descriptor."""
    if _LIBC.setns(namespace, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
