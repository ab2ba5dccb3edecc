"""`audit`: compare two logs range by range by digest, and name the first record that differs."""

from hastore.pipeline.audit.job import audit
from hastore.pipeline.audit.summary import Summary
from hastore.record.range_digest import ALGORITHMS, DEFAULT_ALGORITHM

__all__ = ["ALGORITHMS", "DEFAULT_ALGORITHM", "Summary", "audit"]
