"""Errors that a user can act on. ``main.py`` prints them as one line, without a traceback."""

import difflib
from collections.abc import Iterable
from typing import Any


class PqlError(Exception):
    """Base of the errors below."""


class ConfigError(PqlError):
    """A setting that cannot work: says which, its value, and what is allowed. Exit status 2."""

    def __init__(self, setting: str, value: Any, allowed: str):
        self.setting, self.value, self.allowed = setting, value, allowed
        super().__init__(f"{setting}={value}: expected {allowed}")


class RunError(PqlError):
    """The run failed after it started. Exit status 1."""


def nearest(name: str, names: Iterable[str]) -> str:
    """``" (did you mean x?)"`` for the closest of ``names``, or an empty string."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
