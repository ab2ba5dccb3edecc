"""The message store: the commit log and the files derived from it."""
