"""Epsilon-greedy exploration: how often each environment acts at random, and the actor that does it.

Schedules advance in env steps, as device tensors: no host value changes from step to step.
"""

import copy

import torch
from torch import Generator, Tensor, nn

from pql.collect.actors import action_buffer
from pql.config import EpsilonConfig
from pql.contract.env import Discrete, EnvSpec
from pql.nets.q import QNetwork, RecurrentQNetwork, redraw_noise
from pql.types import Acted, Memory, Obs

TOLD = ("q", "value")
"""Names of the columns that an :class:`EpsilonActor` has stored beside its actions."""


def ladder(num_envs: int, base: float, exponent: float) -> Tensor:
    """epsilon_i = base ** (1 + exponent * i / (N - 1)) for i = 0 .. N - 1 (Horgan et al. 2018, Ape-X), [N]."""
    place = torch.arange(num_envs, dtype=torch.float64) / max(1, num_envs - 1)
    return (base ** (1 + exponent * place)).float()


class Epsilon:
    """The share of random actions of each environment, [N].

    ``annealed`` falls linearly from ``start`` to ``end`` within ``steps`` env steps of the policy (all environments
    together); ``ladder`` and ``fixed`` stay as they are; ``none`` is 0.

    Attributes:
        mean: over the environments, of the last step; for the log.
    """

    def __init__(self, config: EpsilonConfig, num_envs: int, device: torch.device):
        final = torch.full((num_envs,), 0.0 if config.kind == "none" else config.end)
        if config.kind == "ladder":
            final = ladder(num_envs, config.base, config.exponent)
        self.final, self.final_mean = final.to(device), final.mean().item()
        self.excess = config.start - config.end if config.kind == "annealed" else 0.0
        self.length = config.steps
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # env steps so far
        self.mean = torch.zeros((), device=device)

    def __call__(self) -> Tensor:
        """Those of the next step; counts it."""
        excess = self.excess * (1 - self.steps / self.length).clamp_(min=0)
        self.steps += self.final.shape[0]
        self.mean.copy_(self.final_mean + excess)
        return self.final + excess

    def part(self, columns: slice) -> "Epsilon":
        """Of a range of the environments; it counts for all of them."""
        part = copy.copy(self)
        part.final = self.final[columns]
        return part


def epsilon_greedy(values: Tensor, epsilon: Tensor, gen: Generator) -> Tensor:
    """The action of the largest of ``values`` [N, n], or, with probability ``epsilon`` [N], any of the n: [N] int64."""
    size, device = values.shape[:1], values.device
    random = torch.randint(values.shape[1], size, generator=gen, device=device)
    explores = torch.rand(size, generator=gen, device=device) < epsilon
    return torch.where(explores, random, values.argmax(-1))


class EpsilonActor:
    """Greedy in a network's values, or random with probability epsilon. Noisy layers are drawn anew for every act.

    Args:
        tells: store beside the action what a new row's priority needs: ``q`` = Q(s, a) of the action taken and
            ``value`` = max_a Q(s, a); NaN on rows of the warm-up, which no network acted on.
    """

    squashed: Tensor | None = None
    memory: Memory | None = None

    def __init__(self, policy: nn.Module, epsilon: Epsilon, spec: EnvSpec, tells: bool = False):
        assert isinstance(spec.action, Discrete)
        self.policy, self.epsilon = policy, epsilon
        self.action = action_buffer(spec)
        self.told = {k: torch.full((spec.num_envs,), torch.nan, device=spec.device) for k in (TOLD if tells else ())}

    def act(self, obs: Obs, gen: Generator) -> None:
        policy = self.policy
        assert isinstance(policy, QNetwork)
        redraw_noise(policy, gen)
        self._choose(policy.values(obs), gen)

    def _choose(self, values: Tensor, gen: Generator) -> None:
        """Act on ``values`` [N, n]."""
        self.action.copy_(epsilon_greedy(values, self.epsilon(), gen))
        if self.told:
            self.told["q"].copy_(values.gather(-1, self.action.unsqueeze(-1)).squeeze(-1))
            self.told["value"].copy_(values.amax(-1))

    def record(self, device: torch.device) -> Tensor | Acted:
        action = self.action.to(device)
        return Acted(action, {k: v.to(device) for k, v in self.told.items()}) if self.told else action

    def observe(self, first: Tensor) -> None:
        """Nothing: epsilon does not depend on episodes."""

    def restart(self) -> None:
        """Nothing is remembered from step to step."""

    def part(self, columns: slice) -> "EpsilonActor":
        part = copy.copy(self)
        part.action, part.epsilon = self.action[columns], self.epsilon.part(columns)
        part.told = {k: v[columns] for k, v in self.told.items()}
        return part

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": self.epsilon.steps, **self.told}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class RecurrentActor(EpsilonActor):
    """The same with a recurrent network. Beside the action, ``carry`` [N, C] is what it remembered before it acted.

    Nothing is remembered of a warm-up, in which it does not act: there the carry is zeros.
    """

    def __init__(self, policy: RecurrentQNetwork, epsilon: Epsilon, spec: EnvSpec, tells: bool = False):
        super().__init__(policy, epsilon, spec, tells)
        self.carry = torch.zeros(spec.num_envs, policy.carry_size, device=spec.device)
        self.fresh = torch.ones(spec.num_envs, dtype=torch.bool, device=spec.device)
        self.before, self.memory = self.carry.clone(), Memory(self.carry, self.fresh)

    def act(self, obs: Obs, gen: Generator) -> None:
        policy = self.policy
        assert isinstance(policy, RecurrentQNetwork)
        self.before.copy_(self.carry)
        values, carry = policy.step(obs, self.carry)
        self.carry.copy_(carry)
        self._choose(values, gen)

    def record(self, device: torch.device) -> Acted:
        told = {**self.told, "carry": self.before}
        return Acted(self.action.to(device), {k: v.to(device) for k, v in told.items()})

    def observe(self, first: Tensor) -> None:
        self.carry.mul_(~first.unsqueeze(1))
        self.fresh.copy_(first)

    def restart(self) -> None:
        self.carry.zero_()
        self.fresh.fill_(True)

    def part(self, columns: slice) -> "RecurrentActor":
        part = super().part(columns)
        assert isinstance(part, RecurrentActor)
        part.carry, part.fresh, part.before = self.carry[columns], self.fresh[columns], self.before[columns]
        part.memory = Memory(part.carry, part.fresh)
        return part

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "carry": self.carry, "fresh": self.fresh, "before": self.before}
