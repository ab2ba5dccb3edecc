"""Groups of nodes, which are killed and reaped at the end of their test; `hastore keys`."""

import os
import stat

import pytest

from hastore.cli import doctor, own_node
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


@pytest.fixture
def impatient(monkeypatch):
    """Let commands wait only a moment for the answer of a node that does not run."""
    monkeypatch.setattr(own_node, "ANSWER_S", 0.05)
    monkeypatch.setattr(doctor, "_CONNECT_S", 0.05)


def mode(path):
    """Return the permissions of a file."""
    return stat.S_IMODE(os.stat(path).st_mode)
