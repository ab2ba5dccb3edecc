"""Retention of the log, and the positions that must survive it."""
