"""Rank and number of processes of this run, as ``torchrun`` sets them in the environment.

Imports only the standard library.
"""

import contextlib
import ctypes
import os
import signal
from typing import NamedTuple

from pql.errors import ConfigError


class World(NamedTuple):
    """Rank and number of processes: in total, and on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def world() -> World:
    """Return this process's place; a single process if the variables are not set.

    Raises:
        ConfigError: a variable is not a whole number.
    """
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return World()
    rank, size = _variable("RANK"), _variable("WORLD_SIZE")
    return World(rank, size, _variable("LOCAL_RANK", rank), _variable("LOCAL_WORLD_SIZE", size))


def _variable(name: str, default: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(name, text, "a whole number, as torchrun sets it")
    return int(text)


_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """On Linux: request SIGTERM (save and end) when the parent dies, even of SIGKILL."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(AttributeError):
        _libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
