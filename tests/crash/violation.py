"""What a check of a crash state raises."""


class Violation(AssertionError):
    """A promise is broken."""
