"""What all fuzz tests share: they log nothing."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Log nothing: most of what is read is damaged, and each would be a line."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
