"""A run whose environments its caller steps: another library's training loop, or a robot's control loop.

The run has a thread of its own, in which :class:`Fed` stands for the environments: where they would step, it hands the
action to the caller and waits for the row. Caller and collector never work at the same time, so both may use one
simulator's tensors; learners of the concurrent schedule work while the caller steps its environments. A run in a thread
keeps its grad mode, its current CUDA device and its number of threads apart from those of the caller.
"""

import atexit
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pql.config import Config
from pql.contract.env import EnvSpec
from pql.contract.rules import check_answer
from pql.engine import deadlines, watchdog
from pql.engine.executors import LeftError, Threads
from pql.engine.schedule import Lockstep
from pql.errors import ConfigError, RunError
from pql.run.opening import REPLAY
from pql.run.policy import Policy, fresh_policy, snapshot
from pql.run.session import Session
from pql.run.store import checkpoint
from pql.run.store.run_dir import Summary
from pql.types import Obs, Step

READY, ACTION, PAUSE, END = "ready", "action", "pause", "end"
"""What a run waits for: first observations; the row of an action; to be asked for the next action; nothing more."""


class Link:
    """Queues between the thread of a run and its caller.

    Attributes:
        session: of the run, from its first steps on.
        closed: the caller has closed the run.
        due: what the caller wants done at the next tick's end.
    """

    def __init__(self) -> None:
        self.up: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.down: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.closed = False
        self.due: list[Callable[[FedSession], Any]] = []
        self.session: FedSession | None = None

    def wait(self, what: str, value: Any = None) -> Any:
        """Tell the caller what the run waits for, and wait for it. No deadline: the time is the caller's."""
        self.up.put((what, value))
        while True:
            try:
                return self.down.get(timeout=deadlines.IDLE)
            except queue.Empty:
                watchdog.touch()

    def row(self, action: Tensor) -> Step:
        """Hand over an action [N, ...] and wait for its row. Raises ``LeftError``: the run is closed instead."""
        session = self.session
        threads = session is not None and session.ready and session.parts.schedule.executor
        with threads.waiting("collector") if isinstance(threads, Threads) else nullcontext():
            answer = self.wait(ACTION, action)
        if not isinstance(answer, Step):
            raise LeftError("the caller closed the run")
        return answer

    def pause(self, session: "FedSession") -> None:
        """Do what the caller asks for between two ticks, until it asks for an action or closes the run."""
        while self.due:
            self.due.pop(0)(session)
        answer = self.wait(PAUSE)
        while answer is not None:
            answer = self.wait(PAUSE, answer(session))
        session.stop |= self.closed


class Fed:
    """Environments of a ``VecEnv`` that the caller of a run steps.

    Args:
        spec: what they are.
        continues: their state is the one that the resumed run was saved with.
    """

    def __init__(self, spec: EnvSpec, link: Link, continues: bool):
        self.spec, self._link = replace(spec, stream="default"), link  # on which the caller works, on a GPU
        self._obs: Obs | None = None
        if continues:
            self.state_dict: Callable[[], dict[str, Any]] = dict
            self.load_state_dict: Callable[[dict[str, Any]], Any] = dict.copy

    def reset(self, seed: int | None = None) -> Obs:
        """Return the caller's first observations, [N, ...]."""
        if self._obs is None:
            self._obs = self._link.wait(READY)
        if not isinstance(self._obs, dict):
            raise LeftError("the caller closed the run")
        return self._obs

    def step(self, action: Tensor) -> Step:
        """Return the caller's row of ``action`` [N, ...]."""
        return self._link.row(action.clone())

    def close(self) -> None: ...


