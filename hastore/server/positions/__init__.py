"""Committed positions as records of the log: what the API and retention share."""
