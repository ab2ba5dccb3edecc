"""`hastore keys`: identities and their keys; certificates of a group."""
