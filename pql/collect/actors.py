"""Actors: action selection during collection, with noise, by sampling or epsilon-greedily."""

import copy
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Generator, Tensor, nn

from pql.collect.epsilon import STORED, Epsilon, epsilon_greedy
from pql.collect.exploration import Exploration
from pql.contract.env import Discrete, EnvSpec
from pql.data.rollout import PolicyOutput
from pql.nets.actor_critic import StochasticPolicy
from pql.nets.distributions import DiagGaussian
from pql.nets.q import QNetwork, RecurrentQNetwork, redraw_noise
from pql.types import Acted, Memory, Obs

Noise = Callable[[Tensor], Tensor]
"""Tensor [N, A] -> normal noise of its shape."""
ActFunction = Callable[[nn.Module, Obs, Noise], Tensor]
"""(policy, normalised obs, noise) -> action [N, A]: the part of acting that differs between algorithms."""


class Actor:
    """Collecting policy: maps observations to actions and keeps its state from step to step.

    Attributes:
        policy: the collector's copy of the policy, into which new weights are pulled.
        action: [N, A] float32, [N] or [N, K] int64: the simulator's input, at a fixed address.
        memory: state of a recurrent policy; None: it has none.
        before: [N, C] its carry before the last action, if rows are stored with it.
        squashed: last output of a tanh policy before exploration noise, [N, A]; None for other policies.
    """

    policy: nn.Module
    action: Tensor
    memory: Memory | None = None
    before: Tensor | None = None
    squashed: Tensor | None = None

    def act(self, obs: Obs, gen: Generator) -> None:
        """Choose ``action`` for normalised observations [N, ...]."""
        raise NotImplementedError

    def record(self, device: torch.device) -> Any:
        """Return the data of the last ``act`` that a store on ``device`` keeps."""
        return self.action.to(device)

    def observe(self, first: Tensor) -> None:
        """Record where the next action begins an episode, [N] bool."""
        if self.memory is not None:
            self.memory.carry.mul_(~first.unsqueeze(1))
            self.memory.fresh.copy_(first)

    def restart(self) -> None:
        """Mark every environment's next action as the first of an episode."""
        if self.memory is not None:
            self.memory.carry.zero_()
            self.memory.fresh.fill_(True)

    def part(self, columns: slice) -> Self:
        """Return the actor of a range of the environments; its tensors are views of this one's."""
        part = copy.copy(self)
        part.action = self.action[columns]
        part.memory = None if self.memory is None else Memory(*(t[columns] for t in self.memory))
        part.before = None if self.before is None else self.before[columns]
        return part

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors to save; they are restored in place."""
        memory = {} if self.memory is None else self.memory._asdict()
        return memory if self.before is None else {**memory, "before": self.before}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def empty_memory(spec: EnvSpec, size: int) -> Memory:
    """Return the memory with a carry of ``size`` numbers before an episode's first action."""
    n, device = spec.num_envs, spec.device
    return Memory(torch.zeros(n, size, device=device), torch.ones(n, dtype=torch.bool, device=device))


class NoisyActor(Actor):
    """Policy with exploration noise on its action."""

    squashed: Tensor

    def __init__(self, policy: nn.Module, act: ActFunction, explore: Exploration, spec: EnvSpec):
        self.policy, self.explore, self._act = policy, explore, act
        self.action, self.squashed = action_buffer(spec), action_buffer(spec)

    def act(self, obs: Obs, gen: Generator) -> None:
        self.squashed.copy_(self._act(self.policy, obs, lambda like: self.explore.policy_noise(like, gen)))
        self.action.copy_(self.explore(self.squashed, gen))

    def observe(self, first: Tensor) -> None:
        super().observe(first)
        self.explore.observe(first)

    def restart(self) -> None:
        super().restart()
        self.explore.fresh.fill_(True)

    def part(self, columns: slice) -> Self:
        part = super().part(columns)
        part.squashed, part.explore = self.squashed[columns], self.explore.part(columns)
        return part

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.explore.state_dict(), **super().state_dict()}


class RememberingActor(NoisyActor):
    """Recurrent policy with exploration noise; the carry [N, C] before the action is stored with it.

    During the warm-up the policy does not act, and the carry is zeros.
    """

    memory: Memory
    before: Tensor

    def __init__(self, policy: nn.Module, act: ActFunction, explore: Exploration, spec: EnvSpec):
        super().__init__(policy, act, explore, spec)
        self.memory = empty_memory(spec, *cast(Any, policy).state_shapes["carry"])
        self.before = self.memory.carry.clone()

    def act(self, obs: Obs, gen: Generator) -> None:
        self.before.copy_(self.memory.carry)
        seen, carry = cast(Any, self.policy.encoder).step(obs, self.memory.carry)
        self.memory.carry.copy_(carry)
        super().act(seen, gen)

    def record(self, device: torch.device) -> Acted:
        return Acted(self.action.to(device), {"carry": self.before.to(device)})


def action_buffer(spec: EnvSpec) -> Tensor:
    """Return zeros with an action's shape and type: [N, A] float32, [N] or [N, K] int64."""
    return torch.zeros(spec.num_envs, *spec.action.shape, dtype=spec.action.dtype, device=spec.device)


