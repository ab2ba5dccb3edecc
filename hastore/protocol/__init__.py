"""Hastore's wire protocols. Pure: bytes in, events out."""
