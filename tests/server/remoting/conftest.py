"""Fixtures shared with the tests of the API."""

from tests.server.api.conftest import backend, secured  # noqa: F401
