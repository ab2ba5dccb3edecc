"""What the entry points load: optional and slow libraries only once they are used.

A merge of two modules can move an import to the top of a file that everybody loads. Then a client
needs kazoo, or each command waits for numpy.
"""

import subprocess
import sys

import pytest

OPTIONAL = {"kazoo", "zmq", "cryptography", "pyspark", "pyarrow", "deltalake", "matplotlib"}
SLOW = {"numpy", "ruamel", "asyncio", "prometheus_client", "h11"}
PRINT = "import sys, {}; print(*{{name.partition('.')[0] for name in sys.modules}})"


@pytest.mark.parametrize(
    ("module", "loads"),
    [
        ("hastore.client", set()),
        ("hastore.aio", {"asyncio"}),
        ("hastore.server.run", {"prometheus_client", "h11"}),
        ("hastore.server.dledger_node", {"prometheus_client", "h11"}),
        ("hastore.cli.main", set()),
        ("hastore.cli.status", set()),
        ("hastore.cli.doctor", set()),
        ("hastore.cli.flip", set()),
        ("hastore.cli.keys", set()),
        ("hastore.cli.log", set()),
        ("hastore.cli.demo", set()),
        ("hastore.cli.pipeline.group", set()),
        ("hastore.cli.pipeline.audit", set()),
        ("hastore.cli.dledger", set()),
        ("hastore.store.offline.reader", set()),
    ],
)
def test_optional_and_slow_libraries_are_loaded_only_when_they_are_used(module, loads):
    done = subprocess.run(
        [sys.executable, "-c", PRINT.format(module)], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert loaded & OPTIONAL == set()
    assert loaded & SLOW <= loads
