"""What the entry points load: optional and slow libraries only once they are used.

A merge of two modules can move an import to the top of a file that everybody loads. Then a client
needs kazoo, or each command waits for numpy.
"""

import subprocess
import sys

import pytest

OPTIONAL = {
    *("kazoo", "zmq", "cryptography", "pyspark", "pyarrow", "deltalake", "pyiceberg"),
    "matplotlib",
}
SLOW = {"numpy", "ruamel", "asyncio", "h11", "ssl", "yaml", "lark"}
PRINT = "import sys, {}; print(*{{name.partition('.')[0] for name in sys.modules}})"
NODE = {"h11", "ssl", "yaml"}


@pytest.mark.parametrize(
    ("module", "loads"),
    [
        ("hastore.client", set()),
        ("hastore.aio", {"asyncio", "ssl"}),  # asyncio imports ssl
        ("hastore.server.run", NODE),
        ("hastore.server.dledger_node", NODE),
        ("hastore.cli.main", {"yaml"}),
        ("hastore.cli.status", {"yaml"}),
        ("hastore.cli.doctor", {"ssl", "yaml"}),
        ("hastore.cli.flip", {"yaml"}),
        ("hastore.cli.keys", {"yaml"}),
        ("hastore.cli.check", {"yaml"}),
        ("hastore.cli.log", {"yaml"}),
        ("hastore.cli.demo", {"yaml"}),
        ("hastore.cli.pipeline.audit", {"yaml"}),
        ("hastore.cli.dledger", {"yaml"}),
        ("hastore.store.offline.reader", set()),
    ],
)
def test_optional_and_slow_libraries_are_loaded_only_when_they_are_used(module, loads):
    done = subprocess.run(
        [sys.executable, "-c", PRINT.format(module)], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert loaded & OPTIONAL == set()
    assert loaded & SLOW == loads


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        # What the processes load in which Spark plans a read, a stream and a write: each query and
        # each stream starts some of them anew. `pa.array` and `pa.scalar` import pandas.
        (
            "hastore.spark.source, hastore.spark.stream_reader, hastore.spark.read.stores",
            {"pandas", "pyarrow", "hastore.spark.arrow.batch", "hastore.client"},
        ),
        ("hastore.spark.read.servers", {"pandas", "pyarrow", "hastore.spark.arrow.batch"}),
        ("hastore.spark.writer", {"pandas", "pyarrow", "numpy", "hastore.spark.sink.records"}),
        ("hastore.spark.arrow.batch, hastore.spark.sink.task", {"pandas"}),
    ],
)
def test_sparks_planning_processes_load_little(modules, unwanted):
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert unwanted & set(done.stdout.split()) == set()
