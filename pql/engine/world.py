"""A process's place among those of its run, as ``torchrun`` says it in the environment.

Imports the standard library alone.
"""

import contextlib
import ctypes
import os
import signal
from typing import NamedTuple

from pql.errors import ConfigError


class World(NamedTuple):
    """Rank and number of processes: of all, and of those on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def world() -> World:
    """This process's place; alone where nobody said anything else.

    Raises:
        ConfigError: a variable is no whole number.
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
    """On Linux: SIGTERM, so save and end, when the parent dies, even of SIGKILL."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(AttributeError):
        _libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
