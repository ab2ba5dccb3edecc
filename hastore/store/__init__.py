"""Keep the commit log and what is derived from it on disk."""
