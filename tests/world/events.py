"""What may happen in a walk: each kind is a function that begins it and, for some, one for its end.

An event is drawn ahead, with all that it chooses, so that it may be left out without a change of
the others. Kinds are of three classes:

    tame     no fault of it may cost an acknowledged message, however often it comes
    loss     costs a node its copy: only the walk's victims have such faults, no more nodes than
             may fail
    beyond   what no group of this kind promises to survive: from then on messages may be lost, but
             readers get no foreign bytes, logs are whole and no thread dies of a defect
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hastore.addresses import node_path
from hastore.config.model import Mode
from tests.world import members

if TYPE_CHECKING:
    from tests.world.walk import Walk
    from tests.world.zookeeper import ZooKeeper

MONTH_S = 30 * 86_400.0


@dataclass(frozen=True)
class Event:
    """One event: `node` and `other` are indexes into the group, `part` is in [0, 1)."""

    at_s: float
    kind: str
    node: int
    other: int
    lasts_s: float
    part: float

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {KINDS[self.kind].text.format(**_words(self))}"


def _words(event: Event) -> dict[str, Any]:
    return {
        "n": f"n{event.node + 1}", "o": f"n{event.other + 1}", "s": f"{event.lasts_s:.1f} s",
        "p": f"{event.part:.2f}",
    }  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of event."""

    group: str  # tame, loss, beyond
    text: str
    begin: Callable[[Walk, Event], object]
    end: Callable[[Walk, Event], object] | None = None
    modes: tuple[Mode, ...] = (Mode.CLASSIC, Mode.DLEDGER)
    weight: int = 2
    registry: bool = False  # only where the roles are in ZooKeeper


def _both(one: str, other: str) -> set[tuple[str, str]]:
    return {(one, other), (other, one)}


def _names(walk: Walk, event: Event) -> tuple[str, str]:
    return walk.machine(event.node).name, walk.machine(event.other).name


def _cut(walk: Walk, ways: set[tuple[str, str]]) -> None:
    walk.network.cut |= ways


def _join(walk: Walk, ways: set[tuple[str, str]]) -> None:
    walk.network.cut -= ways


def _around(walk: Walk, event: Event) -> set[tuple[str, str]]:
    name = walk.machine(event.node).name
    return {
        way for host in walk.network.hosts.values() if host.name != name
        for way in _both(name, host.name)
    }  # fmt: skip


def _client_ways(walk: Walk, event: Event) -> set[tuple[str, str]]:
    return _both(walk.client(event.part).name, walk.machine(event.node).name)


def _lossy(walk: Walk, event: Event, share: float) -> None:
    for way in _both(*_names(walk, event)):
        walk.network.loss[way] = share
        if not share:
            del walk.network.loss[way]


def _slow_links(walk: Walk, event: Event, seconds: float) -> None:
    for host in walk.network.hosts.values():
        for way in _both(walk.machine(event.node).name, host.name):
            walk.network.slow_s[way] = seconds


def _fail_disk(call: str, share: float) -> Callable[[Walk, Event], None]:
    def begin(walk: Walk, event: Event) -> None:
        walk.machine(event.node).disk.failing[call] = share

    return begin


def _disk(attribute: str, value: Any) -> Callable[[Walk, Event], None]:
    def change(walk: Walk, event: Event) -> None:
        setattr(walk.machine(event.node).disk, attribute, value)

    return change


def _clock(seconds: float) -> Callable[[Walk, Event], None]:
    def jump(walk: Walk, event: Event) -> None:
        walk.machine(event.node).wall_ahead_s += seconds * (0.5 + event.part)

    return jump


def _retain(walk: Walk, event: Event) -> None:
    walk.history.expires = True
    walk.machine(event.node).retain(32 * 1024)


def _keep(walk: Walk, event: Event) -> None:
    walk.machine(event.node).retain(None)


def _pause(walk: Walk, event: Event) -> None:
    walk.machine(event.node).paused = True


def _resume(walk: Walk, event: Event) -> None:
    walk.world.resume(walk.machine(event.node))


def _kill_all(walk: Walk, event: Event) -> None:
    del event
    for machine in walk.machines:
        machine.kill()


def _cut_all_power(walk: Walk, event: Event) -> None:
    del event
    for machine in walk.machines:
        machine.cut_power()


def _demote(walk: Walk, event: Event) -> None:
    walk.machine(event.node).demote()


def _promote(walk: Walk, event: Event) -> None:
    walk.machine(event.node).promote()


