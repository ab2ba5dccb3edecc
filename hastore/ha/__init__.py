"""Replicate the log from a master to its slaves. The operator names a master, rules/ permit it."""
