"""The blocks of docs/pipeline-jobs.md, docs/pipeline.md and docs/security.md that need Spark.

The jobs run as commands, in the session of all tests, over the stores of a pair that runs.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from hastore import Producer
from hastore.cli.pipeline import common
from tests.documents.blocks import Block, take
from tests.documents.shell import Shell

JOBS, PAGE = "docs/pipeline-jobs.md", "docs/pipeline.md"
EACH = take(JOBS, "hastore pipeline export --path data/node2")
FUNCTION = take(JOBS, "from hastore.pipeline.export")
FILES = take(JOBS, "lake/flights/topic=flights"), take(JOBS, "lake/planes/topic=planes")
RUN = take(JOBS, "spark: {memory: 2g")
AUDITS = take(JOBS, "hastore pipeline audit /data/node1")
AUDIT = take(JOBS, "from hastore.pipeline.audit")
INDEX = take(JOBS, "hastore pipeline index --path /data/store")
STATS = take(JOBS, "hastore pipeline stats --path data/node2")
START = take(PAGE, "from hastore.spark.session import local_session")
REGISTER = take(PAGE, "import hastore.spark")
SQL = take(PAGE, "CREATE TEMPORARY VIEW flights")
STREAM = take(PAGE, "query = (")
LAG = take(PAGE, "from hastore.spark import lag")
RETRY = take(PAGE, "from pyspark.errors import StreamingQueryException")
SINK = take(PAGE, "delays.selectExpr")
SECURED = take("docs/security.md", "from hastore.spark import read_topic")
SHOWN = ("127.0.0.1:10911", "127.0.0.1:10921")  # in the documents, of nodes 1 and 2
FLIGHTS = 40
DELAY = {"carrier": "AA", "delay": 3.5}

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow("a dozen jobs and queries, each of a second or two"),
]


@pytest.fixture
def shell(spark: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A running pair with two topics; its stores are data/node1 and data/node2."""
    monkeypatch.setattr(common, "_open", lambda *_: contextlib.nullcontext(spark))
    shell = Shell(tmp_path)
    with contextlib.closing(shell):
        shell.run("hastore init .")
        files = [tmp_path / f"node{number}.yaml" for number in (1, 2)]
        shell.variables["HASTORE_BOOTSTRAP"] = shell.elsewhere(*files)
        for file in files:
            shell.run(f"hastore serve -c {file}")
        shell.run("hastore status --wait 60")
        with Producer(addresses(shell)) as producer:
            for number in range(FLIGHTS):
                body = json.dumps({"carrier": "AA", "flight": number}).encode()
                producer.send("flights", body, key=f"f{number}")
                producer.send("planes", body, key=f"p{number % 5}")
            producer.flush()
        yield shell


def addresses(shell: Shell) -> list[str]:
    return shell.variables["HASTORE_BOOTSTRAP"].split(",")


def here(shell: Shell, text: str) -> str:
    """Return the text with this pair's addresses, and paths that Spark's tasks find too."""
    for shown, own in zip(SHOWN, addresses(shell), strict=True):
        text = text.replace(shown, own)
    return re.sub(r"(?<![\w/.-])(data/|lake/|plots\b|out/)", rf"{shell.folder}/\1", text)


def play(shell: Shell, block: Block, **names: Any) -> dict[str, Any]:
    exec(compile(here(shell, block.text), str(block), "exec"), names)  # noqa: S102
    return names


