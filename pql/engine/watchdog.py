"""Deadlines for operations that cannot be interrupted from inside: an in-process simulator step, a reset, an update.

A thread declares its activity (:func:`watching`), and each sign of progress (:func:`touch`) restarts its deadline.
While a :class:`Watchdog` is entered, a separate thread checks all deadlines. A touch is a dictionary look-up and a read
of the clock, and never waits for a device. Waits with their own deadline (remote actors, a simulator's process) touch
while they wait. Code that holds the GIL for ever stops this thread too; then only a separate process
(``task.process.python``) helps.

Imports only the standard library.
"""

import contextlib
import functools
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from pql.engine import deadlines
from pql.engine.deadlines import Limit, start_limit, step_limit
from pql.errors import HungError

if TYPE_CHECKING:
    from pql.config import PlacementConfig
    from pql.engine.interrupt import Interrupt


class RunningClock:
    """Monotonic clock in seconds without the time for which the process was stopped (Ctrl-Z, a paused container).

    A deadline on it is not over when the process continues: its threads had no time, either. More than
    ``deadlines.STOPPED`` seconds without a reading count as a stop, so a wait on it reads it more often than that. So
    does the watchdog, unless a call holds the GIL for as long.
    """

    def __init__(self) -> None:
        self._seen = time.monotonic(), 0.0  # the last reading, and the seconds left out until then

    def __call__(self) -> float:
        (last, stopped), now = self._seen, time.monotonic()
        if now - last > deadlines.STOPPED:
            stopped += now - last
        self._seen = now, stopped  # as a whole: threads that notice the same stop do not add it up
        return now - stopped


clock = RunningClock()


class Watch:
    """Current activity of a thread.

    Attributes:
        limit: the current limit.
        later: replaces it after the first step.
        due: time at which the thread counts as hung (``clock``).
        doing: the last call that has not returned.
        polled: another thread checks it instead of the watchdog's.
    """

    __slots__ = ("doing", "due", "later", "limit", "polled", "thread", "what")

    def __init__(self, what: str, limit: Limit, later: Limit | None, polled: bool):
        self.what, self.limit, self.later, self.polled, self.doing = what, limit, later, polled, ""
        self.thread, self.due = threading.get_ident(), clock() + limit.seconds

    @property
    def late(self) -> bool:
        return self.due <= clock()

    def error(self) -> HungError:
        """Create an error with the stacks of all threads; its last line names activity, time and setting."""
        where = f", in {self.doing}" if self.doing else ""
        cause = f"{self.what} has made no progress for {self.limit.seconds:g} s{where} ({self.limit.setting})"
        return HungError(f"{stacks()}{cause}")


_watches: dict[int, Watch] = {}  # by thread: the innermost
_dogs: "list[Watchdog]" = []


@contextlib.contextmanager
def watching(what: str, limit: Limit, later: Limit | None = None, polled: bool = False) -> Iterator[Watch | None]:
    """Watch this thread's activity ``what`` inside the block. Does nothing without an entered watchdog.

    Args:
        limit: time without progress.
        later: the limit after the first step, if different.
        polled: the caller checks the yielded watch.
    """
    if not (_dogs or polled):
        yield None
        return
    me = threading.get_ident()
    before = _watches.get(me)
    _watches[me] = watch = Watch(what, limit, later, polled)
    try:
        yield watch
    finally:
        if before is None:
            del _watches[me]
        else:
            before.due = clock() + before.limit.seconds
            _watches[me] = before


def touch(doing: str = "") -> None:
    """Report progress of this thread. ``doing``: the call that begins now; touch again when it has returned."""
    if (watch := _watches.get(threading.get_ident())) is not None:
        watch.doing, watch.due = doing, clock() + watch.limit.seconds


def stepped() -> None:
    """As :func:`touch`, after a simulator's step; from now on ``later`` is the limit, as compilation is over."""
    if (watch := _watches.get(threading.get_ident())) is not None:
        watch.limit, watch.doing = watch.later or watch.limit, ""
        watch.due = clock() + watch.limit.seconds


class Watchdog:
    """While entered, a hung activity ends the run.

    A wait on the main thread that Python can interrupt becomes a ``HungError`` there, so that the run can close its
    resources. If it cannot be interrupted, or closing hangs as well, stacks and cause are printed and the process exits
    with status 1.

    Args:
        interrupt: interrupts the main thread's wait if it is entered there; None: no interruption.
    """

    def __init__(self, interrupt: "Interrupt | None" = None):
        self._interrupt, self._over = interrupt, threading.Event()
        self._thread = threading.Thread(target=self._look, name="pql-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        _dogs.append(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        _dogs.remove(self)
        self._over.set()
        self._thread.join(deadlines.WATCHDOG)

    def _look(self) -> None:
        while not self._over.wait(deadlines.LOOK):
            if self._interrupt is not None:
                self._interrupt.leave_if_stuck()
            late = [watch for watch in list(_watches.values()) if watch.late and not watch.polled]
            if late and _dogs[-1:] == [self]:  # only the one entered last acts: each would end the process
                self._end(late[0])

    def _end(self, watch: Watch) -> None:
        error = watch.error()
        main = watch.thread == threading.main_thread().ident
        if main and self._interrupt is not None and self._interrupt.throw(error) and self._over.wait(deadlines.UNWIND):
            return
        if not self._over.is_set():
            exit_now(str(error))


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Apply the watchdog to a command that is not a run: a hang ends it as it ends a run. Signals are not handled."""
    from pql.engine.interrupt import Interrupt

    with Interrupt() as interrupt, Watchdog(interrupt):
        interrupt.release()
        yield


class Timed:
    """Environment wrapper with a deadline for each call: ``placement``'s limit for steps, the start limit for others.

    All other attributes are forwarded to ``env``.
    """

    def __init__(self, env: Any, place: "PlacementConfig"):
        self._env, self._place, self._stepped = env, place, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._env, name)
        return functools.partial(self._call, name, found) if callable(found) else found

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        limit = step_limit(self._place) if name == "step" and self._stepped else start_limit(self._place)
        with watching(f"the {name} of {self._env.spec.name}", limit):
            found = method(*args, **kwargs)
        self._stepped |= name == "step"
        return found


def exit_now(text: str) -> NoReturn:
    """Print ``text`` and end this process with status 1, regardless of its other threads."""
    for child in multiprocessing.active_children():  # their clean-up will not run
        child.kill()
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # the hung thread may hold its lock
    flush.start()
    flush.join(deadlines.FLUSH)
    if sys.stdout.isatty():
        os.write(1, b"\x1b[?25h")  # the live panel hides the cursor
    *above, last = text.splitlines()
    os.write(2, "\n".join([*above, f"pql: {last}\n"]).encode(errors="replace"))
    os._exit(1)


def stacks() -> str:
    """Return the Python stacks of all threads, ending with a line break."""
    names = {t.ident: t.name for t in threading.enumerate()}
    return "\n".join(
        f"--- {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    )