class EpsilonActor(Actor):
    """Epsilon-greedy actor of a Q-network. Noisy layers get new noise for every step.

    Args:
        store_values: store with the action the values for a new row's priority: ``q`` = Q(s, a) of the chosen action
            and ``value`` = max_a Q(s, a); NaN on warm-up rows, whose actions are random.
    """

    def __init__(self, policy: nn.Module, epsilon: Epsilon, spec: EnvSpec, store_values: bool = False):
        assert isinstance(spec.action, Discrete)
        self.policy, self.epsilon = policy, epsilon
        self.action = action_buffer(spec)
        self.stored = {
            k: torch.full((spec.num_envs,), torch.nan, device=spec.device) for k in (STORED if store_values else ())
        }

    def act(self, obs: Obs, gen: Generator) -> None:
        policy = self.policy
        assert isinstance(policy, QNetwork)
        redraw_noise(policy, gen)
        self._choose(policy.values(obs), gen)

    def _choose(self, values: Tensor, gen: Generator) -> None:
        """Choose epsilon-greedy actions from ``values`` [N, n]."""
        self.action.copy_(epsilon_greedy(values, self.epsilon(), gen))
        if self.stored:
            self.stored["q"].copy_(values.gather(-1, self.action.unsqueeze(-1)).squeeze(-1))
            self.stored["value"].copy_(values.amax(-1))

    def record(self, device: torch.device) -> Tensor | Acted:
        action = self.action.to(device)
        return Acted(action, {k: v.to(device) for k, v in self.stored.items()}) if self.stored else action

    def part(self, columns: slice) -> Self:
        part = super().part(columns)
        part.epsilon = self.epsilon.part(columns)
        part.stored = {k: v[columns] for k, v in self.stored.items()}
        return part

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": self.epsilon.steps, **self.stored, **super().state_dict()}


class RecurrentActor(EpsilonActor):
    """Epsilon-greedy actor of a recurrent Q-network. The carry [N, C] before the action is stored with it.

    During the warm-up the network does not act, and the carry is zeros.
    """

    memory: Memory
    before: Tensor

    def __init__(self, policy: RecurrentQNetwork, epsilon: Epsilon, spec: EnvSpec, store_values: bool = False):
        super().__init__(policy, epsilon, spec, store_values)
        self.memory = empty_memory(spec, policy.carry_size)
        self.before = self.memory.carry.clone()

    def act(self, obs: Obs, gen: Generator) -> None:
        policy = self.policy
        assert isinstance(policy, RecurrentQNetwork)
        self.before.copy_(self.memory.carry)
        values, carry = policy.step(obs, self.memory.carry)
        self.memory.carry.copy_(carry)
        self._choose(values, gen)

    def record(self, device: torch.device) -> Acted:
        stored = {**self.stored, "carry": self.before}
        return Acted(self.action.to(device), {k: v.to(device) for k, v in stored.items()})


class StochasticActor(Actor):
    """Actor of a stochastic policy: it also stores raw actions, distribution parameters and the weight version."""

    policy: StochasticPolicy

    def __init__(self, policy: StochasticPolicy, spec: EnvSpec):
        device = spec.device
        self.policy = policy
        self.action = action_buffer(spec)
        n, size, carry_size = spec.num_envs, policy.dist.params_size, policy.body.carry_size
        self.version = torch.zeros((), dtype=torch.int64, device=device)  # of the weights, pulled with them
        versions = torch.full((n,), -1, device=device)  # per environment, because some act rarely
        memory = empty_memory(spec, carry_size)
        # With late answers, the memory before the action is needed when its answer arrives.
        before = memory.carry.clone() if spec.spread > 1 else None
        squashes = isinstance(policy.dist, DiagGaussian) and policy.dist.squash
        self.squashed = self.action if squashes else None
        self.acted = PolicyOutput(action_buffer(spec), torch.zeros(n, size, device=device), versions, before)
        self.memory = memory if carry_size else None

    def act(self, obs: Obs, gen: Generator) -> None:
        policy, dist = self.policy, self.policy.dist
        if self.memory is None:
            params = policy(obs)
        else:
            if self.acted.carry is not None:
                self.acted.carry.copy_(self.memory.carry)
            params, carry = policy.step(obs, self.memory.carry)
            self.memory.carry.copy_(carry)
        raw = dist.sample(params, gen)
        self.acted.raw.copy_(raw)
        self.acted.params.copy_(params)
        self.acted.version.copy_(self.version)
        self.action.copy_(dist.action(raw))

    def record(self, device: torch.device) -> PolicyOutput:
        return self.acted if device == self.action.device else self.acted.map(lambda t: t.to(device))

    def part(self, columns: slice) -> Self:
        part = super().part(columns)
        part.acted = self.acted.map(lambda t: t[columns])
        part.squashed = None if self.squashed is None else part.action
        return part

    def state_dict(self) -> dict[str, Tensor]:
        memory = super().state_dict()
        if self.acted.carry is None:
            return memory
        return {**memory, **{f"acted/{k}": t for k, t in self.acted._asdict().items()}}
