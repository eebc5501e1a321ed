"""Entry points of installed packages, by which they add simulators, algorithms and networks."""

import functools
import importlib.metadata
import sys


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """Return the entry points of a group."""
    return _scan(group, tuple(sys.path))


@functools.cache
def _scan(group: str, path: tuple[str, ...]) -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=group)  # reads the metadata of every installed package
