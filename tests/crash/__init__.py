"""Crash points: what a power loss leaves of a store, at each of its effects on the disk."""
