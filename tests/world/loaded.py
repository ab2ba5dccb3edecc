"""All that a walk needs is imported: for the process from which walks are forked."""

from tests.world import install, isolated, planted  # noqa: F401 - imported for the forks

install.load_all()
