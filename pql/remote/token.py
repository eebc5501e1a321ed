"""The token that remote actors show their learner: both sides read it here. It imports the standard library alone."""

import os
from pathlib import Path

from pql.errors import ConfigError

VARIABLE = "PQL_TOKEN"
CERTIFICATE, KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"  # in PEM files


def read_token(setting: str, file: str | Path | None) -> str | None:
    """The token in ``file``, or else in the variable PQL_TOKEN; None: there is none.

    Args:
        setting: that names the file.

    Raises:
        ConfigError: the file cannot be read, or what is in it cannot be sent as a token.
    """
    if file is None:
        setting, data = VARIABLE, os.environb.get(VARIABLE.encode(), b"")
        if not data:
            return None
    else:
        data = read_file(setting, file)
    token = data.strip().decode("ascii", "replace")
    if not token or not (token.isascii() and token.isprintable()):
        shown = "..." if file is None else file  # the token itself is nobody's to read
        raise ConfigError(setting, shown, "a token: one line of printable ASCII, such as openssl rand -hex 32 prints")
    return token


def read_file(setting: str, file: str | Path, holds: bytes = b"") -> bytes:
    """A file's bytes, among them ``holds``.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        data = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(setting, file, f"a file that can be read ({error.strerror})") from error
    if holds not in data:
        raise ConfigError(setting, file, f"a PEM file, with {holds.decode()!r} in it")
    return data
