"""Compose store, replication and client API into a running node."""
