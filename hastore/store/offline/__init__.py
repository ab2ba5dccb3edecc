"""A store as another process sees it: read-only, without its locks."""