def test_the_jobs_run_as_the_page_shows_them(shell: Shell, spark: Any) -> None:
    *each, run = EACH.text.splitlines()
    assert run.startswith("hastore pipeline run jobs.yaml")
    shell.run(here(shell, "\n".join(each)))
    for block in FILES:
        pattern = re.sub(r"\d{4}-\d\d-\d\d", "*", block.text.strip())
        pattern = re.sub(r"part-.*\.\.\.\.", "part-*.", pattern)
        assert [*shell.folder.glob(pattern)], pattern
    assert [*(shell.folder / "plots").iterdir()]

    shutil.rmtree(shell.folder / "plots")
    stats = here(shell, STATS.text).replace("--sample 300", "--sample 1")
    shell.run(stats.replace("2026-11-22T10:00:00", "2020-01-01T00:00:00"))

    copy = shell.folder / "copy"
    shutil.copytree(shell.folder / "data" / "node2", copy)
    own = [f"tcp://{each}" for each in addresses(shell)]
    places = {
        "/data/node1": str(copy), "/backup/node1": str(shell.folder / "data" / "node2"),
        "tcp://10.0.0.1:6001": own[0], "tcp://10.0.0.2:6001": own[1],
        "/data/rocketmq-broker": str(copy), "tcp://10.0.0.3:6001": own[1],
    }  # fmt: skip
    audits, code = AUDITS.text, AUDIT.text
    for shown, place in places.items():
        audits, code = audits.replace(shown, place), code.replace(shown, place)
    shell.run(audits)
    names: dict[str, Any] = {"spark": spark}
    exec(compile(code, str(AUDIT), "exec"), names)  # noqa: S102
    assert names["found"].equal, names["found"]
    (copy / "abort").unlink(missing_ok=True)
    typed = INDEX.text.replace("/data/store", str(copy))
    shell.run(typed.replace("--output new", f"--output {shell.folder}/new"))

    jobs = RUN.text.replace("lake/", "lake/of-a-run-")  # its paths begin in its folder
    for shown, place in {
        "10.0.0.1:10911,10.0.0.2:10911": ",".join(addresses(shell)),
        "tcp://10.0.0.2:6001": own[1], "2026-11-22": "2020-01-01",
    }.items():  # fmt: skip
        assert shown in jobs
        jobs = jobs.replace(shown, place)
    (shell.folder / "jobs.yaml").write_text(jobs)
    told = shell.run(run)
    assert [*(shell.folder / "lake" / "of-a-run-planes").rglob("*.parquet")], told.stdout

    (shell.folder / "lake").rename(shell.folder / "earlier")
    assert play(shell, FUNCTION, spark=spark)["summary"].messages == FLIGHTS


def test_reads_streams_and_the_sink(
    shell: Shell, spark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hastore.spark.session.local_session", lambda *_: spark)
    found = play(shell, START)
    assert found["flights"].count() == FLIGHTS
    play(shell, REGISTER, spark=spark)
    create, select, view, insert, read = here(shell, SQL.text).strip().rstrip(";").split(";\n")
    spark.sql(create)
    assert sum(row[1] for row in spark.sql(select).collect()) == FLIGHTS
    spark.catalog.dropTempView("flights")
    late = spark.createDataFrame([("AA", 3.5)], "carrier STRING, delay DOUBLE")
    late.createOrReplaceTempView("late")
    for statement in (view, insert):
        spark.sql(statement)
    assert [json.loads(row[0]) for row in spark.sql(read).collect()] == [DELAY]
    for name in ("late", "delays"):
        spark.catalog.dropTempView(name)

    query = play(shell, STREAM, spark=spark)["query"]
    try:
        query.processAllAvailable()
        capsys.readouterr()
        play(shell, LAG, spark=spark, query=query)
        assert "flights" in capsys.readouterr().out
    finally:
        query.stop()
    play(shell, RETRY, spark=spark)
    assert spark.read.parquet(str(shell.folder / "lake" / "followed")).count() == FLIGHTS
    delays = spark.createDataFrame([("AA", 3.5)], "carrier STRING, delay DOUBLE")
    play(shell, SINK, delays=delays)
    told = shell.run("hastore consume delays")
    assert [json.loads(line) for line in told.stdout.splitlines()] == [DELAY, DELAY]


def test_a_file_of_a_client_in_spark(shell: Shell, spark: Any) -> None:
    """Of a key: the file names nothing that needs TLS, as the pair speaks none."""
    file, identities = shell.folder / "shop.yaml", shell.folder / "identities.yaml"
    shell.run("hastore keys new shop --file identities.yaml --consume 'flights' --out shop.key")
    for number in (1, 2):
        shell.service(shell.folder / f"node{number}.yaml").stop()
        path = shell.folder / f"node{number}.yaml"
        text = path.read_text()
        assert "  identities: null" in text
        path.write_text(text.replace("identities: null", f"identities: {identities}"))
        shell.run(f"hastore serve -c {path}")
    file.write_text("identity: shop\nkey_file: shop.key\n")
    code = SECURED.text.replace("/etc/hastore/shop.yaml", str(file))
    code = code.replace('"orders"', '"flights"')
    names: dict[str, Any] = {"spark": spark}
    exec(compile(here(shell, code), str(SECURED), "exec"), names)  # noqa: S102
    assert names["orders"].count() == FLIGHTS
