"""Open files of a learner that listens: how many connections it may hold, so that it can still save.

Every connection is an open file, also one without the token. Without a limit, anybody who reaches the port could use up
all of them, and then no checkpoint can be opened.
"""

import os
import resource
from pathlib import Path

from pql.errors import ConfigError

SPARE = 128  # open files kept for checkpoints, loggers, videos, simulators and other processes
WAITING = 1024  # connections beyond one per slot: actors that wait for a slot, and clients without the token
FEWEST = 8  # connections below which listening makes no sense


def connection_limit(slots: int, address: str) -> int:
    """Return how many connections a server with ``slots`` slots may hold, at most ``slots + WAITING``.

    Raises the limit of open files of this process (``ulimit -n``) as far as this needs it and the system allows it.

    Args:
        address: address that is listened on, for the message.
    Raises:
        ConfigError: the limit of open files leaves room for fewer than ``FEWEST`` connections.
    """
    used, wanted = open_files(), slots + WAITING
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = used + SPARE + wanted
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    room = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - SPARE - used)
    if room < FEWEST:
        least = used + SPARE + FEWEST
        raise ConfigError("listen", address, f"a limit of at least {least} open files, it is {soft} (ulimit -n)")
    return room


def open_files() -> int:
    """Return the number of open files of this process; an estimate where the system does not list them."""
    listed = Path("/proc/self/fd") if Path("/proc/self/fd").is_dir() else Path("/dev/fd")
    return len(os.listdir(listed)) if listed.is_dir() else SPARE
