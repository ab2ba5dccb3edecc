"""`audit`: compare two logs range by range by digest, and name the first record that differs."""

from hastore.pipeline.audit.job import Summary, audit
from hastore.record.hashes import ALGORITHMS, DEFAULT_ALGORITHM

__all__ = ["ALGORITHMS", "DEFAULT_ALGORITHM", "Summary", "audit"]
