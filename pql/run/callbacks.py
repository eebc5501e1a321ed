"""Check of a run's callbacks, without torch, so that a wrong one is refused before anything is loaded."""

from collections.abc import Callable, Iterable
from typing import Any

from pql.errors import ConfigError


def as_callbacks(callbacks: Any) -> list[Callable[..., Any]]:
    """Return one or several callbacks as a list. Raises ``ConfigError``: something that is neither a function nor a
    list of functions."""
    allowed = "functions that take (session, row)"
    if callable(callbacks):
        return [callbacks]
    if not isinstance(callbacks, Iterable):
        raise ConfigError("callbacks", type(callbacks).__name__, allowed)
    found = list(callbacks)
    for one in found:
        if not callable(one):
            raise ConfigError("callbacks", type(one).__name__, allowed)
    return found
