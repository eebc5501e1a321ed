"""``Grouped``: several simulators as one whose environments answer in groups, each stepping on a thread of its own.

With it a collector computes one group's actions while the others step. It pays where a simulator leaves the collector's
processor alone while it steps: one that waits for another process, or that has cores to itself.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from pql.contract.env import EnvSpec, VecEnv, make_ready
from pql.errors import ConfigError
from pql.types import Obs, Step


class Grouped:
    """G simulators of n environments each as one of N = G n, with ``send`` and ``recv``.

    Each has a seed of its own, drawn from the one that ``reset`` is given, and steps with one intra-op thread.

    Args:
        envs: alike but for their random draws. They are this object's from now on.
    Raises:
        ConfigError: a simulator that allows only one in a process, or that steps on a GPU.
    """

    def __init__(self, envs: Sequence[VecEnv]):
        self.envs = list(envs)
        self.spec = grouped_spec(envs[0].spec, len(envs))
        self.ids = list(torch.arange(self.spec.num_envs).chunk(len(envs)))
        # One in another process steps there: it needs no thread to wait in.
        self._steppers: list[Any] = [
            env if hasattr(env, "start") and hasattr(env, "result") else Stepper(env.step, f"pql-group-{g}")
            for g, env in enumerate(envs)
        ]
        self._sent: deque[int] = deque()  # groups whose answer is due, oldest first
        if all(hasattr(env, "reset_where") for env in envs):
            self.reset_where = self._reset_where
        if all(hasattr(env, "state_dict") for env in envs):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict

    @classmethod
    def make(cls, make: Callable[[], VecEnv], groups: int) -> "Grouped":
        """Of simulators that ``make`` gives, one for each group."""
        with ExitStack() as opened:  # those there are are closed if a later one fails
            envs = []
            for _ in range(groups):
                envs.append(make())
                opened.callback(envs[-1].close)
            grouped = cls(envs)
            opened.pop_all()
        return grouped

    def prepare(self) -> None:
        """Of each."""
        for env in self.envs:
            make_ready(env)

    def reset(self, seed: int | None = None) -> Obs:
        seeds: list[Any] = [None] * len(self.envs)
        if seed is not None:
            # Not seed + g: simulators that number their environments' seeds on would give two groups the same ones.
            seeds = torch.randint(2**31, (len(seeds),), generator=Generator().manual_seed(seed)).tolist()
        return joined([env.reset(s) for env, s in zip(self.envs, seeds, strict=True)])

    def send(self, action: Tensor, ids: Tensor) -> None:
        group = int(ids[0]) // len(self.ids[0])
        self._steppers[group].start(action)
        self._sent.append(group)

    def recv(self) -> tuple[Tensor, Step]:
        group = self._sent.popleft()
        return self.ids[group], self._steppers[group].result()

    def step(self, action: Tensor) -> Step:
        for ids in self.ids:
            self.send(action[ids[0] : ids[-1] + 1], ids)
        return join_steps([self.recv()[1] for _ in self.ids])

    def close(self) -> None:
        for stepper, env in zip(self._steppers, self.envs, strict=True):
            stepper.close()
            env.close()

    def _reset_where(self, mask: Tensor) -> Obs:
        """While no answer is due."""
        parts = zip(self.envs, mask.chunk(len(self.envs)), strict=True)
        return joined([env.reset_where(part) for env, part in parts])  # type: ignore[attr-defined]

    def _state_dict(self) -> dict[str, Any]:
        return {str(g): env.state_dict() for g, env in enumerate(self.envs)}  # type: ignore[attr-defined]

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        for g, env in enumerate(self.envs):
            env.load_state_dict(state[str(g)])  # type: ignore[attr-defined]


class Stepper:
    """Runs ``step`` on a thread of its own, one action at a time."""

    def __init__(self, step: Callable[[Tensor], Step], name: str):
        self.step = step
        self.inbox: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Step | BaseException] = queue.SimpleQueue()
        # A daemon: a simulator that hangs cannot be stopped, but it must not keep the process alive.
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.thread.start()

    @torch.no_grad()
    def _loop(self) -> None:
        torch.get_num_threads()  # asked first: the first question takes over the process-wide count, whenever it comes
        torch.set_num_threads(1)
        while (action := self.inbox.get()) is not None:
            try:
                self.outbox.put(self.step(action))
            except BaseException as error:
                self.outbox.put(error)

    def start(self, action: Tensor) -> None:
        self.inbox.put(action)

    def result(self) -> Step:
        """Of the oldest action started. Raises what its step raised."""
        outcome = self.outbox.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        self.inbox.put(None)
        self.thread.join(timeout=2.0)


def grouped_spec(one: EnvSpec, groups: int) -> EnvSpec:
    """The specification of ``groups`` simulators like ``one`` as one.

    Raises:
        ConfigError: they cannot be.
    """
    if one.single_instance:
        raise ConfigError("placement.groups", groups, f"null or 1: a process can hold only one {one.name}")
    if one.device.type != "cpu":
        raise ConfigError("placement.groups", groups, f"null or 1: {one.name} steps on {one.device}, not on the CPU")
    return replace(one, num_envs=one.num_envs * groups, groups=groups)


def join_steps(steps: Sequence[Step]) -> Step:
    """The steps of all groups, in order, as one of all environments."""
    return Step(*(joined(field) for field in zip(*steps, strict=True)))


def joined(parts: Sequence[Any]) -> Any:
    """Tensors [n, ...] of every group, or dicts of such, as ones of all environments."""
    if isinstance(parts[0], dict):
        return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
    return torch.cat(list(parts))
