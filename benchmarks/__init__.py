"""Benchmarks: each figure beside a peer that runs in the same minutes on the same machine."""
