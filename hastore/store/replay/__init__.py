"""Replay: read the log and feed what is derived from it."""
