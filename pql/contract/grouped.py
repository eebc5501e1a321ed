"""``Grouped``: several simulators as one ``VecEnv`` with groups, each simulator stepping on its own thread.

The collector computes the actions of one group while the others step. This is faster if stepping leaves the collector's
core free: the simulator waits for another process, or has cores to itself.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Generator, Tensor

from pql.contract.env import EnvSpec, VecEnv, make_ready, preparation
from pql.contract.optional import PartialReset, Resumable, SplitStep, Staged, supports
from pql.contract.rules import check_answer
from pql.engine import deadlines
from pql.engine.deadlines import answer_of, idle_get
from pql.errors import ConfigError
from pql.types import Obs, Step


class Grouped:
    """G simulators of n environments each as one ``VecEnv`` of N = G n environments, with ``send`` and ``recv``.

    Each simulator has its own seed, drawn from the seed of ``reset``, and steps with one intra-op thread. Fields of a
    group's ``Step`` are [n, ...]; ``step`` itself takes and returns [N, ...]. See ``VecEnv`` for the methods.

    Args:
        envs: simulators with equal specifications. This object owns them: it closes them.
    Raises:
        ConfigError: the simulator allows only one instance per process, or steps on a GPU.
    """

    def __init__(self, envs: Sequence[VecEnv]):
        self.envs = list(envs)
        self.spec = grouped_spec(envs[0].spec, len(envs))
        self.ids = list(torch.arange(self.spec.num_envs).chunk(len(envs)))
        # A simulator in another process has start and result, and needs no thread here.
        self._steppers: list[Any] = [
            env if supports(env, SplitStep) else Stepper(env.step, f"pql-group-{g}") for g, env in enumerate(envs)
        ]
        self._sent: deque[int] = deque()  # groups whose answer is due, oldest first
        if all(supports(env, PartialReset) for env in envs):
            self.reset_where = self._reset_where
        if all(supports(env, Resumable) for env in envs):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict
        if all(supports(env, Staged) for env in envs):
            self.progress, self.load_progress = self._progress, self._load_progress

    @classmethod
    def make(cls, make: Callable[[], VecEnv], groups: int) -> "Grouped":
        """Build ``groups`` simulators by calling ``make`` once for each."""
        with ExitStack() as opened:  # close the earlier ones if a later one fails
            envs = []
            for _ in range(groups):
                envs.append(make())
                opened.callback(envs[-1].close)
            grouped = cls(envs)
            opened.pop_all()
        return grouped

    def prepare(self) -> None:
        """Call ``prepare`` of every simulator that has it."""
        for env in self.envs:
            make_ready(env)

    def preparation(self) -> str:
        """Return what :meth:`prepare` is doing, in words."""
        return next((text for env in self.envs if (text := preparation(env))), "")

    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments; return their observations, [N, ...]."""
        seeds: list[Any] = [None] * len(self.envs)
        if seed is not None:
            # seed + g would repeat seeds across groups: some simulators seed environment i with seed + i.
            seeds = torch.randint(2**31, (len(seeds),), generator=Generator().manual_seed(seed)).tolist()
        shown = [env.reset(s) for env, s in zip(self.envs, seeds, strict=True)]
        for env, obs in zip(self.envs, shown, strict=True):
            check_answer("reset", obs, env.spec)
        return joined(shown)

    def send(self, action: Tensor, ids: Tensor) -> None:
        """Start a step of the group with environments ``ids`` [n]; ``action`` is [n, A] or [n]."""
        group = int(ids[0]) // len(self.ids[0])
        self._steppers[group].start(action)
        self._sent.append(group)

    def recv(self) -> tuple[Tensor, Step]:
        """Wait for the group sent first; return its ids [n] and its step [n, ...]."""
        group = self._sent.popleft()
        return self.ids[group], self._steppers[group].result()

    def step(self, action: Tensor) -> Step:
        """Step all groups with ``action`` [N, A] or [N]."""
        for ids in self.ids:
            self.send(action[ids[0] : ids[-1] + 1], ids)
        steps = [self.recv()[1] for _ in self.ids]
        for env, step in zip(self.envs, steps, strict=True):
            check_answer("step", step, env.spec)
        return join_steps(steps)

    def close(self) -> None:
        """Close all simulators and end their threads."""
        for stepper, env in zip(self._steppers, self.envs, strict=True):
            stepper.close()
            env.close()

    def _reset_where(self, mask: Tensor) -> Obs:
        """Only while no answer is pending."""
        parts = zip(self.envs, mask.chunk(len(self.envs)), strict=True)
        return joined([cast(PartialReset, env).reset_where(part) for env, part in parts])

    def _state_dict(self) -> dict[str, Any]:
        return {str(g): cast(Resumable, env).state_dict() for g, env in enumerate(self.envs)}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        for g, env in enumerate(self.envs):
            cast(Resumable, env).load_state_dict(state[str(g)])

    def _progress(self) -> dict[str, Any]:
        """The numbers are those of the first group; tensors are of all."""
        parts = [cast(Staged, env).progress() for env in self.envs]
        return {k: torch.cat([part[k] for part in parts]) if isinstance(v, Tensor) else v for k, v in parts[0].items()}

    def _load_progress(self, progress: Mapping[str, Any]) -> None:
        count = len(self.envs)
        for g, env in enumerate(self.envs):
            own = {k: v.chunk(count)[g] if isinstance(v, Tensor) else v for k, v in progress.items()}
            cast(Staged, env).load_progress(own)


class Stepper:
    """Thread that runs ``step``, one action [n, ...] at a time."""

    def __init__(self, step: Callable[[Tensor], Step], name: str):
        self.step = step
        self.inbox: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Step | BaseException] = queue.SimpleQueue()
        # A daemon thread, so that a hung simulator does not keep the process alive.
        self.thread = threading.Thread(target=self._loop, args=(threading.current_thread(),), name=name, daemon=True)
        self.thread.start()

    @torch.no_grad()
    def _loop(self, owner: threading.Thread) -> None:
        torch.get_num_threads()  # the first call in a thread adopts the process-wide count, and would undo a set before
        torch.set_num_threads(1)
        while (action := idle_get(self.inbox, owner)) is not None:
            try:
                self.outbox.put(self.step(action))
            except BaseException as error:
                self.outbox.put(error)

    def start(self, action: Tensor) -> None:
        """Queue a step with ``action`` and return immediately."""
        self.inbox.put(action)

    def result(self) -> Step:
        """Wait for the step of the oldest action started, under the caller's deadline; re-raise its exception."""
        outcome = answer_of(self.thread, self.outbox)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """End the thread; a hung one is left behind."""
        self.inbox.put(None)
        self.thread.join(timeout=deadlines.WORKER)


def grouped_spec(one: EnvSpec, groups: int) -> EnvSpec:
    """Return the specification of ``groups`` simulators with specification ``one``, combined. Raises ``ConfigError``:
    the simulator allows only one instance per process, or steps on a GPU."""
    if one.single_instance:
        raise ConfigError("placement.groups", groups, f"null or 1: a process can hold only one {one.name}")
    if one.device.type != "cpu":
        raise ConfigError("placement.groups", groups, f"null or 1: {one.name} steps on {one.device}, not on the CPU")
    return replace(one, num_envs=one.num_envs * groups, groups=groups)


def join_steps(steps: Sequence[Step]) -> Step:
    """Concatenate the steps of all groups, [n, ...] each, into one of [N, ...]."""
    return Step(*(joined(field) for field in zip(*steps, strict=True)))


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate tensors [n, ...] of all groups, or dicts of such tensors, into [N, ...]."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], dict):
        return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
    return torch.cat(list(parts))
