"""Changes to this node's log that follow another node's: append, cut back, compare."""
