"""Errors that a user can act on. ``main.py`` prints them as one line, without a traceback."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that steer a terminal, turn the text around or are none."""


class PqlError(Exception):
    """Base of the errors below."""


class ConfigError(PqlError):
    """A setting that cannot work: says which, its value, and what is allowed. Exit status 2.

    Attributes:
        setting: dotted name, as it is written on the command line.
        value: what was given.
        allowed: what to give instead; reads on after "expected".
    """

    def __init__(self, setting: str, value: Any, allowed: str):
        self.setting, self.value, self.allowed = setting, value, allowed
        # One line that can be read, whatever a library's message, or a file, that went into it looks like.
        text = " ".join(f"{setting}={brief(_text(value))}: expected {brief(allowed, 2000)}".split())
        super().__init__(printable(text))


class RunError(PqlError):
    """The run failed after it started. Exit status 1."""


class HungError(RunError):
    """Something has not answered within its deadline: the stacks of all threads, and in the last line the cause.

    What hangs may go on for ever on a thread of its own, and keep the process from ending.
    """


class PqlWarning(UserWarning):
    """Something is wrong that does not end the run: ``main.py`` prints it as one line."""


def first_line(error: BaseException) -> str:
    """The error's type, and of its message the first line with anything in it."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def with_cause(prefix: str, text: str) -> str:
    """``prefix`` before the last line of ``text``, where a message of several lines says the cause."""
    above, line, last = text.rpartition("\n")
    return f"{above}{line}{prefix}{last}"


def printable(text: str) -> str:
    """``text`` with its ``UNSEEN`` characters as Python writes them."""
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show(value: Any) -> str:
    """``value`` as it is written on the command line, for people: what a terminal would act on is escaped."""
    return printable(_text(value))


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def brief(text: str, most: int = 300) -> str:
    """``text``, or its beginning."""
    return text if len(text) <= most else text[:most] + "..."


def nearest(name: str, names: Iterable[str]) -> str:
    """``" (did you mean x?)"`` for the closest of ``names``, or an empty string.

    Of dotted names, one that ends in ``name`` is the closest: ``gamma`` is ``algo.gamma``.
    """
    names = list(names)
    ending = [n for n in names if n.endswith(f".{name}")]
    near = ending[:1] or difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
