"""Epsilon-greedy exploration: epsilon per environment, and action selection.

Schedules advance in env steps, as device tensors, without host synchronisation.
"""

import copy

import torch
from torch import Generator, Tensor

from pql.config import EpsilonConfig

STORED = ("q", "value")
"""Names of the columns that an :class:`EpsilonActor` stores with its actions."""


def ladder(num_envs: int, base: float, exponent: float) -> Tensor:
    """epsilon_i = base ** (1 + exponent * i / (N - 1)) for i = 0 .. N - 1 (Horgan et al. 2018, Ape-X), [N]."""
    place = torch.arange(num_envs, dtype=torch.float64) / max(1, num_envs - 1)
    return (base ** (1 + exponent * place)).float()


class Epsilon:
    """Probability of a random action per environment, [N].

    Of the policy's env steps t, over all environments, ``annealed`` falls linearly from ``start`` to ``end`` within
    ``steps``, and ``decayed`` is end + (start - end) exp(-t / steps); ``ladder`` and ``fixed`` are constant; ``none``
    is 0. All are 0 from t = ``until`` on.

    Attributes:
        mean: mean over the environments in the last step, for the log.
    """

    def __init__(self, config: EpsilonConfig, num_envs: int, device: torch.device):
        final = torch.full((num_envs,), 0.0 if config.kind == "none" else config.end)
        if config.kind == "ladder":
            final = ladder(num_envs, config.base, config.exponent)
        self.final, self.final_mean = final.to(device), final.mean().item()
        self.kind, self.length, self.until = config.kind, config.steps, config.until
        self.excess = config.start - config.end if config.kind in ("annealed", "decayed") else 0.0
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # env steps so far
        self.mean = torch.zeros((), device=device)

    def __call__(self) -> Tensor:
        """Return the next step's epsilons and count the step."""
        share = self.steps / self.length
        excess = self.excess * (torch.exp(-share) if self.kind == "decayed" else (1 - share).clamp_(min=0))
        epsilon, mean = self.final + excess, self.final_mean + excess
        if self.until is not None:
            on = self.steps < self.until
            epsilon, mean = epsilon * on, mean * on
        self.steps += self.final.shape[0]
        self.mean.copy_(mean)
        return epsilon

    def part(self, columns: slice) -> "Epsilon":
        """Return the epsilons of a range of the environments; its steps count for all of them."""
        part = copy.copy(self)
        part.final = self.final[columns]
        return part


def epsilon_greedy(values: Tensor, epsilon: Tensor, gen: Generator) -> Tensor:
    """Return the action with the largest of ``values`` [N, n] or, with probability ``epsilon`` [N], a random one: [N]
    int64."""
    size, device = values.shape[:1], values.device
    random = torch.randint(values.shape[1], size, generator=gen, device=device)
    explores = torch.rand(size, generator=gen, device=device) < epsilon
    return torch.where(explores, random, values.argmax(-1))
