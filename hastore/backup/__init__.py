"""Backups of a node's store: taken while it runs, checked, and restored as a new node."""
