"""What hastore uses of `select` and `selectors`."""

from __future__ import annotations

import errno
import os
import select as real_select
import selectors as real_selectors
from typing import Any

from tests.world.network import ERR, HUP, IN, OUT, Pollable, of_world, running, wait_for_events
from tests.world.scheduler import world
from tests.world.sockets import error

_ONCE = real_select.EPOLLONESHOT


def pollable(target: Any) -> tuple[int, Pollable]:
    number = target if isinstance(target, int) else target.fileno()
    found = of_world().table.get(number)
    if found is None:
        raise error(errno.EBADF)
    return number, found


class Epoll(Pollable):
    """select.epoll, level-triggered."""

    def __init__(self, sizehint: int = -1, flags: int = 0) -> None:
        del sizehint, flags
        super().__init__()
        # Descriptor: [mask, pollable, armed, place in the order of registration]
        self._items: dict[int, list[Any]] = {}
        self._registered = 0
        # The few of them that may be ready. Whatever becomes ready has changed before; only room
        # may come without a change, so an item that waits for room stays.
        self._likely: dict[int, None] = {}
        self.closed = False

    def fileno(self) -> int:
        return self.descriptor

    def register(self, fd: Any, eventmask: int = IN | OUT) -> None:
        number, found = pollable(fd)
        if number in self._items:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._registered += 1
        self._items[number] = [eventmask, found, True, self._registered]
        self._watch(number, found, eventmask)

    def modify(self, fd: Any, eventmask: int) -> None:
        number, found = pollable(fd)
        if number not in self._items:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._items[number] = [eventmask, found, True, self._items[number][3]]
        self._watch(number, found, eventmask)

    def _watch(self, number: int, found: Pollable, mask: int) -> None:
        found.watchers[self] = mask | ERR | HUP
        self._likely[number] = None
        if found.events() & (mask | ERR | HUP):
            self.changed()

    def unregister(self, fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        item = self._items.pop(number, None)
        if item is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._likely.pop(number, None)
        item[1].watchers.pop(self, None)

    def poke(self, changed: Pollable) -> None:
        item = self._items.get(changed.number)
        if item is not None and item[2]:
            self._likely[changed.number] = None
            self.changed()

    def events(self) -> int:
        return IN if self._ready(1, peek=True) else 0

    def _ready(self, most: int, *, peek: bool = False) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        likely, items = self._likely, self._items
        numbers = list(likely)
        if len(numbers) > 1:
            numbers.sort(key=lambda number: items[number][3])
        for number in numbers:
            item = items[number]
            mask, there, armed, _ = item
            if there.descriptor != number:  # closed: the kernel forgets it
                del items[number], likely[number]
                continue
            events = there.events() & (mask | ERR | HUP) if armed else 0
            if events:
                found.append((number, events))
                if mask & _ONCE and not peek:
                    item[2] = False
                if len(found) == most:
                    break
            elif not armed or not mask & OUT:
                del likely[number]
        return found

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        most = maxevents if maxevents > 0 else 1 << 30
        found = self._ready(most)
        if found or timeout == 0:
            world().give_way()
            return found
        active, watchers = world(), self.watchers
        end = None if timeout is None or timeout < 0 else active.now + timeout
        while not found:
            left_s = None if end is None else end - active.now
            if left_s is not None and left_s <= 0:
                break
            task = running(active)
            watchers[task] = IN
            active.park(left_s)
            watchers.pop(task, None)
            found = self._ready(most)
        return found

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for item in self._items.values():
                item[1].watchers.pop(self, None)
            self._items.clear()
            self._likely.clear()
            self.forget()


class Poll:
    """select.poll."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[int, Pollable]] = {}

    def register(self, fd: Any, eventmask: int = IN | OUT) -> None:
        number, found = pollable(fd)
        self._items[number] = (eventmask, found)

    def unregister(self, fd: Any) -> None:
        del self._items[fd if isinstance(fd, int) else fd.fileno()]

    def _ready(self) -> list[tuple[int, int]]:
        found = [(n, one.events() & (mask | ERR | HUP)) for n, (mask, one) in self._items.items()]
        return [(number, events) for number, events in found if events]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        limit_s = None if timeout is None or timeout < 0 else timeout / 1000.0
        watched = [one for _, one in self._items.values()]
        return wait_for_events(watched, self._ready, limit_s)


class Selector:
    """selectors.DefaultSelector."""

    def __init__(self) -> None:
        self._epoll = Epoll()
        self._keys: dict[int, real_selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> real_selectors.SelectorKey:
        self._epoll.register(fileobj, self._mask(events))
        return self._note(fileobj, events, data)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> real_selectors.SelectorKey:
        self._epoll.modify(fileobj, self._mask(events))
        return self._note(fileobj, events, data)

    def _note(self, fileobj: Any, events: int, data: Any) -> real_selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[number] = real_selectors.SelectorKey(fileobj, number, events, data)
        return self._keys[number]

    def unregister(self, fileobj: Any) -> real_selectors.SelectorKey:
        self._epoll.unregister(fileobj)
        return self._keys.pop(fileobj.fileno())

    def get_map(self) -> dict[int, real_selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        found = []
        for number, mask in self._epoll.poll(timeout):
            key = self._keys.get(number)
            if key is not None:
                events = 1 if mask & ~OUT else 0
                events |= 2 if mask & ~IN else 0
                found.append((key, events & key.events))
        return found

    def close(self) -> None:
        self._epoll.close()

    @staticmethod
    def _mask(events: int) -> int:
        return (IN if events & 1 else 0) | (OUT if events & 2 else 0)


def select_call(
    _read: Any, _write: Any, _other: Any, timeout: float | None = None
) -> tuple[list[Any], list[Any], list[Any]]:
    """select.select, as hastore uses it: to wait."""
    world().sleep(timeout or 0.0)
    return [], [], []
