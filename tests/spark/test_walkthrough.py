"""All blocks of docs/pipeline-walkthrough.md, in their order."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tests.documents.blocks import take_all

BLOCKS = take_all("docs/pipeline-walkthrough.md", "python")


@pytest.mark.full
@pytest.mark.slow("four runs of streams, each of some batches, and a dozen queries")
def test_the_page_runs(
    spark: Any,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hastore.spark.session.local_session", lambda *_: spark)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for block in BLOCKS:
            exec(compile(block.text, str(block), "exec"), names)  # noqa: S102
    finally:
        if "shop" in names:
            names["shop"].close()
    told = capsys.readouterr().out
    assert "failed, as planned" in told and names["crashes"] == []
    assert 0 < names["before"] < names["rows"]  # it has failed in the middle
    assert names["late"] and names["missing"] > 0 and "dropped: 0" not in told
    assert told.index("| Sweden|    app|") < told.index("only showing top 4 rows")
    assert (tmp_path / "shop" / "revenue.png").read_bytes().startswith(b"\x89PNG")
