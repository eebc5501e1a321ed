"""Running statistics: observations to zero mean and unit variance, rewards to unit-variance returns.

The collector owns both. It feeds each frame once, when it is fresh; what everybody uses (the collector included)
are the values frozen at the last tick's boundary, which travel with the weights.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from pql.env import ObsSpec
from pql.types import Obs

CLIP = 5.0
EPSILON = 1e-8


class Sums(NamedTuple):
    """What a set of rows comes to."""

    count: Tensor  # type: ignore[assignment]  # 0-dim (hides tuple.count)
    mean: Tensor
    m2: Tensor  # of squared deviations

    def copy(self, device: torch.device) -> "Sums":
        return Sums(*(t.to(device, copy=True) for t in self))


def combine(one: Sums, two: Sums) -> Sums:
    """Both sets together (Chan et al. 1979)."""
    total = one.count + two.count
    delta = two.mean - one.mean
    share = two.count / total.clamp(min=1)
    return Sums(total, one.mean.addcmul(delta, share), (one.m2 + two.m2).addcmul_(delta * delta, one.count * share))


class Moments(nn.Module):
    """Count, mean and sum of squared deviations in float64, merged batch by batch.

    Attributes:
        base: what counts beside what was fed here, where several sets go on from common ground (:func:`meet`).
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    base: Sums | None = None

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device=device))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64, device=device))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64, device=device))

    def update(self, x: Tensor, keep: Tensor | None = None) -> None:
        """Merge ``x`` [N, ...], or those of its rows where ``keep`` [N] is True."""
        x = x.to(torch.float64)
        if keep is None:
            count = torch.full_like(self.count, x.shape[0])
            var, mean = torch.var_mean(x, 0, correction=0)
            squares = var * count
        else:
            row = keep.view(-1, *[1] * (x.dim() - 1))
            count = keep.sum()
            mean = torch.where(row, x, 0).sum(0) / count.clamp(min=1)
            squares = torch.where(row, x - mean, 0).square_().sum(0)
        self._set(combine(self.sums(), Sums(count, mean, squares)))

    def sums(self) -> Sums:
        """Of what was fed here alone."""
        return Sums(self.count, self.mean, self.m2)

    def _set(self, new: Sums) -> None:
        self.count.copy_(new.count)
        self.mean.copy_(new.mean)
        self.m2.copy_(new.m2)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and population variance; 0 and 1 while nothing was fed, so that a freeze then rescales nothing."""
        count, mean, m2 = self.sums() if self.base is None else combine(self.base, self.sums())
        return mean, torch.where(count > 0, m2 / count.clamp(min=1), 1.0)

    def variance(self) -> Tensor:
        """The second of :meth:`statistics`."""
        return self.statistics()[1]


def meet(sets: Sequence[Moments]) -> None:
    """Move all that ``sets`` were fed since they last met into the first; from there all go on."""
    first, *others = sets
    for one in others:
        first._set(combine(first.sums(), one.sums().copy(first.mean.device)))
        torch._foreach_zero_([one.count, one.mean, one.m2])
    for one in others:
        one.base = first.sums().copy(one.mean.device)


class Normalizer(nn.Module):
    """Observation normalisation by group, and a reward scale, as one thing to publish.

    ``forward`` maps observations with the frozen statistics, clamped to +-5; before the first :meth:`freeze` it is
    the identity (clamped). uint8 groups pass through.

    Args:
        normalize_obs: False: the identity, unclamped.
        reward_scale: constant factor on rewards.
        reward_gamma: discount of the return whose running standard deviation divides the reward; None: off.
    """

    reward_scale: Tensor
    running_return: Tensor

    def __init__(
        self,
        obs: Mapping[str, ObsSpec],
        num_envs: int,
        device: torch.device,
        normalize_obs: bool = True,
        reward_scale: float = 1.0,
        reward_gamma: float | None = None,
    ):
        super().__init__()
        self.base_scale, self.reward_gamma = reward_scale, reward_gamma
        groups = {k: s for k, s in obs.items() if normalize_obs and s.dtype.is_floating_point}
        self.moments = nn.ModuleDict({k: Moments(s.shape, device) for k, s in groups.items()})
        for k, s in groups.items():  # x -> x * scale + shift
            self.register_buffer(f"scale_{k}", torch.ones(s.shape, device=device))
            self.register_buffer(f"shift_{k}", torch.zeros(s.shape, device=device))
        self.register_buffer("reward_scale", torch.tensor(reward_scale, device=device))
        if reward_gamma is not None:
            self.returns = Moments((), device)
            self.register_buffer("running_return", torch.zeros(num_envs, device=device))

    def forward(self, obs: Obs) -> Obs:
        return {k: self._map(k, v) if k in self.moments else v for k, v in obs.items()}

    def _map(self, k: str, x: Tensor) -> Tensor:
        out = torch.addcmul(getattr(self, f"shift_{k}"), x, getattr(self, f"scale_{k}"))
        return out.clamp_(-CLIP, CLIP)

    def _groups(self) -> Iterator[tuple[str, Moments]]:
        return ((k, cast(Moments, m)) for k, m in self.moments.items())

    def observe(self, obs: Obs, keep: Tensor | None = None) -> None:
        """Feed fresh observations [N, ...], or those of the rows where ``keep`` [N] is True."""
        for k, moments in self._groups():
            moments.update(obs[k], keep)

    def observe_reward(self, reward: Tensor, over: Tensor, valid: Tensor) -> None:
        """Feed rewards [N], where an episode is over or another begins [N], and which rows are no filler [N]."""
        if self.reward_gamma is not None:
            grown = self.running_return * self.reward_gamma + reward
            self.running_return.copy_(torch.where(valid, grown, self.running_return))
            self.returns.update(self.running_return, valid)
            self.running_return.mul_(~over)

    def freeze(self) -> None:
        """Make the statistics so far the ones in use (a tick's boundary)."""
        for k, moments in self._groups():
            mean, variance = moments.statistics()
            scale = (variance + EPSILON).rsqrt()
            getattr(self, f"scale_{k}").copy_(scale)
            getattr(self, f"shift_{k}").copy_(-mean * scale)
        if self.reward_gamma is not None:
            self.reward_scale.copy_(self.base_scale * (self.returns.variance() + EPSILON).rsqrt())

    def copy_to(self, device: torch.device) -> "Normalizer":
        """A private copy for a reader on ``device``: only the frozen tensors are ever filled."""
        return copy.deepcopy(self).to(device)

    def frozen(self) -> list[Tensor]:
        """The tensors that readers need, in a fixed order."""
        used = [getattr(self, f"{what}_{k}") for k in self.moments for what in ("scale", "shift")]
        return [*used, self.reward_scale]
