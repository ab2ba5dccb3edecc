"""What hastore uses of `threading`, `queue`, `time` and `concurrent.futures`, on virtual time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty
from typing import Any

from tests.world.scheduler import EPOCH_S, LOOK_S, Task, world


class Lock:
    """threading.Lock."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        active = world()
        if active.preempts:
            active.give_way()
        if not self._held:
            self._held = True
            return True
        if not blocking:
            return False
        limit = None if timeout < 0 else timeout
        if not active.wait_in(self._waiting, lambda: not self._held, limit):
            return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        if self._waiting:
            world().wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        if self._held or world().preempts:
            return self.acquire()
        self._held = True
        return True

    def __exit__(self, *_: object) -> None:
        if self._waiting or not self._held:
            self.release()
        self._held = False


class RLock(Lock):
    """threading.RLock."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        active = world()
        me = active.current
        if self._count and self._owner is me:
            self._count += 1
            return True
        if self._held or active.preempts:
            if not Lock.acquire(self, blocking, timeout):
                return False
        else:
            self._held = True
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        if not self._count or self._owner is not world().current:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._held = False
            if self._waiting:
                world().wake(self._waiting.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _release_save(self) -> int:
        count, self._count = self._count, 1
        self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self.acquire()
        self._count = count

    def _is_owned(self) -> bool:
        return bool(self._count) and self._owner is world().current


class Condition:
    """threading.Condition."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock if lock is not None else RLock()
        self._waiting: deque[Task] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        active, lock = world(), self._lock
        task = active.current
        assert task is not None, "what runs between threads must not wait"
        self._waiting.append(task)
        count = lock._release_save() if isinstance(lock, RLock) else lock.release()
        active.park(timeout)
        notified = task not in self._waiting  # whoever notifies takes it out
        if not notified:
            self._waiting.remove(task)
        if isinstance(lock, RLock):
            assert count is not None
            lock._acquire_restore(count)
        else:
            lock.acquire()
        return notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        return world().wait_for(predicate, self.wait, timeout)

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            world().wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """threading.Event."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for task in self._waiting:
            world().wake(task)
        self._waiting.clear()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        active = world()
        if self._set:
            active.give_way()
            return True
        task = active.current
        assert task is not None, "what runs between threads must not wait"
        self._waiting.append(task)
        active.park(timeout)
        was_set = task not in self._waiting
        if not was_set:
            self._waiting.remove(task)
        return was_set or self._set


class Thread:
    """threading.Thread; it belongs to the host of the thread that makes it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        del group
        self._call = lambda: target(*args, **(kwargs or {})) if target is not None else None
        self.name = name or "Thread"
        self.daemon = bool(daemon)
        self._task: Task | None = None

    def start(self) -> None:
        if self._task is not None:
            raise RuntimeError("threads can only be started once")
        active = world()
        self._task = active.spawn(active.host, self.name, self.run)
        self._task.locals[Thread] = self
        active.give_way()

    def run(self) -> None:
        self._call()

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        if task is None:
            raise RuntimeError("cannot join thread before it is started")
        world().wait_in(task.joiners, lambda: task.done, timeout)


def current_thread() -> Any:
    task = world().current
    if task is None:
        return threading.main_thread()
    return task.locals.setdefault(Thread, _Foreign(task))


class _Foreign(Thread):
    """A thread that the world has started."""

    def __init__(self, task: Task) -> None:
        super().__init__(name=task.name)
        self._task = task


def get_ident() -> int:
    task = world().current
    return 0 if task is None else task.number


class SimpleQueue:
    """queue.SimpleQueue."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def __class_getitem__(cls, _item: Any) -> type[SimpleQueue]:
        return cls

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        del block, timeout
        self._items.append(item)
        if self._waiting:
            world().wake(self._waiting.popleft())

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not world().wait_in(self._waiting, lambda: self._items, timeout if block else 0.0):
            raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Queue(SimpleQueue):
    """queue.Queue, without a limit; nobody joins it."""

    def task_done(self) -> None:
        pass


class ThreadPoolExecutor:
    """concurrent.futures.ThreadPoolExecutor, as far as `map` within `with`."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "Pool") -> None:
        del max_workers
        self._name = thread_name_prefix
        self._threads: list[Thread] = []

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()

    def map(self, call: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        results: list[list[Any]] = []
        for item in items:
            result: list[Any] = []
            results.append(result)
            thread = Thread(
                target=lambda result=result, item=item: result.append(call(item)), name=self._name
            )
            self._threads.append(thread)
            thread.start()
        for thread in self._threads:
            thread.join()
        return iter([result[0] for result in results])


def sleep(seconds: float) -> None:
    world().sleep(seconds)


def monotonic() -> float:
    active = world()
    active.now += LOOK_S  # as `Host.monotonic`: nothing is called as often
    task = active.current
    return active.now + (active.outside if task is None else task.host).booted_s


def monotonic_ns() -> int:
    return int(monotonic() * 1e9)


def clock_gettime(which: int) -> float:
    """The monotonic clock: no host is suspended, but by a pause of its processes."""
    assert which in (time.CLOCK_BOOTTIME, time.CLOCK_MONOTONIC), which
    return monotonic()


def wall() -> float:
    return world().host.wall()


def wall_ns() -> int:
    return int(wall() * 1e9)


def elapsed() -> float:
    """For measurements, which no walk may depend on: `time.perf_counter` and its like."""
    return world().now + EPOCH_S


def elapsed_ns() -> int:
    return int(elapsed() * 1e9)