class FedSession(Session):
    """A session that stops between ticks until its caller asks for an action."""

    def __init__(self, config: Config, link: Link, state: Mapping[str, Any] | None = None, **options: Any):
        if wrong := [k for k in ("final", "every_seconds") if getattr(config.eval, k)]:
            allowed = "off: a run cannot step the caller's environments. pql eval evaluates its checkpoints"
            raise ConfigError(f"eval.{wrong[0]}", getattr(config.eval, wrong[0]), allowed)
        self.link, self.state, link.session = link, state, self
        self._within = False  # a tick, which the caller did not complete
        super().__init__(config, **options)

    def _loop(self) -> None:
        try:
            if self.ready and self.parts.schedule.ticks == 0:
                self.link.pause(self)
            super()._loop()
        except (LeftError, RunError):
            if not self.link.closed:
                raise
            self._within = True
            self.report()

    def _over(self) -> bool:
        if not super()._over():
            self.link.pause(self)
        return self.link.closed or super()._over()

    def report(self, more: Mapping[str, float] | None = None) -> None:
        """Log a row of metrics of the ticks since the last one, with those of the caller; if there were any."""
        if self.parts.schedule.ticks > self._window["ticks"]:
            self.write({**self._drain().collect(), **(more or {})})

    def save_point(self) -> Path:
        """Write policy and resume point in the background; return the path of the latter."""
        self.save(background=True)
        return self.archive.points / f"tick-{self.parts.schedule.ticks:012d}"

    def save(self, background: bool = False) -> None:
        if not self._within:
            super().save(background)
        elif self.ranks.first:
            self.archive.save_policy(self.parts, {"counters": self._counters(), "ranks": self.ranks.size})


