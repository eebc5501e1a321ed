"""Errors that a user can act on. The command line prints them as one line, without a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, bidirectional text marks and lone surrogates: unsafe to print on a terminal."""

VERBOSE = "PQL_VERBOSE"
"""Environment variable, set by ``--verbose``: show what simulators print. Their processes inherit it."""


class PqlError(Exception):
    """Base of the errors below."""


class ConfigError(PqlError):
    """Invalid setting. The message is ``setting=value: expected allowed``. Exit status 2.

    Attributes:
        setting: dotted name as on the command line, such as ``algo.gamma``.
        value: the rejected value.
        allowed: the accepted values; completes the phrase "expected ...".
    """

    def __init__(self, setting: str, value: Any, allowed: str):
        self.setting, self.value, self.allowed = setting, value, allowed
        # One printable line, even if ``value`` or ``allowed`` quotes a library's message or a file.
        text = " ".join(f"{setting}={brief(_text(value))}: expected {brief(allowed, 2000)}".split())
        super().__init__(printable(text))


class RunError(PqlError):
    """The run failed after it started. Exit status 1."""


class HungError(RunError):
    """A call missed its deadline. The message holds the stacks of all threads and, in its last line, the cause.

    The hung call may keep its thread, and with it the process, alive.
    """


class PqlWarning(UserWarning):
    """A problem that does not end the run. The command line prints it as one line."""


@contextmanager
def writing(setting: str, path: object, what: str = "folder") -> Iterator[None]:
    """Context manager: turn a failure to write below ``path`` into an error of ``setting``.

    Raises:
        ConfigError: an ``OSError`` was raised.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(setting, path, f"a {what} that can be written ({error})") from error


def first_line(error: BaseException) -> str:
    """Return ``"Type: message"`` with the first non-blank line of the error's message."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def with_cause(prefix: str, text: str) -> str:
    """Insert ``prefix`` before the last line of ``text``, which holds the cause of a multi-line message."""
    above, line, last = text.rpartition("\n")
    return f"{above}{line}{prefix}{last}"


def printable(text: str) -> str:
    """Escape the ``UNSEEN`` characters of ``text`` as Python does."""
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show(value: Any) -> str:
    """Format ``value`` as on the command line, with unsafe characters escaped."""
    return printable(_text(value))


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def gib(count: float) -> str:
    """Format a number of bytes in GiB, with three significant digits and without an exponent."""
    return f"{Decimal(f'{count / 2**30:.3g}'):,f} GiB"


def brief(text: str, most: int = 300) -> str:
    """Cut ``text`` to ``most`` characters; "..." marks the cut."""
    return text if len(text) <= most else text[:most] + "..."


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``" (did you mean x?)"`` for the closest of ``names``, or an empty string if none is close.

    Names that differ only in case come first, then dotted names with the same last part: ``gamma`` suggests
    ``algo.gamma``, and ``algo.lr`` both ``algo.critic.lr`` and ``algo.policy.lr``.
    """
    names = list(names)
    same = [n for n in names if n.lower() == name.lower()]
    last = name.rpartition(".")[2]
    ending = [n for n in names if n.endswith(f".{last}")]
    inside = [n for n in ending if n.partition(".")[0] == name.partition(".")[0]]
    near = same[:1] or (inside or ending)[:2] or difflib.get_close_matches(name, names, n=1, cutoff=0.62)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
