"""Fuzzing by coverage: what hastore reads from others, and from its own files."""
