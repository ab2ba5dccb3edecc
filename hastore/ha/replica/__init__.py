"""Change this node's copy of the log after another's: append, cut back, compare."""
