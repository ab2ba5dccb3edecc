"""Replay: the thread that follows the log and feeds everything derived from it."""
