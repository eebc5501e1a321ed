"""Executors run the jobs of a tick: on threads (CPU), on CUDA streams, or inline, one after the other."""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from pql.engine import crash, deadlines
from pql.engine.deadlines import Limit, idle_get
from pql.engine.graph import priority
from pql.engine.watchdog import clock, stacks, watching
from pql.errors import HungError, RunError, first_line, with_cause

Job = Callable[[], None]


class LeftError(Exception):
    """The run ends within this tick, as its caller wants. The other workers do their jobs of the tick, so that what the
    run leaves behind does not depend on timing."""


class Executor(Protocol):
    """Runs one tick's jobs by worker name. On return each has run, or is queued in a fixed order."""

    def run(self, jobs: Mapping[str, Job]) -> Mapping[str, float]:
        """Return the busy seconds of each job: of these jobs, or of an earlier tick whose times are now known."""
        ...

    def exclusive(self) -> AbstractContextManager[None]:
        """Order the calling thread's device work in the block after all ticks so far and before all later ones."""
        ...

    def close(self) -> None: ...


class Inline:
    """Runs jobs one after the other on the calling thread.

    Args:
        order: names of the workers in order; default: as given.
        step, start: time limits without progress, for a worker and for its first job; None: no watchdog.
    """

    def __init__(self, order: Sequence[str] | None = None, step: Limit | None = None, start: Limit | None = None):
        self.order, self.step, self.start = order, step, start
        self.begun: set[str] = set()  # workers that have done a job

    def run(self, jobs: Mapping[str, Job]) -> Mapping[str, float]:
        seconds = {}
        for name in (n for n in self.order or jobs if n in jobs):
            with self._watched(name):
                start = time.perf_counter()
                jobs[name]()
                seconds[name] = time.perf_counter() - start
        return seconds

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Run a job of a worker inside, within its time limit."""
        limit = self.step if name in self.begun else self.start or self.step
        with named(name), nullcontext() if limit is None else watching(f"worker {name}", limit, self.step):
            yield
        self.begun.add(name)

    def share(self, queues: Mapping[str, Iterator[Job]]) -> Mapping[str, float]:
        """As ``Threads.share``: run one job of each worker in turn, until none is left."""
        seconds, live = dict.fromkeys(queues, 0.0), list(queues)
        while live:
            for name in tuple(live):
                if (job := next(queues[name], None)) is None:
                    live.remove(name)
                else:
                    seconds[name] += self.run({name: job})[name]
        return seconds

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """As ``Threads.waiting``; nothing waits here."""
        return nullcontext()

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class Threads:
    """One thread per worker; torch and the simulators release the GIL.

    Args:
        watchdog: seconds after which a worker that has not finished its tick counts as hung.
        start: the limit for a worker's first job; None: ``watchdog``.
    """

    def __init__(self, names: Sequence[str], watchdog: float = 30.0, start: float | None = None):
        self.watchdog, self.start = watchdog, max(watchdog, start or 0.0)
        self.begun: set[str] = set()  # workers that have done a job
        self.done: queue.SimpleQueue[tuple[str, float | BaseException]] = queue.SimpleQueue()
        self.inbox: dict[str, queue.SimpleQueue[Iterator[Job] | None]] = {n: queue.SimpleQueue() for n in names}
        self.handing = threading.Lock()  # held to take a job: workers may share an iterator
        self.failed = False
        self.due: dict[str, float] = {}  # by worker: time at which its current job counts as hung
        # Daemon threads: a hung worker cannot be stopped and must not keep the process alive.
        me = threading.current_thread()
        self.threads = {
            n: threading.Thread(target=self._loop, args=(n, me), name=f"pql-{n}", daemon=True) for n in names
        }
        for thread in self.threads.values():
            thread.start()

    def _loop(self, name: str, owner: threading.Thread) -> None:
        crash.name_thread(f"worker {name}")
        while (jobs := idle_get(self.inbox[name], owner)) is not None:
            seconds = 0.0
            try:
                while (job := self._next(name, jobs)) is not None:
                    start = time.perf_counter()
                    job()
                    seconds += time.perf_counter() - start
                    self.begun.add(name)
                self.done.put((name, seconds))
            except BaseException as error:
                if not isinstance(error, LeftError):
                    self.failed = True
                self.done.put((name, error))

    def _next(self, name: str, jobs: Iterator[Job]) -> Job | None:
        with self.handing:
            self.due[name] = self._deadline(name)
            return None if self.failed else next(jobs, None)

    def _limit(self, name: str) -> Limit:
        if name in self.begun or self.start == self.watchdog:
            return Limit(self.watchdog, "placement.watchdog_seconds")
        return Limit(self.start, "placement.start_seconds")

    def _deadline(self, name: str) -> float:
        return clock() + self._limit(name).seconds

    def run(self, jobs: Mapping[str, Job]) -> Mapping[str, float]:
        return self.share({name: iter((job,)) for name, job in jobs.items()})

    def share(self, queues: Mapping[str, Iterator[Job]]) -> Mapping[str, float]:
        """Run each worker's jobs in sequence; returns each worker's busy seconds.

        Workers may share an iterator. After a failure, other than a ``LeftError``, no job starts. The watchdog's limit
        is per job; a wait for other workers (:meth:`waiting`) restarts it.
        """
        self.failed, self.due = False, {name: self._deadline(name) for name in queues}
        for name, jobs in queues.items():
            self.inbox[name].put(jobs)
        waiting, failed, seconds = set(queues), None, {}
        while waiting:
            left = min(self.due[name] - clock() for name in waiting)
            # Once a worker has failed the others get time to finish, so that its error comes first.
            most = deadlines.IDLE if failed is None else deadlines.OTHERS
            try:
                name, outcome = self.done.get(timeout=max(0.01, min(left, most)))
            except queue.Empty:
                if failed is not None:
                    break
                if late := sorted(n for n in waiting if self.due[n] <= clock()):
                    self.failed = True
                    raise hung(", ".join(late), self._limit(late[0])) from None
                continue
            waiting.discard(name)
            if isinstance(outcome, float):
                seconds[name] = outcome
            elif failed is None:
                failed = (name, outcome)
        if failed is not None:
            raise failure(*failed) from failed[1]
        return seconds

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Suspend a worker's deadline while it waits for other workers."""
        self.due[name] = math.inf
        yield
        self.due[name] = self._deadline(name)

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        for name, box in self.inbox.items():
            box.put(None)
            self.threads[name].join(timeout=deadlines.WORKER)


