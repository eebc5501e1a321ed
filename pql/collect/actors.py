"""Actors: how a policy chooses actions while it collects, with noise, by sampling or epsilon-greedily."""

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn

from pql.collect.exploration import Exploration
from pql.contract.env import Discrete, EnvSpec
from pql.types import Memory, Obs

ActFunction = Callable[[nn.Module, Obs, Generator], Tensor]
"""(policy, normalised obs, generator) -> action [N, A]: what algorithms differ in when acting."""


class Actor(Protocol):
    """A policy at work: it turns observations into actions, and keeps what it needs from one step to the next."""

    action: Tensor  # [N, A] or [N] int64: what the simulator gets, at a fixed address
    memory: Memory | None

    @property
    def policy(self) -> nn.Module:
        """A private copy, that pulls land in."""
        ...

    @property
    def squashed(self) -> Tensor | None:
        """What a policy bounded by a tanh gave last, before exploration noise, [N, A]; None: it is of another kind."""
        ...

    def act(self, obs: Obs, gen: Generator) -> None:
        """Normalised observations -> ``action``."""
        ...

    def record(self, device: torch.device) -> Any:
        """What a store on ``device`` keeps of the last ``act``."""
        ...

    def observe(self, first: Tensor) -> None:
        """Note where the next action begins an episode ([N] bool)."""
        ...

    def restart(self) -> None:
        """Every next action begins an episode."""
        ...

    def part(self, columns: slice) -> "Actor":
        """The same policy for a range of the environments. Its tensors are views: it has no state of its own."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class NoisyActor:
    """A policy without memory, and exploration noise on its action."""

    memory: Memory | None = None

    def __init__(self, policy: nn.Module, act: ActFunction, explore: Exploration, spec: EnvSpec):
        self.policy, self.explore, self._act = policy, explore, act
        self.action, self.squashed = action_buffer(spec), action_buffer(spec)

    def act(self, obs: Obs, gen: Generator) -> None:
        self.squashed.copy_(self._act(self.policy, obs, gen))
        self.action.copy_(self.explore(self.squashed, gen))

    def record(self, device: torch.device) -> Tensor:
        return self.action.to(device)

    def observe(self, first: Tensor) -> None:
        self.explore.observe(first)

    def restart(self) -> None:
        self.explore.fresh.fill_(True)

    def part(self, columns: slice) -> "NoisyActor":
        part = copy.copy(self)
        part.action, part.squashed = self.action[columns], self.squashed[columns]
        part.explore = self.explore.part(columns)
        return part

    def state_dict(self) -> dict[str, Tensor]:
        return self.explore.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.explore.load_state_dict(state)


def action_buffer(spec: EnvSpec) -> Tensor:
    """Zeros in the shape and type of an action: [N, A] float32, or [N] int64."""
    if isinstance(spec.action, Discrete):
        return torch.zeros(spec.num_envs, dtype=torch.int64, device=spec.device)
    return torch.zeros(spec.num_envs, spec.action.size, device=spec.device)
