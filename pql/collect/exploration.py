"""Exploration noise of continuous policies, as device tensors that advance without a host sync."""

import copy

import torch
from torch import Generator, Tensor

from pql.config.groups import ExploreConfig

REPEAT_MAX = 16


class Exploration:
    """Gaussian noise on the policy's action, clamped to [-1, 1].

    ``config.kind``: ``mixed``: environment i keeps sigma_i = linspace(low, high, N) (PQL, section 3.3); ``fixed``:
    ``low`` for all; ``redrawn``: sigma ~ U(low, high) per environment, drawn again when an episode begins (FastTD3);
    ``none``: nothing is added; ``scaled``: the noise of a stochastic policy is multiplied by the sigma_i of ``mixed``.
    ``config.repeat`` holds each noise vector for k ~ zeta(2) steps, at most 16 (FlashSAC), instead of one.
    """

    def __init__(self, config: ExploreConfig, num_envs: int, action_size: int, device: torch.device):
        kind, low, high = config.kind, config.low, config.high
        self.kind, self.low, self.high, self.repeat = kind, low, high, config.repeat
        self.added = kind not in ("none", "scaled")  # to the action, rather than part of a stochastic policy
        ladder = torch.linspace(low, high if kind in ("mixed", "scaled") else low, num_envs, device=device)
        self.sigma = ladder.unsqueeze(1).contiguous()  # [N, 1]
        self.noise = torch.zeros(num_envs, action_size, device=device)
        self.left = torch.zeros(num_envs, 1, device=device)  # steps for which the noise vector is still held
        weights = torch.arange(1, REPEAT_MAX + 1, dtype=torch.float64) ** -2
        self.cdf = (weights.cumsum(0) / weights.sum()).float().to(device)
        self.fresh = torch.ones(num_envs, dtype=torch.bool, device=device)  # sigma is to be redrawn

    def __call__(self, action: Tensor, gen: Generator) -> Tensor:
        """Add this step's noise to ``action`` [N, A]."""
        if not self.added:
            return action
        if self.kind == "redrawn":
            u = torch.rand(self.sigma.shape, generator=gen, device=action.device)
            self.sigma.copy_(torch.where(self.fresh.unsqueeze(1), self.low + (self.high - self.low) * u, self.sigma))
            self.fresh.zero_()
        noise = self._normal(action, gen, self.repeat)
        return torch.addcmul(action, self.sigma, noise).clamp_(-1, 1)

    def policy_noise(self, like: Tensor, gen: Generator) -> Tensor:
        """Return the normal noise of a stochastic policy, in the shape of ``like`` [N, A]; held or scaled if so set."""
        noise = self._normal(like, gen, self.repeat and not self.added)
        return noise * self.sigma if self.kind == "scaled" else noise

    def _normal(self, like: Tensor, gen: Generator, held: bool) -> Tensor:
        noise = torch.randn(like.shape, generator=gen, device=like.device)
        if held:
            u = torch.rand(self.left.shape, generator=gen, device=like.device)
            over = self.left <= 0
            self.noise.copy_(torch.where(over, noise, self.noise))
            self.left.copy_(torch.where(over, torch.searchsorted(self.cdf, u) + 1.0, self.left) - 1)
            noise = self.noise
        return noise

    def observe(self, first: Tensor) -> None:
        """Record where the next action begins an episode ([N] bool).

        Marks accumulate until noise is drawn: the warm-up observes episodes without drawing noise.
        """
        self.fresh |= first

    def part(self, columns: slice) -> "Exploration":
        """Return the noise of a range of the environments: views, with sigmas of the full ladder."""
        part = copy.copy(self)
        for name, tensor in self.state_dict().items():
            setattr(part, name, tensor[columns])
        return part

    def state_dict(self) -> dict[str, Tensor]:
        return {"sigma": self.sigma, "noise": self.noise, "left": self.left, "fresh": self.fresh}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
