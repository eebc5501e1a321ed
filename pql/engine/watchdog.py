"""Deadlines for what cannot be given up from inside: a step of a simulator in this process, its reset, an update.

A thread says what it is at (:func:`watching`), and each sign of progress (:func:`touch`) begins its deadline anew.
While a :class:`Watchdog` is entered, a thread of its own looks after them all. A touch is a look into a dictionary and
at the clock: nothing here waits for a device. Waits that have a deadline of their own (remote actors, a simulator's
process) touch as they wait. Code that keeps the interpreter's lock for ever stops this thread, too: only a process of
its own (``task.process.python``) helps there.

This file imports nothing but the standard library.
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
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pql.errors import HungError

if TYPE_CHECKING:
    from pql.config import PlacementConfig
    from pql.engine.interrupt import Interrupt

LOOK = 0.25  # seconds between looks at the deadlines
GRACE = 5.0  # seconds for a run whose wait could be broken off to close what it has open


class Limit(NamedTuple):
    """Seconds without progress after which something hangs, and the setting that says so."""

    seconds: float
    setting: str


def step_limit(place: "PlacementConfig") -> Limit:
    """Of a step, or an update."""
    return Limit(place.watchdog_seconds, "placement.watchdog_seconds")


def start_limit(place: "PlacementConfig") -> Limit:
    """Of what may load or compile first."""
    return max(Limit(place.start_seconds, "placement.start_seconds"), step_limit(place))


class Watch:
    """Current activity of a thread.

    Attributes:
        limit: in force.
        later: takes its place after the first step.
        due: when it hangs (``time.monotonic``).
        doing: what it called last that has not returned.
        polled: another thread looks after it, not the watchdog's.
    """

    __slots__ = ("doing", "due", "later", "limit", "polled", "thread", "what")

    def __init__(self, what: str, limit: Limit, later: Limit | None, polled: bool):
        self.what, self.limit, self.later, self.polled, self.doing = what, limit, later, polled, ""
        self.thread, self.due = threading.get_ident(), time.monotonic() + limit.seconds

    @property
    def late(self) -> bool:
        return self.due <= time.monotonic()

    def error(self) -> HungError:
        """The stacks of all threads; in the last line what hangs, for how long, and what setting says how long."""
        where = f", in {self.doing}" if self.doing else ""
        cause = f"{self.what} has made no progress for {self.limit.seconds:g} s{where} ({self.limit.setting})"
        return HungError(f"{stacks()}{cause}")


_watches: dict[int, Watch] = {}  # by thread: the innermost
_dogs: "list[Watchdog]" = []


@contextlib.contextmanager
def watching(what: str, limit: Limit, later: Limit | None = None, polled: bool = False) -> Iterator[Watch | None]:
    """Inside, this thread is at ``what``. Nothing happens where nobody looks.

    Args:
        limit: without progress.
        later: that of what follows the first step, if it is another.
        polled: it is for the caller to look at what this yields.
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
            before.due = time.monotonic() + before.limit.seconds
            _watches[me] = before


def touch(doing: str = "") -> None:
    """This thread gets on. ``doing``: what it calls next; it touches again when that has returned."""
    if (watch := _watches.get(threading.get_ident())) is not None:
        watch.doing, watch.due = doing, time.monotonic() + watch.limit.seconds


def stepped() -> None:
    """As :func:`touch`, after a step of a simulator: whatever it compiles at first is compiled."""
    if (watch := _watches.get(threading.get_ident())) is not None:
        watch.limit, watch.doing = watch.later or watch.limit, ""
        watch.due = time.monotonic() + watch.limit.seconds


class Watchdog:
    """While it is entered, what hangs ends the run.

    A wait on the main thread that Python can break off becomes a ``HungError`` there, so that the run closes what it
    has open. Where it cannot, or the closing hangs as well, stacks and cause are printed and the process ends with
    status 1.

    Args:
        interrupt: breaks off the main thread's wait, where it is entered there; None: nothing can.
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
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK):
            late = [watch for watch in list(_watches.values()) if watch.late and not watch.polled]
            if late and _dogs[-1:] == [self]:  # of several, the one entered last: each would end the process
                self._end(late[0])

    def _end(self, watch: Watch) -> None:
        error = watch.error()
        main = watch.thread == threading.main_thread().ident
        if main and self._interrupt is not None and self._interrupt.throw(error) and self._over.wait(GRACE):
            return
        if not self._over.is_set():
            exit_now(str(error))


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """For a command that is no run: what hangs inside ends it as it ends a run. Signals do what they always do."""
    from pql.engine.interrupt import Interrupt

    with Interrupt() as interrupt, Watchdog(interrupt):
        interrupt.release()
        yield


class Timed:
    """An environment each of whose calls has a deadline: ``placement``'s of a step, of other calls that of a start.

    All else of ``env`` is had through it.
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
    """Print ``text`` and end this process with status 1, whatever its other threads are at."""
    for child in multiprocessing.active_children():  # no clean-up of theirs will run
        child.kill()
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # what hangs may hold its lock
    flush.start()
    flush.join(1.0)
    if sys.stdout.isatty():
        os.write(1, b"\x1b[?25h")  # the live panel hides the cursor
    *above, last = text.splitlines()
    os.write(2, "\n".join([*above, f"pql: {last}\n"]).encode(errors="replace"))
    os._exit(1)


def stacks() -> str:
    """The Python stack of every thread, a line break at the end."""
    names = {t.ident: t.name for t in threading.enumerate()}
    return "\n".join(
        f"--- {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    )
