"""Entry points of installed packages, by which they add simulators, algorithms and networks. Runs on Python 3.8."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Sequence


def entry_points(group: str) -> Sequence[importlib.metadata.EntryPoint]:
    """Return the entry points of a group."""
    return _scan(group, tuple(sys.path))


@functools.lru_cache(None)
def _scan(group: str, path: tuple[str, ...]) -> Sequence[importlib.metadata.EntryPoint]:
    if sys.version_info >= (3, 10):
        return importlib.metadata.entry_points(group=group)  # reads the metadata of every installed package
    return importlib.metadata.entry_points().get(group, ())
