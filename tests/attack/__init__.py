"""Attacks on real nodes: how well others are served meanwhile, and that nothing is lost."""
