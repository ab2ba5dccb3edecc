"""The AccessKey and SecretKey for a RocketMQ master that asks who its clients are."""

import re
from typing import NamedTuple

from hastore.errors import ConfigError
from hastore.fs.private_files import MAX_KEY_FILE_BYTES, read_private

_LINE = re.compile(
    r"""^(accessKey|secretKey):[ \t]*(["']?)([!-~]{1,128}?)\2(?:[ \t]+\#.*|[ \t]*)\r?$""",
    re.MULTILINE,
)


class Credentials(NamedTuple):
    """With what requests are signed: RocketMQ's ACL 1.0."""

    access_key: str
    secret_key: str


def read_credentials(path: str) -> Credentials:
    """Read a private file with `accessKey` and `secretKey`, as mqadmin's conf/tools.yml.

    Raises ConfigError.
    """
    text = read_private(path, MAX_KEY_FILE_BYTES).decode("utf-8-sig", "replace")
    found = {match[1]: match[3] for match in _LINE.finditer(text)}
    for name in ("accessKey", "secretKey"):
        if name not in found:
            raise ConfigError(
                f"{path}: has no line {name}: ... of printable ASCII without spaces; write "
                "accessKey: NAME and secretKey: SECRET, as mqadmin's conf/tools.yml has them"
            )
    return Credentials(found["accessKey"], found["secretKey"])
