"""File system access behind an interface, so that tests can inject failures."""
