"""Output of simulators, hidden from the console without ``--verbose``."""

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pql.errors import VERBOSE


class Hushed(io.TextIOBase):
    """Standard output that keeps what the thread that made it prints; other threads write to ``shown``."""

    def __init__(self, shown: Any):
        self.shown, self.kept, self._thread = shown, io.StringIO(), threading.get_ident()

    def write(self, text: str) -> int:
        return (self.kept if threading.get_ident() == self._thread else self.shown).write(text)

    def flush(self) -> None:
        self.shown.flush()

    def fileno(self) -> int:
        return self.shown.fileno()

    def isatty(self) -> bool:
        return self.shown.isatty()


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: hide what this thread prints from Python, unless ``PQL_VERBOSE`` is set. If it raises, the text
    follows on standard error."""
    if os.environ.get(VERBOSE):
        yield
        return
    before = sys.stdout
    sys.stdout = hushed = Hushed(before)
    try:
        yield
    except BaseException:
        sys.stderr.write(hushed.kept.getvalue())
        raise
    finally:
        sys.stdout = before