def _rivals(walk: Walk, event: Event) -> None:
    walk.machine(event.node).promote()
    walk.machine(event.other).promote()


def _transfer(walk: Walk, event: Event) -> None:
    for machine in walk.machines:
        machine.ask("transfer", event.node + 1)


def _kill_client(walk: Walk, event: Event) -> None:
    client = walk.client(event.part)
    client.kill()
    walk.world.after(event.lasts_s, walk.start_client, client)


def _pause_client(walk: Walk, event: Event) -> None:
    walk.client(event.part).paused = True


def _resume_client(walk: Walk, event: Event) -> None:
    walk.world.resume(walk.client(event.part))


def _swap(walk: Walk, event: Event) -> None:
    """Two machines get each other's disk, unless one of them has another's already."""
    here = {event.node, event.other}
    if not any(here & {one.node, one.other} for one in walk.swaps):
        walk.swaps.add(event)
        _exchange(walk, event)


def _swap_back(walk: Walk, event: Event) -> None:
    if event in walk.swaps:
        walk.swaps.discard(event)
        _exchange(walk, event)


def _exchange(walk: Walk, event: Event) -> None:
    """Two machines are stopped, and started with each other's disk, as after a repair."""
    one, other = walk.machine(event.node), walk.machine(event.other)
    one.kill()
    other.kill()
    one.disk, other.disk = other.disk, one.disk
    one.start()
    other.start()


def _rot_log(walk: Walk, event: Event) -> None:
    one = walk.machine(event.node)
    others = [machine for machine in walk.machines if machine is not one]
    if not one.rot(event.part, log=True, others=others):
        walk.history.excuse()  # nobody else had it yet, so nobody can mend it


def _rot_any(walk: Walk, event: Event) -> None:
    walk.machine(event.node).rot(event.part, log=False)


def _remove_file(walk: Walk, event: Event) -> None:
    machine = walk.machine(event.node)
    path = machine.choose_file(event.part)
    if path is not None:
        machine.disk.remove(path)


def _remove_folder(walk: Walk, event: Event) -> None:
    machine = walk.machine(event.node)
    path = machine.choose_folder(event.part)
    if path is not None:
        machine.disk.remove_tree(path)


def _move_folder(walk: Walk, event: Event) -> None:
    machine = walk.machine(event.node)
    path = machine.choose_folder(event.part)
    if path is not None and not machine.disk.exists(f"{path}.moved"):
        machine.disk.rename(path, f"{path}.moved")


def _move_back(walk: Walk, event: Event) -> None:
    walk.machine(event.node).move_back()


def _take_image(walk: Walk, event: Event) -> None:
    walk.machine(event.node).image = walk.machine(event.node).disk.image()


def _put_back(walk: Walk, event: Event) -> None:
    walk.machine(event.node).put_back_image()


def _restore_file(walk: Walk, event: Event) -> None:
    walk.machine(event.node).restore_file(event.part)


def _foreign_file(walk: Walk, event: Event) -> None:
    walk.machine(event.node).take_file_of(walk.machine(event.other), event.part)


def _lose_disk(walk: Walk, event: Event) -> None:
    walk.machine(event.node).lose_disk()


def _zookeeper(walk: Walk) -> ZooKeeper:
    assert walk.zookeeper is not None, "this walk has no ZooKeeper"
    return walk.zookeeper


def _lose_orders(walk: Walk) -> None:
    for machine in walk.machines:
        machine.orders.lost_s = walk.world.now


def _empty_zookeeper(walk: Walk, event: Event) -> None:
    del event
    _lose_orders(walk)
    _zookeeper(walk).empty()


def _restore_zookeeper(walk: Walk, event: Event) -> None:
    del event
    _lose_orders(walk)
    _zookeeper(walk).put_back()


def _from_zookeeper(walk: Walk, event: Event) -> set[tuple[str, str]]:
    return _both(walk.machine(event.node).name, _zookeeper(walk).name)


def _change_znode(walk: Walk, event: Event, data: bytes | None) -> None:
    machine = walk.machine(event.node)
    machine.orders.lost_s = walk.world.now
    config = machine.config
    _zookeeper(walk).change(node_path(config.cluster, config.group, machine.number), data)


_CLASSIC, _DLEDGER = (Mode.CLASSIC,), (Mode.DLEDGER,)

