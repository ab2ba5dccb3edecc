"""The public names: one Status, readable results and help, and a complete page of the API."""

from __future__ import annotations

import inspect
import pathlib
import pydoc
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any, get_type_hints

import pytest

import hastore
from hastore import Consumer, OutgoingMessage, Producer, SendResult, Status, aio, errors
from hastore.client.producer.cluster_producer import ClusterProducer
from hastore.client.producer.preparer import Body
from hastore.errors import NotStoredError, PositionBehindError
from hastore.protocol import api
from tests.client.conftest import Node

Bodies = Iterable[OutgoingMessage | Body]
PAGE = (pathlib.Path(__file__).parent.parent.parent / "docs" / "python-api.md").read_text()


def classes() -> list[type]:
    """Return the public classes of hastore, hastore.aio and hastore.errors."""
    found = [getattr(module, name) for module in (hastore, aio) for name in module.__all__]
    found += [each for each in vars(errors).values() if isinstance(each, type)]
    return [each for each in dict.fromkeys(found) if each.__module__.startswith("hastore")]


def own_names(owner: type) -> set[str]:
    """Return the names that a class or a base of it in hastore defines."""
    bases = [base for base in owner.__mro__ if base.__module__.startswith("hastore")]
    return {name for base in bases for name in vars(base)}


def named(owner: type) -> str:
    return f"{owner.__module__}.{owner.__name__}"


def parameters(owner: type) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield the parameters of a class's public methods and of its constructor."""
    for name, member in inspect.getmembers(owner, inspect.isfunction):
        if name == "__init__" or not name.startswith("_"):
            for parameter in list(inspect.signature(member).parameters.values())[1:]:
                yield name, parameter


def test_there_is_one_status(node: Node) -> None:
    assert Status is api.Status is hastore.client.Status is errors.Status
    assert Status.PUT_OK == "PUT_OK" and f"{Status.BUSY}" == "BUSY"
    with Producer([node.address]) as producer:
        assert producer.send_sync("t", b"").status is Status.PUT_OK
    node.backend.unconfirmable = "no slave"
    with Producer([node.address], acks="all", delivery_timeout_s=0.2) as producer:
        while producer.master is None:
            time.sleep(0.005)
        with pytest.raises(NotStoredError) as refused:
            producer.send_sync("t", b"")
    assert refused.value.status is Status.SLAVE_NOT_AVAILABLE
    node.backend.unconfirmable = None
    node.backend.writable = False
    with Consumer("t", [node.address], group="g", timeout_s=0.3) as consumer:
        with pytest.raises(errors.ClientError) as closed:
            consumer.commit()
    assert not isinstance(closed.value, PositionBehindError)
    assert NotStoredError("no", "BUSY").status is Status.BUSY


def test_the_repr_of_a_result_shows_its_message_id(node: Node) -> None:
    with Producer([node.address]) as producer:
        result = producer.send_sync("t", b"", queue=2)
        nobody = SendResult(Status.PUT_OK, "t", 0)
    assert result.msg_id is not None
    assert repr(result) == (
        "SendResult(PUT_OK, 't', queue 2, queue offset 0, offset 0, SYNC_MEM(1), epoch 65537, "
        f"msg_id {result.msg_id})"
    )
    assert repr(nobody).endswith("no answer requested, epoch 0, msg_id None)")


@pytest.mark.parametrize("owner", classes(), ids=named)
def test_help_shows_no_addresses_of_objects(owner: type) -> None:
    text = pydoc.render_doc(owner, renderer=pydoc.plaintext)
    assert " at 0x" not in text
    assert "<object object" not in text and "<factory>" not in text


@pytest.mark.parametrize("owner", [Producer, ClusterProducer, aio.Producer], ids=named)
def test_a_type_checker_lets_each_body_pass_that_may_be_sent(owner: type) -> None:
    for call in ("send", "send_sync", "transaction", "send_batch"):
        if (method := getattr(owner, call, None)) is not None:
            hints = get_type_hints(method)
            assert hints.get("body", Body) == Body == bytes | bytearray | memoryview
            assert hints.get("messages", Bodies) == Bodies
    assert get_type_hints(OutgoingMessage)["body"] == Body


def test_every_public_name_is_on_the_page() -> None:
    missing = [
        f"{named(owner)}.{name}"
        for module in (hastore, aio)
        for owner in (getattr(module, each) for each in module.__all__)
        for name in [owner.__name__, *own_names(owner)]
        if not name.startswith("_") and not re.search(rf"\b{re.escape(name)}\b", PAGE)
    ]
    assert not missing


def shown(parameter: inspect.Parameter) -> str:
    """Return a default as the page's tables write it."""
    if parameter.default is inspect.Parameter.empty:
        return "required"
    value: Any = parameter.default
    if isinstance(value, bool) or value is None:
        return f"`{value}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, int | float):
        sizes = {2**63 - 1: "2^63 - 1"}
        return f"`{sizes.get(value, f'{value:_}'.replace('_', ' '))}`"
    return f"`{value!r}`"


def section(owner: type) -> str:
    """Return the text of the page below a class's heading."""
    found = re.search(rf"^## {owner.__name__}\n(.*?)(?=^## )", PAGE, re.M | re.S)
    assert found, f"{owner.__name__} has no section"
    return found[1]


CLIENTS = [
    *(hastore.Producer, hastore.Consumer, hastore.SharedConsumer, hastore.Admin),
    hastore.OutgoingMessage,
]


@pytest.mark.parametrize("owner", CLIENTS, ids=named)
def test_every_parameter_has_its_row(owner: type) -> None:
    """`| name | type | default | meaning |`: the default is the code's, no cell is empty."""
    rows: dict[str, set[str]] = {}
    for row in re.findall(r"^\| *`\w+`.*\|$", section(owner), re.M):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
        names, kind, default, meaning = cells
        assert kind and meaning, row
        for name in re.findall(r"`(\w+)`", names):
            rows.setdefault(name, set()).add(default)
    for method, parameter in parameters(owner):
        where = f"{owner.__name__}.{method}({parameter.name})"
        assert parameter.name in rows, f"{where} has no row"
        assert shown(parameter) in rows[parameter.name], f"{where}: {rows[parameter.name]}"


def test_the_parameters_of_asyncio_are_the_same() -> None:
    for name in ("Producer", "Consumer", "SharedConsumer", "Admin"):
        ours = {
            (method, parameter.name, str(parameter.default))
            for method, parameter in parameters(getattr(hastore, name))
        }
        theirs = {
            (method, parameter.name, str(parameter.default))
            for method, parameter in parameters(getattr(aio, name))
        }
        assert theirs == ours - {each for each in ours if each[0] == "send_sync"}


def test_every_error_is_on_the_page() -> None:
    """Every error that a client raises is in the table of errors."""
    table = PAGE.partition("\n## Errors\n")[2]
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.ClientError | errors.UsageError):
            assert f"`{name}`" in table, name


def test_the_parts_of_errors_are_of_use_to_a_typed_program() -> None:
    """A type checker lets nobody use an `object`, such as the position to go on at."""
    for kind in classes():
        if issubclass(kind, errors.HastoreError):
            assert object not in get_type_hints(kind.__init__).values(), kind
