"""Ctrl-C and SIGTERM as a flag that the loop checks between ticks, so that a run can save before it ends."""

import contextlib
import os
import signal
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any, NoReturn, cast

MESSAGE = b"\npql: stopping after this tick and saving; Ctrl-C again to leave at once\n"
SHOW_CURSOR = b"\x1b[?25h"


_entered: "list[Interrupt]" = []


def asked() -> bool:
    """Return True if an entered :class:`Interrupt` received Ctrl-C or SIGTERM; for loops that wait indefinitely."""
    return any(one.asked for one in _entered)


class Interrupt:
    """While entered, the first Ctrl-C or SIGTERM sets ``asked``; a second Ctrl-C exits the process with status 130.

    Python handles signals between two instructions of the main thread: native code that never returns holds them back.
    They also arrive in a pipe, which a watchdog reads (:meth:`leave_if_stuck`).

    Entering it again while entered, or on a thread other than the main one, does nothing. After :meth:`release` signals
    have their previous effect.

    Args:
        message: printed at the first signal.
    """

    def __init__(self, message: bytes = MESSAGE) -> None:
        self.asked, self._message = False, message
        self._before: dict[int, Any] = {}
        self._depth, self._released = 0, False
        self._thrown: Exception | None = None
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1  # file that received signals before
        self._arrived, self._handled = Counter[int](), Counter[int]()  # signals in the pipe; seen by the handler
        self._stuck = False  # at the last look
        self._reading = threading.Lock()  # the pipe is not closed while it is read

    def __enter__(self) -> "Interrupt":
        self._depth += 1
        if self._depth == 1:
            _entered.append(self)
            self._released = False
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            _entered.remove(self)
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self._before = {}
            if self._pipe is not None:
                signal.set_wakeup_fd(self._wakeup)
                with self._reading:
                    for end in self._pipe:
                        os.close(end)
                    self._pipe = None

    def leave_if_stuck(self) -> None:
        """Exit with status 130 if Ctrl-C was pressed again and the main thread cannot handle it. For another thread,
        which calls this repeatedly: the second call in a row that finds it so exits."""
        with self._reading, contextlib.suppress(BlockingIOError):
            if self._pipe is not None:
                self._arrived.update(os.read(self._pipe[0], 4096))
        unhandled = {s: self._arrived[s] - self._handled[s] for s in (signal.SIGINT, signal.SIGTERM)}
        second = sum(unhandled.values()) > 1 or (self.asked and not self._released)
        stuck = unhandled[signal.SIGINT] > 0 and second
        if stuck and self._stuck:
            leave()
        self._stuck = stuck

    def release(self) -> None:
        """Restore the previous SIGTERM handler, once ``asked`` is no longer checked. SIGTERM then usually ends the
        process even if native code hangs. :meth:`throw` still works."""
        self._released = True
        if self._before:
            before = self._before[signal.SIGTERM]
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)

    def throw(self, error: Exception) -> bool:
        """Raise ``error`` on the main thread once it runs Python code. Returns False if no handler is installed."""
        if not self._before:
            return False
        self._thrown = error
        signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)  # interrupts a sleep or a wait
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled[number] += 1
        if self._thrown is not None:
            error, self._thrown = self._thrown, None
            raise error
        if self._released:
            before = self._before[number]
            if callable(before):
                before(number, frame)
            elif before is not signal.SIG_IGN:
                raise KeyboardInterrupt
            return
        # os.write: the interrupted code may hold print's buffer or the live panel's lock.
        if self.asked and number == signal.SIGINT:
            leave()
        self.asked = True
        os.write(2, self._message)


def leave() -> NoReturn:
    """Exit this process with status 130, whatever its threads do."""
    if sys.stdout.isatty():
        os.write(1, SHOW_CURSOR)
    os._exit(130)
