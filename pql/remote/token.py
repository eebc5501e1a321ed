"""Access token of remote actors, read by both actor and learner. It imports only the standard library."""

import os
from pathlib import Path

from pql.errors import ConfigError

VARIABLE = "PQL_TOKEN"
CERTIFICATE, KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"  # in PEM files


def read_token(setting: str, file: str | Path | None) -> str | None:
    """Return the token in ``file``, or in the environment variable PQL_TOKEN if ``file`` is None; None without either.

    Args:
        setting: name of the setting that holds the path, for errors.
    Raises:
        ConfigError: the file cannot be read, or its content is not a valid token.
    """
    if file is None:
        setting, data = VARIABLE, os.environb.get(VARIABLE.encode(), b"")
        if not data:
            return None
    else:
        data = read_file(setting, file)
    token = data.strip().decode("ascii", "replace")
    if not token or not (token.isascii() and token.isprintable()):
        shown = "..." if file is None else file  # never print the token
        raise ConfigError(setting, shown, "a token: one line of printable ASCII, such as openssl rand -hex 32 prints")
    return token


def read_file(setting: str, file: str | Path, holds: bytes = b"") -> bytes:
    """Return the bytes of a file that must contain ``holds``. Raises ``ConfigError``: it cannot be read, or does not
    contain them."""
    from pql.config.files import expanded  # here: the command line imports this module at its start

    try:
        data = expanded(setting, file).read_bytes()
    except OSError as error:
        raise ConfigError(setting, file, f"a file that can be read ({error.strerror})") from error
    if holds not in data:
        raise ConfigError(setting, file, f"a PEM file, with {holds.decode()!r} in it")
    return data
