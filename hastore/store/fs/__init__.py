"""The file system, behind one interface that tests can make fail."""