class Streams:
    """One CUDA stream per worker, one host thread. The host runs ahead of the device by at most two ticks.

    Events define all ordering: each job of a tick waits for all jobs of the previous tick. ``torch.cuda.synchronize``
    is never called.

    Args:
        watchdog: seconds after which a tick that the device has not finished counts as hung.
    """

    AHEAD = 2

    def __init__(self, devices: Mapping[str, torch.device], watchdog: float = 30.0):
        self.watchdog = watchdog
        # A stream per device that a worker may use (it pulls from and inserts on other devices); its own comes last.
        every = list(dict.fromkeys(devices.values()))
        self.streams = {
            name: [self._stream(d, priority(name)) for d in (*(d for d in every if d != own), own)]
            for name, own in devices.items()
        }
        self.ends: list[Any] = []  # events that the next tick must wait for
        self.started = False
        self.flight: deque[dict[str, tuple[Any, Any]]] = deque()  # by worker: first and last event of its job

    # Only the four methods below call CUDA; a recording back end replaces them in tests.
    def _stream(self, device: torch.device, priority: int) -> Any:
        return torch.cuda.Stream(device, priority)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def _wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def _record(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _current(self) -> list[Any]:
        return [torch.cuda.current_stream(d) for d in {s.device for own in self.streams.values() for s in own}]

    def run(self, jobs: Mapping[str, Job]) -> Mapping[str, float]:
        if not self.started:  # PyTorch's streams do not wait for the stream of the set-up
            self.ends += [self._record(stream) for stream in self._current()]
            self.started = True
        before, self.ends = self.ends, []
        tick = {}
        for name, job in jobs.items():
            with ExitStack() as inside:
                for stream in self.streams[name]:
                    for event in before:
                        self._wait(stream, event)
                    inside.enter_context(self._on(stream))
                start = self._record(self.streams[name][-1])
                with named(name):
                    job()
            self.ends += [self._record(stream) for stream in self.streams[name]]
            tick[name] = (start, self.ends[-1])
        self.flight.append(tick)
        return self._settle(self.flight.popleft()) if len(self.flight) > self.AHEAD else {}

    def _settle(self, tick: dict[str, tuple[Any, Any]]) -> dict[str, float]:
        """Wait until the device has finished ``tick``, by polling: a blocking wait could not be interrupted."""
        deadline = clock() + self.watchdog
        for name, (_, end) in tick.items():
            while not end.query():
                if clock() > deadline:
                    raise hung(name, Limit(self.watchdog, "placement.watchdog_seconds"))
                time.sleep(2e-5)
        return {name: start.elapsed_time(end) / 1e3 for name, (start, end) in tick.items()}

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        streams = self._current()
        for stream in streams:
            for event in self.ends:
                self._wait(stream, event)
        try:
            yield
        finally:
            self.ends = [*self.ends, *(self._record(stream) for stream in streams)]

    def close(self) -> None:
        pass


def failure(name: str, error: BaseException) -> RunError:
    if isinstance(error, RunError):
        return RunError(with_cause(f"worker {name} failed: ", str(error)))
    return RunError(f"worker {name} failed: {first_line(error)}")  # ``from`` keeps the other lines


def hung(name: str, limit: Limit) -> HungError:
    """Create an error with the stacks of all threads; its last line names the worker that did not finish its tick."""
    return HungError(f"{stacks()}worker {name} has not finished its tick in {limit.seconds:g} s ({limit.setting})")


@contextmanager
def named(name: str) -> Iterator[None]:
    """Convert an exception of a worker's job inside into a ``RunError`` that names the worker."""
    try:
        yield
    except HungError:  # from the watchdog, already names the worker
        raise
    except Exception as error:
        raise failure(name, error) from error
