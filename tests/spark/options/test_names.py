"""An error of the source names the options of whoever gave them: a query of Spark, or a command."""

import contextlib

import pytest

from hastore.errors import (
    CorruptRecordError,
    HastoreError,
    PositionLostError,
    StoreError,
    UnreachableError,
    UsageError,
)
from hastore.pipeline.where import Where
from hastore.spark.options.names import NAMES, Names
from hastore.spark.options.offsets import Bound, Limits, OffsetRange, TopicPartition, parse_offsets
from hastore.spark.options.source_options import Patience, parse_options
from hastore.spark.read.servers import ServerBackend, ServerHead
from hastore.spark.read.stores import PathBackend
from hastore.spark.sink.options import parse_sink_options

T0 = TopicPartition("t", 0)
SERVERS = "hastore.bootstrap.servers"
QUERY, COMMAND, LOSING = Names.QUERY, Names.COMMAND, Names.LOSING_COMMAND
WITHOUT_LOSS = {
    QUERY: "; set failOnDataLoss to false to read the messages that are available",
    COMMAND: "; run it again",
    LOSING: "; give --allow-data-loss to read the messages that are available",
}


def of_limits(names):
    limits = Limits(parse_offsets('{"t":{"0":1}}'), Bound.LATEST, names=names)
    limits.resolve({T0: OffsetRange(2, 9)}, lambda *_: None)


def of_a_path(names):
    PathBackend("/store", True, names)._lose("messages")


@pytest.mark.parametrize("names", WITHOUT_LOSS)
@pytest.mark.parametrize("fail", [of_limits, of_a_path])
def test_messages_that_are_gone(fail, names):
    with pytest.raises(PositionLostError) as failed:
        fail(names)
    assert str(failed.value).endswith(WITHOUT_LOSS[names])


def test_a_store_that_lacks_records():
    for names, remedy in (
        (QUERY, "store again, or set failOnDataLoss to false to read what precedes"),
        (COMMAND, "store again"),
        (LOSING, "store again, or give --allow-data-loss to read what precedes"),
    ):
        backend = PathBackend("/store", True, names)
        backend._opened = Lacking()
        with pytest.raises(CorruptRecordError) as failed:
            backend._check_end({T0: OffsetRange(0, 1)})
        assert str(failed.value).endswith(remedy)


class Lacking:
    limit_offset = 100

    def queue_units(self, *_, limit):
        return self

    offsets = (200,)


WHERE = {"path": "/store", "subscribe": "t"}
SINK = {SERVERS: "a:1"}
WRONG = (
    ({**WHERE, "path": " "}, "option 'path' is empty", "--path is empty"),
    ({SERVERS: ","}, f"option '{SERVERS}' is empty", "--servers is empty"),
    ({**WHERE, "subscribe": ","}, "for option 'subscribe' is ','", "a topic: --topic is ','"),
    (
        {"path": "/store", "subscribePattern": ""},
        "for option 'subscribePattern' is ''",
        "give a regular expression: --pattern is ''",
    ),
    (
        {"path": "/store", "subscribePattern": "("},
        "option 'subscribePattern' is not a regular",
        "--pattern is not a regular",
    ),
    (
        {**WHERE, "startingTimestamp": "soon"},
        "option 'startingTimestamp': Expected",
        "--since: Expected",
    ),
    (
        {**WHERE, "startingTimestamp": "2", "endingTimestamp": "1"},
        "startingTimestamp (2) is beyond endingTimestamp (1)",
        "--since (2) is beyond --until (1)",
    ),
)


@pytest.mark.parametrize(("options", "of_query", "of_command"), WRONG)
def test_options_that_are_wrong(options, of_query, of_command):
    for given, text in (({}, of_query), ({NAMES: COMMAND.value}, of_command)):
        with pytest.raises(UsageError) as failed:
            parse_options({**options, **given})
        assert text in str(failed.value)


def test_nodes_that_do_not_answer():
    """No option of a command changes how long it waits."""
    changes = f"0.05 s, which the option retryTimeout changes: .*; check option '{SERVERS}', that"
    for names, option, said in (
        (QUERY, "retryTimeout", changes),
        (COMMAND, None, "0.05 s: .*; check --servers, that"),
    ):
        patience = Patience(0.05, 0.05, option)
        head = ServerHead(("tcp://127.0.0.1:9",), None, patience, names=names)
        with contextlib.closing(head), pytest.raises(UnreachableError, match=said):
            head.available()
        with pytest.raises(UsageError) as failed:
            ServerBackend(("x:y:z",), True, names=names)
        assert str(failed.value).startswith(f"{names.said(SERVERS)}: expected tcp://HOST:PORT")
    assert Where(path="/store").parsed().patience.option is None
    assert parse_options(WHERE).patience.or_raise == ", or raise the option retryTimeout"


def test_a_folder_that_is_not_there(tmp_path):
    for names, said in ((QUERY, f"give option '{SERVERS}' instead"), (LOSING, "give --servers in")):
        with pytest.raises(StoreError, match=said), PathBackend(str(tmp_path / "no"), True, names):
            pass


def test_where_a_command_writes():
    of_command = {NAMES: Names.DESTINATION.value}
    with pytest.raises(UsageError, match="^--to-servers is empty for a write"):
        parse_sink_options({SERVERS: "", **of_command}, streaming=False)
    with pytest.raises(UsageError, match="^--to-topic: "):
        parse_sink_options({**SINK, "topic": "a b", **of_command}, streaming=False)
    assert parse_sink_options({**SINK, **of_command}, streaming=False).patience.option is None


def test_other_names_are_refused():
    with pytest.raises(HastoreError, match="is for hastore's own jobs; remove it"):
        parse_options({**WHERE, NAMES: "mine"})