KINDS: dict[str, Kind] = {
    "kill": Kind("tame", "{n} is killed", lambda w, e: w.machine(e.node).kill(), weight=4),
    "kill all": Kind("tame", "every node is killed", _kill_all, weight=1),
    "restart": Kind("tame", "{n} is stopped", lambda w, e: w.machine(e.node).stop()),
    "pause": Kind("tame", "{n} is stopped by a signal for {s}", _pause, _resume, weight=3),
    "partition": Kind(
        "tame", "{n} and {o} do not reach each other for {s}",
        lambda w, e: _cut(w, _both(*_names(w, e))), lambda w, e: _join(w, _both(*_names(w, e))),
        weight=3,
    ),
    "one way": Kind(
        "tame", "nothing passes from {n} to {o} for {s}",
        lambda w, e: _cut(w, {_names(w, e)}), lambda w, e: _join(w, {_names(w, e)}), weight=3,
    ),
    "isolate": Kind(
        "tame", "{n} reaches nobody for {s}",
        lambda w, e: _cut(w, _around(w, e)), lambda w, e: _join(w, _around(w, e)), weight=3,
    ),
    "client cut off": Kind(
        "tame", "a client ({p}) and {n} do not reach each other for {s}",
        lambda w, e: _cut(w, _client_ways(w, e)), lambda w, e: _join(w, _client_ways(w, e)),
    ),
    "loss": Kind(
        "tame", "half of what {n} and {o} send each other is lost for {s}",
        lambda w, e: _lossy(w, e, 0.5), lambda w, e: _lossy(w, e, 0.0),
    ),
    "delay": Kind(
        "tame", "the links of {n} take up to 0.4 s for {s}",
        lambda w, e: _slow_links(w, e, 0.4), lambda w, e: _slow_links(w, e, 0.0),
    ),
    "reorder": Kind(
        "tame", "bytes of one connection of {n} overtake those of another for {s}",
        lambda w, e: _slow_links(w, e, 0.05), lambda w, e: _slow_links(w, e, 0.0),
    ),
    "reset": Kind(
        "tame", "the connections of {n} and {o} are reset",
        lambda w, e: w.network.reset_all(*_names(w, e)),
    ),
    "slow disk": Kind(
        "tame", "the disk of {n} is slow for {s}", _disk("slow_s", 0.3), _disk("slow_s", 0.0)
    ),
    "full disk": Kind(
        "tame", "the disk of {n} is full for {s}", _disk("full", True), _disk("full", False)
    ),
    "read error": Kind(
        "tame", "a third of the reads of {n} fail for {s}",
        _fail_disk("read", 0.3), _fail_disk("read", 0.0),
    ),
    "write error": Kind(
        "tame", "a tenth of the writes of {n} fail for {s}",
        _fail_disk("write", 0.1), _fail_disk("write", 0.0),
    ),
    "sync error": Kind(
        "tame", "a third of the syncs of {n} fail for {s}",
        _fail_disk("sync", 0.3), _fail_disk("sync", 0.0),
    ),
    "clock ahead": Kind("tame", "the clock of {n} jumps ahead by seconds", _clock(20.0)),
    "clock back": Kind("tame", "the clock of {n} jumps back by seconds", _clock(-20.0)),
    "clock months ahead": Kind(
        "tame", "the clock of {n} jumps ahead by months", _clock(4 * MONTH_S)
    ),
    "clock months back": Kind(
        "tame", "the clock of {n} jumps back by months", _clock(-4 * MONTH_S)
    ),
    "retention": Kind("tame", "{n} keeps only 32 KiB for {s}", _retain, _keep, weight=3),
    "promote": Kind("tame", "an operator promotes {n}", _promote, modes=_CLASSIC, weight=6),
    "rivals": Kind(
        "tame", "two operators promote {n} and {o} at once", _rivals, modes=_CLASSIC, weight=3
    ),
    "demote": Kind("tame", "an operator makes {n} a slave", _demote, modes=_CLASSIC),
    "transfer": Kind(
        "tame", "operators ask every node to hand over to {n}", _transfer, modes=_DLEDGER, weight=4
    ),
    "node added": Kind("tame", "a new node is added", lambda w, e: members.add(w), weight=3),
    "node removed": Kind(
        "tame", "{n} is removed", lambda w, e: members.remove(w, e.node), weight=1
    ),
    "node replaced": Kind(
        "tame", "{n} is replaced by a new node", lambda w, e: members.replace(w, e.node),
        modes=_DLEDGER,
    ),
    "kill client": Kind("tame", "a client ({p}) is killed, and comes back after {s}", _kill_client),
    "pause client": Kind(
        "tame", "a client ({p}) is stopped by a signal for {s}", _pause_client, _resume_client
    ),
    "swap disks": Kind(
        "tame", "{n} and {o} have each other's disk for {s}", _swap, _swap_back, weight=1
    ),
    "zookeeper down": Kind(
        "tame", "ZooKeeper is down for {s}", lambda w, e: _zookeeper(w).kill(),
        lambda w, e: _zookeeper(w).start(), modes=_CLASSIC, weight=5, registry=True,
    ),
    "zookeeper emptied": Kind(
        "tame", "ZooKeeper loses all its data", _empty_zookeeper,
        modes=_CLASSIC, weight=4, registry=True,
    ),
    "zookeeper restored": Kind(
        "tame", "ZooKeeper is backed up; after {s} the backup is put in its place",
        lambda w, e: _zookeeper(w).take_image(), _restore_zookeeper,
        modes=_CLASSIC, weight=4, registry=True,
    ),
    "zookeeper cut off": Kind(
        "tame", "{n} and ZooKeeper do not reach each other for {s}",
        lambda w, e: _cut(w, _from_zookeeper(w, e)), lambda w, e: _join(w, _from_zookeeper(w, e)),
        modes=_CLASSIC, weight=5, registry=True,
    ),
    "znode deleted": Kind(
        "tame", "the znode of {n} is deleted", lambda w, e: _change_znode(w, e, None),
        modes=_CLASSIC, registry=True,
    ),
    "znode spoilt": Kind(
        "tame", "the znode of {n} gets a wrong content",
        lambda w, e: _change_znode(w, e, b'{"role": "KING"}'), modes=_CLASSIC, registry=True,
    ),
    "power": Kind(
        "loss", "{n} loses power", lambda w, e: w.machine(e.node).cut_power(), weight=4
    ),
    "power of the disk": Kind(
        "loss", "the file system of {n} is shut down and mounted again",
        lambda w, e: w.machine(e.node).mount_anew(), weight=2,
    ),
    "power of all": Kind("loss", "all lose power at once", _cut_all_power),
    "rot in the log": Kind("loss", "a byte rots in the log of {n} ({p})", _rot_log, weight=3),
    "lost disk": Kind(
        "loss", "{n} comes back with an empty disk", _lose_disk, modes=_DLEDGER
    ),
    "rot": Kind("beyond", "a byte rots in a file of {n} ({p})", _rot_any, weight=3),
    "file removed": Kind("beyond", "a file of {n} is removed ({p})", _remove_file),
    "folder removed": Kind("beyond", "a folder of {n} is removed ({p})", _remove_folder),
    "folder moved": Kind(
        "beyond", "a folder of {n} is moved away for {s} ({p})", _move_folder, _move_back
    ),
    "old disk": Kind(
        "beyond", "the disk of {n} is copied; after {s} the copy is put in its place",
        _take_image, _put_back, weight=3,
    ),
    "file restored": Kind(
        "beyond", "the disk of {n} is copied; after {s} one old file is put back ({p})",
        _take_image, _restore_file,
    ),
    "foreign file": Kind("beyond", "{n} gets a file of {o} ({p})", _foreign_file),
}  # fmt: skip


