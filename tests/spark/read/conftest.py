"""What tests of reading share."""

import pytest

from hastore.client.connections.requester import Requester
from hastore.spark.read import servers


@pytest.fixture
def requesters(monkeypatch):
    """All that are made; each has `surveys`, the number of its searches for the nodes."""
    made = []

    class Counted(Requester):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            self.surveys = 0
            made.append(self)

        def survey(self, *given, **more):
            self.surveys += 1
            return super().survey(*given, **more)

    monkeypatch.setattr(servers, "Requester", Counted)
    return made
