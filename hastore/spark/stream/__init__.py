"""Streams of the format "hastore": offsets, limits, and what a restart must find."""
