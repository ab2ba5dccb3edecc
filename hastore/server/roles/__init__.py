"""Changes of a node's role."""
