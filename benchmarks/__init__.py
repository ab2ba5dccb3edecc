"""Benchmarks: each figure is measured next to a peer, in the same run on the same machine."""
