"""What a client needs of its process."""

import select
import sys
from types import SimpleNamespace

import pytest

from hastore import Producer
from hastore.client.connections.transport_factory import make_transport
from hastore.errors import UsageError

ADDRESS = "tcp://127.0.0.1:9"
REMEDY = r"patch_all\(select=False, thread=False\)"


def test_a_process_without_epoll(monkeypatch):
    """gevent takes it away; a client raised AttributeError."""
    monkeypatch.delattr(select, "epoll")
    with pytest.raises(UsageError, match=REMEDY):
        make_transport((ADDRESS,))


@pytest.mark.parametrize("patched", ["threading", "socket"])
def test_a_producer_whose_threads_gevent_has_replaced(monkeypatch, patched):
    """Its thread waited in epoll, and with it the whole process, for ever."""
    gevent = SimpleNamespace(is_module_patched=lambda name: name == patched)
    monkeypatch.setitem(sys.modules, "gevent.monkey", gevent)
    if patched == "threading":
        with pytest.raises(UsageError, match=REMEDY):
            Producer([ADDRESS])
    else:
        Producer([ADDRESS]).close()