def draw(
    chance: random.Random, mode: Mode, nodes: int, seconds: float, groups: set[str],
    victims: list[int], *, durable: bool, registry: bool = False,
) -> list[Event]:  # fmt: skip
    """Return the events of a walk in order, those of the classes in `groups`."""
    kinds = [
        name for name, kind in KINDS.items()
        if mode in kind.modes and (registry or not kind.registry)
        and (kind.group in groups or (durable and name.startswith("power")))
        for _ in range(kind.weight)
    ]  # fmt: skip
    if not durable and len(victims) < nodes:
        kinds = [name for name in kinds if name != "power of all"]
    favourites = [chance.choice(kinds) for _ in range(4)]
    events = []
    for _ in range(chance.randrange(4, 16)):
        kind = chance.choice(favourites if chance.random() < 0.5 else kinds)
        node, other = chance.sample(range(nodes), 2)
        if KINDS[kind].group == "loss" and not (durable and kind.startswith("power")):
            node = chance.choice(victims)
            other = chance.choice([n for n in range(nodes) if n != node])
        lasts = chance.choice((0.3, 1.5, 4.0, 8.0)) * (0.5 + chance.random())
        at = 2.0 + chance.random() * seconds
        events.append(Event(round(at, 2), kind, node, other, round(lasts, 2), chance.random()))
    return sorted(events, key=lambda event: event.at_s)
