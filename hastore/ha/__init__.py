"""Replicate the log from the master to its slaves, and let the node that is named be master."""
