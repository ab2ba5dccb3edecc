"""Groups of nodes, which are killed and reaped at the end of their test; `hastore keys`."""

import os
import stat

import pytest

from hastore.cli.common import run_code
from hastore.cli.main import cli
from tests.process.conftest import make_group, pytest_runtest_makereport

__all__ = ["make_group", "pytest_runtest_makereport"]


@pytest.fixture
def run_keys(tmp_path, monkeypatch, capsys):
    """Run `hastore keys ...` in a folder of its own; return code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = run_code(cli, "hastore", ["keys", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def mode(path):
    """Return the permissions of a file."""
    return stat.S_IMODE(os.stat(path).st_mode)
