"""Ctrl-C and SIGTERM as a flag that the loop reads between ticks, so that a run can save before it ends."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

MESSAGE = b"\npql: stopping after this tick and saving; Ctrl-C again to leave at once\n"
SHOW_CURSOR = b"\x1b[?25h"


_entered: "list[Interrupt]" = []


def asked() -> bool:
    """Whether Ctrl-C or SIGTERM came to an entered :class:`Interrupt`: for waits that may not end by themselves."""
    return any(one.asked for one in _entered)


class Interrupt:
    """While it is entered, the first Ctrl-C or SIGTERM sets ``asked``; a second Ctrl-C leaves the process with 130.

    Entering it again inside itself, or on any thread but the main one, does nothing.

    Args:
        message: written when the first comes.
    """

    def __init__(self, message: bytes = MESSAGE) -> None:
        self.asked, self._message = False, message
        self._before: dict[int, Any] = {}
        self._depth = 0

    def __enter__(self) -> "Interrupt":
        self._depth += 1
        if self._depth == 1:
            _entered.append(self)
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            _entered.remove(self)
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Bare writes: print's buffer, or the live panel's lock, may be in use by the very code that was interrupted.
        if self.asked and number == signal.SIGINT:
            if sys.stdout.isatty():
                os.write(1, SHOW_CURSOR)
            os._exit(130)
        self.asked = True
        os.write(2, self._message)
