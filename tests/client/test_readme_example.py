"""README's Python example shows its message, however late it becomes readable."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from hastore import Producer
from tests.client.conftest import Node

README = pathlib.Path(__file__).resolve().parent.parent.parent / "README.md"
OWN = b"hello from Python"


def example(node: Node) -> str:
    """Return the example's code, for a group of one node."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    [block] = [each for each in blocks if repr(OWN)[2:-1] in each]
    code, count = re.subn(r"^nodes = \[.*\]$", f"nodes = [{node.address!r}]", block, flags=re.M)
    assert count == 1
    return str(code)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_the_example_shows_its_message(
    node: Node, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """`late`: the replica has the message only after that many pulls of its queue."""
    with Producer([node.address]) as producer:
        for queue in range(4):
            producer.send_sync("greetings", b"hello, log", queue=queue)
    store = node.backend.store
    pull: Callable[..., Any] = store.reader.pull
    pulls = 0

    def lagging(topic: str, queue_id: int, queue_offset: int, **limits: Any) -> Any:
        nonlocal pulls
        [(queue, end)] = [
            (queue, units[-1][0])
            for (name, queue), units in store.units.items()
            if name == "greetings" and len(units) == 2
        ]
        if queue_id == queue:
            pulls += 1
            if pulls <= late:
                limits["limit_offset"] = end
                store.confirmed = end
            else:
                store.confirmed = None
        return pull(topic, queue_id, queue_offset, **limits)

    monkeypatch.setattr(store, "pull", lagging)
    exec(compile(example(node), "README.md", "exec"), {})  # noqa: S102 - it is the product's own
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ SYNC_MEM\(1\)", lines[0])
    assert lines[-1].endswith(repr(OWN)), lines
    assert sum(OWN.decode() in line for line in lines) == 1
