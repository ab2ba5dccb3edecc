"""Every block of README, CONTRIBUTING and docs is run by a test, or stands here with the reason."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import shlex
import subprocess

import pytest

from tests.documents import blocks
from tests.documents.blocks import PAGES, ROOT, Block, blocks_of, sections_of_runbook, take
from tests.test_named_commands import PROGRAM

# These take the blocks that they run.
HERE = pathlib.Path(__file__)
MODULES = (
    *(f"tests.documents.{path.stem}" for path in HERE.parent.glob("test_*.py") if path != HERE),
    *("tests.spark.test_documents", "tests.registry.test_documents"),
    *("tests.spark.test_walkthrough", "tests.pipeline.test_schedulers"),
)
MAKES = (
    take("README.md", "make run"),
    take("README.md", "make bench"),
    take("CONTRIBUTING.md", "make test"),
    take("docs/benchmarks.md", "make bench"),
    take("docs/reliability.md", "make fuzz"),
)

# A page and the heading from which on a test runs all blocks, up to the next one of that depth.
PLAYED_WHOLE = {
    ("README.md", "## Five minutes by hand"): "tests/test_readme_tour.py",
    ("docs/security.md", "## A group with TLS and identities"): "tests/test_security_tour.py",
    ("docs/client-protocol.md", "# The client API"): "tests/test_client_protocol.py",
    ("docs/pipeline.md", "## A notebook"): "tests/spark/test_topics.py",
    ("docs/rocketmq-clients.md", "## Move a cluster over"): "tests/interop/test_moving_over.py",
}
# A page and how a block begins: the test that runs it in its own words.
PLAYED_ELSEWHERE = {
    ("docs/pipeline.md", "from datetime import UTC"): "tests/spark/test_topics.py",
    ("docs/pipeline.md", "from hastore.pipeline.delta_stream"): (
        "tests/spark/stream/test_delta_batches.py"
    ),
    ("docs/pipeline-jobs.md", "spark-submit"): "tests/spark/pipeline/test_command.py",
    ("docs/pipeline-jobs.md", "hastore pipeline export --format iceberg"): (
        "tests/pipeline/test_iceberg.py"
    ),
    ("docs/pipeline-jobs.md", "from pyiceberg.catalog.sql"): "tests/pipeline/test_iceberg.py",
    ("docs/pipeline-jobs.md", "from deltalake"): "tests/pipeline/test_delta_objects.py",
    ("docs/pipeline-jobs.md", "from hastore.pipeline.committed"): (
        "tests/pipeline/test_object_target.py"
    ),
    ("docs/rocketmq-clients.md", "-Dtls.enable=true"): "tests/interop/test_rocketmq_tls.py",
    ("docs/rocketmq-clients.md", "brokerName = g0"): "tests/interop/test_flips_with_rocketmq.py",
    ("docs/migrate-from-rocketmq.md", "rm -rf BROKER_STORE"): (
        "tests/interop/test_flips_with_rocketmq.py"
    ),
    ("docs/deployment.md", "python3 -m pip wheel"): "tests/spark/cluster/test_cluster.py",
    ("docs/dledger.md", "hastore dledger transfer -c node1.yaml --to 2 --remote"): (
        "tests/cli/test_dledger_remote.py"
    ),
    ("docs/operations.md", "hastore flip -c node1.yaml --to 2 --remote"): (
        "tests/cli/test_role_remote.py"
    ),
    ("docs/operations.md", "hastore node replace node1.yaml --node 3 --by 4"): (
        "tests/cli/test_node_remote.py"
    ),
}
NOT_RUN = {
    ("docs/pipeline.md", "settings = {"): "needs Spark 4.2 and jars of Delta; the tests have 4.3",
    ("CONTRIBUTING.md", "pytestmark ="): "three ways to mark a test, not a program",
    ("CONTRIBUTING.md", ".venv/bin/python -m pytest"): "runs tests, in a test",
    ("docs/reliability.md", "HASTORE_SEEDS=50000"): "takes hours; make test runs the same walks",
    ("docs/reliability.md", "make upgrade"): "names a commit; it takes a minute",
    ("docs/reliability.md", "make soak"): "takes half an hour; tests/soak runs it for a moment",
    ("docs/deployment.md", "/opt/hastore/bin/pip install"): (
        "pip takes a minute; test_deployment.py reads its commands"
    ),
    ("docs/deployment.md", "docker build"): "needs docker; test_deployment.py reads its files",
    ("docs/deployment.md", "kubectl create"): "needs Kubernetes; the same test reads its files",
    ("docs/deployment.md", "kubectl apply"): "needs Kubernetes; the same test reads its files",
}


def the_one(page: str, begins: str) -> Block:
    (found,) = [block for block in blocks_of(page) if block.text.strip().startswith(begins)]
    return found


def under(page: str, heading: str) -> list[Block]:
    """Return the blocks from a heading up to the next one of its depth."""
    lines = (ROOT / page).read_text().splitlines()
    first = next(n for n, line in enumerate(lines, 1) if line.startswith(heading))
    depth = heading.partition(" ")[0]
    after = [n for n, line in enumerate(lines, 1) if n > first and re.match(f"{depth} ", line)]
    last = after[0] if after else len(lines)
    return [block for block in blocks_of(page) if first < block.line <= last]


@pytest.fixture(scope="module")
def taken() -> set[Block]:
    for name in MODULES:
        importlib.import_module(name)
    found = set(blocks.TAKEN)
    for place in PLAYED_WHOLE:
        found.update(under(*place))
    found.update(the_one(*place) for place in (*PLAYED_ELSEWHERE, *NOT_RUN))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_run_or_listed(page: str, taken: set[Block]) -> None:
    found = [block for block in blocks_of(page) if block.kind]
    missing = [str(block) for block in found if block not in taken]
    assert missing == [], "run them, or say in NOT_RUN why not"


@pytest.mark.parametrize("page", PAGES)
def test_a_block_without_a_language_is_a_drawing(page: str) -> None:
    for block in blocks_of(page):
        for line in block.text.splitlines() if not block.kind else ():
            assert not PROGRAM.match(line.strip()), f"{block}: give it the language sh"


def test_each_section_of_the_runbook_with_commands_is_played(taken: set[Block]) -> None:
    assert taken and blocks.SECTIONS == set(sections_of_runbook())


def test_the_tests_elsewhere_exist() -> None:
    for path in (*PLAYED_WHOLE.values(), *PLAYED_ELSEWHERE.values()):
        assert (ROOT / path).is_file(), path
    for (page, _), path in PLAYED_WHOLE.items():
        assert pathlib.Path(page).name in (ROOT / path).read_text(), f"{path} does not read {page}"


def test_settings_of_rocketmq_are_those_that_its_tests_give() -> None:
    """Its own programs take them, in tests that need Java."""
    for (page, begins), path in PLAYED_ELSEWHERE.items():
        if page != "docs/rocketmq-clients.md":
            continue
        names = re.findall(r"(?:^|\s)(?:-D)?([A-Za-z.]+) *=", the_one(page, begins).text)
        given = (ROOT / path).read_text()
        assert names and [name for name in names if name not in given] == [], path


@pytest.mark.parametrize("block", MAKES, ids=str)
def test_the_targets_of_make_exist_and_their_modules(block: Block) -> None:
    """They run for minutes, so make only says what it would do."""
    environment = {name: text for name, text in os.environ.items() if "MAKE" not in name}
    for line in block.text.splitlines():
        command = line.partition("#")[0].strip().replace("$(command -pv python3)", "python3")
        if command.startswith("make "):
            words = shlex.split(command)
            done = subprocess.run(
                ["make", "-n", *words[1:]], env=environment, cwd=ROOT,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        elif command.startswith("python -m "):
            path = command.split()[2].replace(".", "/")
            assert (ROOT / f"{path}.py").is_file() or (ROOT / path / "__main__.py").is_file()
        else:
            assert (ROOT / command).is_file(), command
