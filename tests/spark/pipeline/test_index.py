"""The job `index` on a real session; tests/store/rebuild has the rebuild itself."""

import json
import random
from dataclasses import asdict, fields, replace

import pytest
from click.testing import CliRunner

from hastore.cli.pipeline import index as command
from hastore.errors import CorruptRecordError, UsageError
from hastore.pipeline.index import IndexOptions, IndexSummary, check_index, run_index
from tests.store.derived.walk.test_vector_walk import random_log
from tests.store.derived_files import ENTRIES, SLOTS, UNITS, rebuilt
from tests.store.rebuild.kit import derived_files, write_log


def test_build_verify_and_damage(spark, tmp_path):
    log = random_log(random.Random(4), 800)
    expected = rebuilt(tmp_path / "replay", log)
    store = tmp_path / "store"
    write_log(store, log)
    given = {"path": str(store), "units": UNITS, "slots": SLOTS, "entries": ENTRIES}
    summary = run_index(spark, IndexOptions(**given, range_bytes=1 << 16))
    json.dumps(asdict(summary))
    assert derived_files(store) == expected
    assert (summary.end_offset, summary.difference) == (log.max_offset, None)

    path = next(iter(sorted(expected)))
    raw = bytearray((store / path).read_bytes())
    raw[3] ^= 1
    (store / path).write_bytes(raw)
    work = tmp_path / "work"
    found = run_index(spark, IndexOptions(**given, verify=True, work=str(work)))
    assert found.difference.startswith(f"{store}/{path}: unit 0: ")
    assert not work.exists()

    first = store / "commitlog" / f"{0:020}"
    raw = bytearray(first.read_bytes())
    raw[5] ^= 1
    first.write_bytes(raw)
    with pytest.raises(CorruptRecordError, match="no valid record is at offset 0, but"):
        run_index(spark, IndexOptions(**given))
    with pytest.raises(UsageError, match="give either --verify or --output"):
        run_index(spark, IndexOptions(**given, verify=True, output=str(tmp_path / "new")))


def summary_with(difference):
    values = {field.name: 0 for field in fields(IndexSummary)}
    return IndexSummary(**(values | {"refused_queues": ("t/1",), "difference": difference}))


@pytest.mark.parametrize(("difference", "code"), [(None, 0), ("unit 7: ...", 4)])
def test_exit_codes(monkeypatch, difference, code):
    def run_job(name, job, session, *, check, as_json, show, judge):
        show(summary_with(difference))
        return judge(summary_with(difference))

    monkeypatch.setattr(command, "run_job", run_job)
    result = CliRunner().invoke(
        command.index_command, ["--path", "x", "--verify"], standalone_mode=False
    )
    assert result.return_value == code
    assert "t/1: the units of removed records contradict the log" in result.stderr
    assert ("unit 7" in result.stderr) == (code == 4)


@pytest.mark.parametrize("source", ["default", "store", "option"])
def test_it_says_that_it_took_the_default_delays(monkeypatch, source):
    found = replace(summary_with(None), delays_from=source, delay_levels="1s 5s")
    monkeypatch.setattr(command, "run_job", lambda *_, judge, **__: judge(found))
    result = CliRunner().invoke(command.index_command, ["--path", "x"], standalone_mode=False)
    assert ("give --delay-levels" in result.stderr) == (source == "default")


def test_delays_that_are_none_are_refused(tmp_path):
    (tmp_path / "commitlog").mkdir()
    with pytest.raises(UsageError, match="no list of delays"):
        check_index(IndexOptions(str(tmp_path), verify=True, delay_levels="5x"))
