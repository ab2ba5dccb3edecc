"""Retention of the log, and what it must not remove."""
