"""The write gate: one writer's epoch at a time, and closing waits for an append in progress."""

import threading

from hastore.ha.node.gate import WriteGate


def test_only_the_open_epoch_enters():
    gate = WriteGate()
    with gate.entered(5) as mine:
        assert not mine
    with gate.lock:
        gate.open(5)
    with gate.entered(5) as mine:
        assert mine
    with gate.entered(4) as mine:
        assert not mine
    gate.close()
    assert gate.epoch is None
    with gate.entered(5) as mine:
        assert not mine


def test_closing_waits_for_an_append_under_way():
    gate = WriteGate()
    gate.open(5)
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    order = []

    def append():
        with gate.entered(5) as mine:
            assert mine
            inside.set()
            assert go_on.wait(60)
            order.append("appended")

    def close():
        gate.close()
        order.append("closed")
        closed.set()

    threads = [threading.Thread(target=append), threading.Thread(target=close)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    assert not closed.wait(0.05)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert order == ["appended", "closed"]


def test_the_holder_may_enter_again():
    gate = WriteGate()
    with gate.lock:
        gate.open(7)
        with gate.entered(7) as mine:
            assert mine
        gate.close()
