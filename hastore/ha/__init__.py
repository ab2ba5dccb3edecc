"""Replicate the log from a master to its slaves, and decide who may be master."""
