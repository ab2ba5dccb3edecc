"""Skip where there is no Prometheus; print the ends of the logs of a test that fails."""

import pytest

from tests.deploy.prometheus import program
from tests.process.conftest import pytest_runtest_makereport  # noqa: F401


@pytest.fixture(autouse=True)
def needs_prometheus(request):
    """Skip a test of the long tier at once where Prometheus is missing; say why one failed."""
    if request.node.get_closest_marker("long") is None:
        yield
        return
    program("prometheus")
    folder = request.getfixturevalue("tmp_path")
    yield
    report = getattr(request.node, "report_call", None)
    if report is not None and report.failed:
        for path in sorted([*folder.rglob("node*.err"), *folder.rglob("prometheus/log")]):
            lines = path.read_text(errors="replace").splitlines()
            print(f"---- the end of {path.relative_to(folder)}", *lines[-15:], sep="\n")
