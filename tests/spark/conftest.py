"""One Spark session for the whole run: it takes 5 to 10 s to start."""

import os
import warnings

import pytest

from hastore.errors import UsageError
from hastore.spark.java_runtime import find_java


def require_java():
    """Skip the test without a Java; in CI fail instead."""
    try:
        find_java()
    except UsageError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no Spark tests: {error}")


@pytest.fixture(scope="session")
def spark():
    require_java()
    from hastore.spark.session import local_session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised by pyspark's own imports
        session = local_session("hastore tests", master="local[2]", memory="512m")
    yield session
    session.stop()
