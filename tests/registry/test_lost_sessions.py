"""A connection to ZooKeeper is lost for a moment only: kazoo reconnects, without its watches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.protocol.states import EventType, KazooState, WatchedEvent, ZnodeStat

from hastore.clock import SYSTEM_CLOCK
from hastore.registry import session as session_module
from hastore.registry.session import Session, Unreachable

STAT = ZnodeStat(1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1)


class Done:
    """An operation of kazoo's that has its result."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def wait(self, _timeout: float) -> bool:
        return True

    def get_nowait(self) -> Any:
        return self._value


class Client:
    """KazooClient, as far as a session uses it here."""

    connected = True

    def __init__(self, **_options: Any) -> None:
        self.listener: Callable[[str], None] = lambda _state: None
        self.watches: list[Callable[[Any], None]] = []
        made.append(self)

    def add_listener(self, listener: Callable[[str], None]) -> None:
        self.listener = listener

    def start_async(self) -> Done:
        return Done()

    def get_async(self, _path: str, watch: Callable[[Any], None]) -> Done:
        self.watches.append(watch)
        return Done((b"data", STAT))

    def drop(self) -> None:
        """Lose the connection, and have another one at once: what kazoo calls then."""
        watches, self.watches = self.watches, []
        self.listener(KazooState.SUSPENDED)
        for watch in watches:
            watch(WatchedEvent(EventType.NONE, "CONNECTING", None))
        self.listener(KazooState.CONNECTED)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


made: list[Client] = []


def test_a_session_that_was_lost_for_a_moment_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "KazooClient", Client)
    told = threading.Event()
    session = Session(
        "127.0.0.1:1", None, SYSTEM_CLOCK, tls=None, stopping=threading.Event(), on_event=told.set
    )
    assert session.get("/a") is not None
    client = made[-1]
    client.watches.pop()(WatchedEvent(EventType.CHANGED, "CONNECTED", "/a"))
    assert session.take_fired() == {"/a"}
    session.raise_if_lost()
    session.get("/a")
    told.clear()
    client.drop()
    assert told.is_set() and session.take_fired() == set(), "no path has changed"
    with pytest.raises(Unreachable, match="is lost"):
        session.raise_if_lost()
    session.close()
