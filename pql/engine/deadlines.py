"""Deadlines of all waits, in one table, in seconds.

A wait names what it waits for, has a deadline from here, ends if what it waits for has died, and ends at once at Ctrl-C
(the second one, where the first one saves). Deadlines of a simulator's or a learner's own calls are settings; they are
measured by ``watchdog.py``, from the last sign of progress. All others bound calls that should take milliseconds: they
are ten times or more what such a call needs on a busy machine, and short enough for somebody who watches.

Imports only the standard library, and is read as ``deadlines.NAME``, so that tests can shorten a deadline.
"""

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pql.errors import RunError

if TYPE_CHECKING:
    from pql.config import PlacementConfig


# -- settings ---------------------------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """Seconds without progress that count as hung, and the setting that defines them."""

    seconds: float
    setting: str


def step_limit(place: "PlacementConfig") -> Limit:
    """Return the limit of a step, an update, a tick or an evaluation's step. Noticed by the watchdog or the executor.

    Default 30 s: a step takes milliseconds, the slowest known reset inside a step takes seconds.
    """
    return Limit(place.watchdog_seconds, "placement.watchdog_seconds")


def start_limit(place: "PlacementConfig") -> Limit:
    """Return the limit of calls that may load, compile or write: building, reset, the first step, saving, closing.

    Noticed by the watchdog or, in the thread that saves, by the run that waits for it.

    Default 600 s: simulators of thousands of robots compile for minutes.
    """
    return max(Limit(place.start_seconds, "placement.start_seconds"), step_limit(place))


# task.process.step_seconds, start_seconds: a simulator's process (remote/process/child.py: all its answers).
# task.kwargs.step_seconds, start_seconds: a remote actor's answer (remote/server.py, which then drops the actor).
# task.kwargs.timeout: any actor at all (remote/env.py, which then ends the run).
# eval.*, budget.*: they bound work, not waits.


# -- how often a wait checks ------------------------------------------------------------------------------------------

LOOK = 0.25  # between checks of a deadline or an interrupt, by the watchdog and by loops of the main thread
IDLE = 1.0  # between checks that the thread or process at the other end still lives
# Two readings of the watchdog's clock that are further apart than this: the process was stopped between them.
STOPPED = 5.0


# -- threads of this process ------------------------------------------------------------------------------------------

# The main thread, interrupted by the watchdog, to close its resources; then the process exits. Noticed by the watchdog.
UNWIND = 5.0
# The watchdog's own thread to end: it may be printing stacks. Then it is left behind, a daemon.
WATCHDOG = 5.0
# Standard output to be flushed before the process exits: a hung thread may hold its lock.
FLUSH = 1.0
# A worker's thread to end after its last order: it is idle, unless it hangs. Then it is left behind, a daemon.
WORKER = 2.0
# The other workers' jobs after one has failed, so that its error comes first.
OTHERS = 5.0
# The evaluator's thread to end: it stops after the current step. Then its simulator is not closed.
EVALUATOR = 5.0
# The console's thread to draw for the last time: a terminal may be slow.
CONSOLE = 5.0


# -- files ------------------------------------------------------------------------------------------------------------

# Writes that are pending when a run fails. A run that ends as asked waits for them (``start_limit``, from their last
# progress). Then they are abandoned; older checkpoints are kept.
SAVE = 8.0
# ``pql report`` and ``compare`` for a run or a page, ``pql export`` for a file: seconds each, on a slow disk minutes.
REPORT, EXPORT = 600.0, 600.0
# The hub's answer about a repository (its files have the library's own limit: 10 s without data), and an upload.
HUB, PUSH = 30.0, 3600.0
# ``git`` and other programs that only describe the machine: without an answer, it is not described.
PROGRAM = 5.0


# -- other processes --------------------------------------------------------------------------------------------------

# A process to be gone after SIGKILL: at once, unless it is inside a system call that hangs. Then it is left behind.
KILLED = 5.0
# A simulator's process to close, to answer a signal with its stacks, or to report its exit status. Then it is killed.
SIMULATOR = 5.0
# A video to be recorded beside the training, by ``pql play``; it is then killed, with a warning.
VIDEO = 900.0
# The end of a run for a video that is being recorded; it is then given up.
LAST_VIDEO = 60.0


# -- actors -----------------------------------------------------------------------------------------------------------

# The server's thread to open or to close its port.
SERVER = 10.0
# A new connection to be taken up by the server's thread: a thousand of them may arrive while the learners hold the
# interpreter. gRPC itself would cancel all that have waited for 30 s. Noticed by gRPC.
ACCEPT = 600.0
# A new connection to introduce itself, once taken up. Then it is closed: others would wait for its slot.
HELLO = 10.0
# A learner to answer a new actor, whose connection it may take up late. Then the actor connects again.
WELCOME = ACCEPT + 60.0
# A learner's next request to an actor: it may save, evaluate or wait for other actors, and evaluations may be hours
# apart. Then the actor connects again, which costs the unfinished episodes of its environments.
ORDER = 3600.0
# Actors to receive the message that the run has ended, and their streams to end.
BYE, STREAMS = 2.0, 0.5
# Actors of a fleet to leave between two steps. Then they are killed.
LEAVE = 10.0
# The head of a Ray cluster to accept a connection; Ray itself would try for minutes.
KNOCK = 5.0
# Ray to deliver a result that it has reported as ready. Then the actor counts as lost.
RAY = 10.0


# -- ranks ------------------------------------------------------------------------------------------------------------

# Other ranks outside of ticks: their simulators may still compile, or their disks write. Noticed by gloo. Inside a tick
# the limit is that of a step.
RANK = 1800.0
# A failing rank for the errors of the others, one of which may be the cause.
LAST_MESSAGE = 3.0


# -- loggers ----------------------------------------------------------------------------------------------------------

# The end of a run for a tracker's process, which then continues in the background.
TRACKER = 5.0
# That process: after its run has ended. Uploads over a slow line take minutes; then it exits.
UPLOAD = 120.0
# wandb: a first answer of its server, its start online, and its end while the server cannot be reached.
WANDB_PROBE, WANDB_INIT, WANDB_FINISH = 2.0, 5.0, 4.0
# TensorBoard's videos to be converted at the end of a run. Then they are missing, with a warning.
GIF = 30.0


# -- waits between threads --------------------------------------------------------------------------------------------


def idle_get(inbox: "queue.SimpleQueue[Any]", owner: threading.Thread) -> Any:
    """Wait for the next order in a worker's ``inbox``. It has no deadline: a worker without an order is idle, not hung.

    Args:
        owner: thread that started the worker. Orders may also come from the main thread.
    Returns:
        the order; None if both have ended.
    """
    while True:
        try:
            return inbox.get(timeout=IDLE)
        except queue.Empty:
            if not owner.is_alive() and not threading.main_thread().is_alive():
                return None


def answer_of(
    worker: threading.Thread, outbox: "queue.SimpleQueue[Any]", late: Callable[[], Exception | None] = lambda: None
) -> Any:
    """Wait for the next answer of ``worker`` in its ``outbox``.

    Args:
        late: returns an error once the deadline has passed; default: the caller's own deadline applies (``watching``).
    Raises:
        RunError: the thread has ended without an answer, or the error of ``late``.
    """
    while True:
        try:
            return outbox.get(timeout=LOOK)
        except queue.Empty:
            if error := late():
                raise error from None
            if not worker.is_alive() and outbox.empty():
                raise RunError(f"the thread {worker.name} has ended without an answer") from None