class Driven:
    """A run that its caller gives observations and rows, and that returns actions; made by ``pql.drive``. ::

        run = pql.drive("algo=pql2", spec=spec)
        action = run.begin(obs)
        while run.going:
            action = run.feed(env.step(action))
        summary = run.close()

    ``feed(step)`` is ``record(step)`` and then ``act()``. Between these two, a tick's work is complete: the learners
    have made their updates, and :meth:`state` and :meth:`save` are exact. A tick has ``algo.horizon`` steps in
    on-policy algorithms, else usually one.

    Exceptions of the run are raised in the caller's next call. An unclosed run is closed when the program ends. On a
    GPU, call it on the default stream.

    Attributes:
        env: what stands for the environments in the run.
        going: actions are still to be fed with rows: the run has begun and not ended.
        paused: the run is between ``record`` and ``act``, at the end of a tick.
        readable: :meth:`policy` is possible now.
    """

    def __init__(self, spec: EnvSpec, continues: bool = False):
        self.link = Link()
        self.env = Fed(spec, self.link, continues)
        self._at, self._value = "", None
        self._action: Tensor | None = None
        self._summary: Summary | None = None

    def open(self, launch: Callable[[], Summary]) -> "Driven":
        """Build the run, with ``launch`` in a new thread. Returns when it waits for first observations. Raises what
        the launch raises."""
        self._thread = threading.Thread(target=self._main, args=(launch,), name="pql-run", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._next()
        return self

    def _main(self, launch: Callable[[], Summary]) -> None:
        try:
            if self.env.spec.device.type == "cuda":
                torch.cuda.set_device(self.env.spec.device)
            self.link.up.put((END, launch()))
        except BaseException as error:
            self.link.up.put((END, error))

    def _next(self) -> None:
        """Wait for the run. Raises its error, if it has failed."""
        self._at, self._value = "", None  # unknown, if this wait is interrupted
        self._at, self._value = self.link.up.get()
        if self._at == END:
            self._thread.join()
            atexit.unregister(self.close)
            if isinstance(self._value, BaseException) and not (self.link.closed and _left(self._value)):
                raise self._value
            self._summary = self._value if isinstance(self._value, Summary) else None

    def _tell(self, message: Any) -> None:
        self.link.down.put(message)
        self._next()

    @property
    def going(self) -> bool:
        return self._at in (ACTION, PAUSE)

    @property
    def paused(self) -> bool:
        return self._at == PAUSE

    @property
    def readable(self) -> bool:
        session = self.link.session
        if self._at != ACTION or session is None or not session.ready:
            return self.going
        schedule = session.parts.schedule
        return not isinstance(schedule.executor, Threads) or isinstance(schedule, Lockstep)

    # -- the caller's loop ----------------------------------------------------------------------------------------

    def begin(self, obs: Obs) -> Tensor:
        """Give first observations, name -> [N, ...]; return the first action, [N, A] or [N].

        The first ``algo.warmup_steps`` actions are random.
        """
        self._expect("begin", READY)
        self._tell(dict(obs))
        return self.act()

    def act(self) -> Tensor:
        """Return the action for the last observations, [N, A] in [-1, 1], or [N] int64. After the end, the last one."""
        self._expect("act", ACTION, PAUSE, END)
        if self._at == PAUSE:
            self._tell(None)
        if self._at == ACTION:
            self._action = self._value
        if self._action is None:
            raise RunError("the run has ended before its first action")
        return self._action

    def record(self, step: Step) -> None:
        """Give the row [N, ...] of the action; returns when the run is done with it. Raises ``ConfigError``:
        a row that is not as the spec says, before anything is done with it."""
        self._expect("record", ACTION)
        check_answer("step", step, self.env.spec)
        self._tell(step)

    def feed(self, step: Step) -> Tensor:
        """Give the row [N, ...] of the last action; return the next one, [N, A] or [N]."""
        self.record(step)
        return self.act()

    def _expect(self, call: str, *states: str) -> None:
        if self._at not in states:
            known = {READY: "waits for begin(obs)", ACTION: "waits for the row of its last action"}
            known |= {PAUSE: "waits for act()", END: "has ended", "": "was not opened, or was interrupted"}
            raise RunError(f"{call}() out of order: the run {known[self._at]}")

    # -- between two steps ----------------------------------------------------------------------------------------

    def at_pause(self, ask: Callable[[FedSession], Any]) -> Any:
        """Return ``ask(session)``, called in the run's thread at the end of a tick. Raises ``RunError``: within one."""
        if self._at != PAUSE:
            raise RunError("this is possible between record(step) and act() at the end of a tick only")
        self._tell(ask)
        return self._value

    def soon(self, ask: Callable[[FedSession], Any]) -> bool:
        """Call ``ask(session)`` at the end of the running tick; now, if it has ended. Returns True if now."""
        if self._at == PAUSE:
            self.at_pause(ask)
        else:
            self.link.due.append(ask)
        return self._at == PAUSE

    def save(self) -> bool:
        """Write policy and resume point into the run directory: now, or at the end of the running tick. Returns True
        if now."""
        return self.soon(FedSession.save)

    def state(self, replay: bool = True) -> dict[str, Any]:
        """Return what the next tick depends on, for ``pql.drive(state=...)``: copies on the CPU.

        Args:
            replay: with the stored rows; a run that continues without them has the networks and statistics only.
        Returns:
            ``tensors`` by name, and ``manifest``, of plain values.
        """
        return self.at_pause(lambda session: saved_state(session, replay))

    def policy(self, into: Policy | None = None) -> Policy:
        """Copy the policy that is trained, with its statistics, ``into`` a policy: by default a new one on the CPU.
        Raises ``RunError``: within a tick, while learners are at work on threads (``placement.executor``)."""
        session = self.link.session
        if self._at != ACTION or session is None or not self.readable:
            return self.at_pause(lambda session: copy_of(session, into))
        return copy_of(session, into)

    def close(self) -> Summary | None:
        """End the run and its thread; return its summary, or None if it had not begun to learn.

        Between ``record`` and ``act`` it saves a resume point of this moment; within a tick only the policy is saved.
        """
        self.link.closed = True
        while self._at != END:
            self.link.down.put(None)
            self._next()
        return self._summary

    def __enter__(self) -> "Driven":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def saved_state(session: Session, replay: bool) -> dict[str, Any]:
    """Return tensors and manifest of a resume point of ``session``, copied to the CPU."""
    parts = session.parts
    with parts.schedule.executor.exclusive():
        tensors = checkpoint.flatten(parts.state_dict())
        kept = {k: v.to("cpu", copy=True) for k, v in tensors.items() if replay or not k.startswith(REPLAY)}
    facts = {"counters": session._counters(), "ranks": session.ranks.size}
    return {"tensors": kept, "manifest": session.archive.manifest("resume", parts, facts)}


def copy_of(session: Session, into: Policy | None = None) -> Policy:
    policy = into or fresh_policy(session.config, session.parts.env.spec, "cpu")
    with session.parts.schedule.executor.exclusive():
        policy.load_state_dict(snapshot(session.parts))
    return policy


def _left(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, LeftError):
        error = error.__cause__
    return error is not None
