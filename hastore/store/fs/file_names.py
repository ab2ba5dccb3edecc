"""Names of log and queue files: the number of a file's first byte, in 20 digits."""

_DIGITS = 20


def file_name(first_byte: int) -> str:
    """Return the name of the file that begins with byte number `first_byte` of a log or queue."""
    return f"{first_byte:0{_DIGITS}d}"


def is_file_name(name: str) -> bool:
    """Whether a directory entry is named like a log or queue file."""
    return len(name) == _DIGITS and name.isascii() and name.isdigit()
