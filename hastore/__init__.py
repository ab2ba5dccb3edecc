"""Replicate an append-only commit log between a master and its slaves, byte-compatible with RocketMQ."""

__version__ = "0.1.0"
