"""Running statistics: observations to zero mean and unit variance, rewards to unit-variance returns.

The collector owns both and updates them once with each new observation and reward. All workers, including the
collector, use the values frozen at the last tick boundary, which are published with the weights.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from pql.contract.env import ObsSpec
from pql.data.mirror import Mirror
from pql.engine.collectives import ALONE, Group
from pql.types import Obs, column

CLIP = 5.0
EPSILON = 1e-8
ALL = slice(None)  # environments


Sums = tuple[Tensor, Tensor, Tensor]
"""Count (0-dim), mean and sum of squared deviations."""


def combine(one: Sums, count: float | Tensor, mean: Tensor, squares: Tensor) -> Sums:
    """Merge the moments ``one`` with those of ``count`` more values, given by mean and sum of squared deviations.

    All [D], ``count`` a scalar. Source: Chan et al. 1979. Returns exactly ``one`` if ``count`` is 0.
    """
    total, delta = one[0] + count, mean - one[1]
    share = count / total.clamp(min=1)
    return total, one[1].addcmul(delta, share), (one[2] + squares).addcmul_(delta * delta, one[0] * share)


class Moments(nn.Module):
    """Count, mean and sum of squared deviations in float64, merged batch by batch.

    Attributes:
        base: shared moments of earlier values, if several sets continue from a common state (:func:`merge_moments`).
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

    def update(self, x: Tensor, keep: Tensor | None = None, group: Group = ALONE) -> None:
        """Merge ``x`` [N, ...], or its rows where ``keep`` [N] is True; over all processes of ``group``."""
        x = x.to(torch.float64)
        count: float | Tensor = x.shape[0]
        if keep is not None:
            row, count = column(keep, x), keep.sum()
            # Rows not kept are set to the mean and add nothing. If all are kept, no bit changes.
            x = torch.where(row, x, torch.where(row, x, 0).sum(0) / count.clamp(min=1))
        var, mean = torch.var_mean(x, 0, correction=0)
        squares = var * x.shape[0]
        if group.size > 1:
            mine = pack_moments(torch.zeros_like(self.count) + count, mean, squares)
            count, mean, squares = pooled(group.gather(mine), self.mean.shape)
        self.merge(count, mean, squares)

    def merge(self, count: float | Tensor, mean: Tensor, squares: Tensor) -> None:
        """Add ``count`` values with this mean and this sum of squared deviations, [D] each."""
        for old, new in zip(self.sums(), combine(self.sums(), count, mean, squares), strict=True):
            old.copy_(new)

    def sums(self) -> Sums:
        """Return the moments of the values fed to this set, without ``base``."""
        return self.count, self.mean, self.m2

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and population variance; 0 and 1 before the first value, so that freezing rescales nothing."""
        count, mean, m2 = self.sums() if self.base is None else combine(self.base, *self.sums())
        return mean, torch.where(count > 0, m2 / count.clamp(min=1), 1.0)

    def variance(self) -> Tensor:
        """Return the variance of :meth:`statistics`."""
        return self.statistics()[1]

    def zero(self) -> None:
        """Reset all moments."""
        for tensor in self.sums():
            tensor.zero_()


def merge_moments(sets: Sequence[Moments]) -> None:
    """Merge the values fed to ``sets`` since the last merge into the first; all sets continue from the result."""
    first, *others = sets
    for one in others:
        first.merge(*(t.to(first.count.device) for t in one.sums()))
        one.zero()
    for one in others:
        count, mean, m2 = (t.to(one.count.device, copy=True) for t in first.sums())
        one.base = count, mean, m2


def pack_moments(count: Tensor, mean: Tensor, squares: Tensor) -> Tensor:
    """Pack the moments of S numbers into one tensor [1 + 2 S]."""
    return torch.cat((count.view(1), mean.flatten(), squares.flatten()))


def pooled(parts: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the moments of K packed samples [K, 1 + 2 S]: count, mean and sum of squared deviations."""
    size = (parts.shape[1] - 1) // 2
    counts, means, squares = parts.split((1, size, size), 1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return count, mean.view(shape), (squares + counts * (means - mean).square()).sum(0).view(shape)


def clip(reward: Tensor, limit: float | None) -> Tensor:
    """Return rewards, [N] or [B], clamped to +- ``limit``; unchanged if it is None."""
    return reward if limit is None else reward.clamp(-limit, limit)


class Normalizer(nn.Module):
    """Observation normalisation per group, and a reward scale, published together.

    ``forward`` maps observations with the frozen statistics, clamped to +-5; before the first :meth:`freeze` it is
    the identity (clamped). Its output is float32, but images of uint8 pass through.

    Args:
        normalize_obs: False: the identity, unclamped; vectors of uint8 are scaled to [0, 1].
        reward_scale: constant factor on rewards.
        reward_gamma: discount of the return whose running standard deviation divides the reward; None: off.
        reward_clip: rewards are first clipped to +- this; None: no clipping.
        return_cap: the scale also keeps the largest |return| so far within this (FlashSAC); None: it does not.
        integers: groups of integers and booleans are treated like floats; False: they pass through.
    """

    reward_scale: Tensor
    running_return: Tensor
    largest_return: Tensor

    def __init__(
        self,
        obs: Mapping[str, ObsSpec],
        num_envs: int,
        device: torch.device,
        normalize_obs: bool = True,
        reward_scale: float = 1.0,
        reward_gamma: float | None = None,
        reward_clip: float | None = None,
        return_cap: float | None = None,
        integers: bool = True,
    ):
        super().__init__()
        self.base_scale, self.reward_gamma, self.reward_clip = reward_scale, reward_gamma, reward_clip
        self.return_cap = return_cap
        read = {k: s for k, s in obs.items() if s.read_dtype(integers) == torch.float32}
        groups = read if normalize_obs else {}
        self.factors = {k: 1 / 255 if s.dtype == torch.uint8 else 1.0 for k, s in read.items() if k not in groups}
        self.moments = nn.ModuleDict({k: Moments(s.shape, device) for k, s in groups.items()})
        for k, s in groups.items():  # x -> x * scale + shift
            self.register_buffer(f"scale_{k}", torch.ones(s.shape, device=device))
            self.register_buffer(f"shift_{k}", torch.zeros(s.shape, device=device))
        self.register_buffer("reward_scale", torch.tensor(reward_scale, device=device))
        if reward_gamma is not None:
            self.returns = Moments((), device)
            self.register_buffer("running_return", torch.zeros(num_envs, device=device))
            if return_cap is not None:
                self.register_buffer("largest_return", torch.zeros((), device=device))
        self.mirror: Mirror | None = None  # observations count together with their reflections
        self.group = ALONE
        self.fresh = self._all()

    def connect(self, group: Group) -> None:
        """Share statistics with all processes of ``group``: each records its own, and :meth:`freeze` merges them."""
        self.group = group
        if group.size > 1:
            self.fresh = [Moments(tuple(m.mean.shape), m.mean.device) for m in self._all()]

    def forward(self, obs: Obs) -> Obs:
        return {k: self._map(k, v) for k, v in obs.items()}

    def _map(self, k: str, x: Tensor) -> Tensor:
        factor = self.factors.get(k)
        if k not in self.moments and factor is None:
            return x
        x = x if x.dtype == torch.float32 else x.float()  # an export would record a conversion to the same type
        if factor is not None:
            return x if factor == 1 else x * factor
        return torch.addcmul(getattr(self, f"shift_{k}"), x, getattr(self, f"scale_{k}")).clamp_(-CLIP, CLIP)

    def _groups(self) -> Iterator[tuple[str, Moments]]:
        return ((k, cast(Moments, m)) for k, m in self.moments.items())

    def _all(self) -> list[Moments]:
        """Return the moments of every observation group and of returns."""
        return [*(m for _, m in self._groups()), *([] if self.reward_gamma is None else [self.returns])]

    def observe(self, obs: Obs, keep: Tensor | None = None) -> None:
        """Update with new observations [N, ...], or those of the rows where ``keep`` [N] is True."""
        for shown in (obs,) if self.mirror is None else (obs, self.mirror.obs(obs)):
            for k, moments in zip(self.moments, self.fresh, strict=False):
                moments.update(shown[k], keep)

    def observe_reward(self, reward: Tensor, over: Tensor, valid: Tensor, columns: slice = ALL) -> None:
        """Update with rewards [n] of ``columns``; ``over``: an episode ended or began; ``valid``: not a filler row."""
        if self.reward_gamma is not None:
            running = self.running_return[columns]
            grown = running * self.reward_gamma + clip(reward, self.reward_clip)
            running.copy_(torch.where(valid, grown, running))
            if self.return_cap is not None:
                largest = torch.where(valid, running.abs(), 0).amax()
                self.largest_return.copy_(torch.maximum(self.largest_return, largest))
            self.fresh[-1].update(running, valid)
            running.mul_(~over)

    def freeze(self) -> None:
        """Freeze the current statistics for use until the next tick boundary."""
        if self.group.size > 1 and self.fresh:
            with self.group.turn():
                self._merge()
        for k, moments in self._groups():
            mean, variance = moments.statistics()
            scale = (variance + EPSILON).rsqrt()
            getattr(self, f"scale_{k}").copy_(scale)
            getattr(self, f"shift_{k}").copy_(-mean * scale)
        if self.reward_gamma is not None:
            scale = (self.returns.variance() + EPSILON).rsqrt()
            if self.return_cap is not None:  # so that no return so far exceeds the cap
                scale = torch.minimum(scale, self.return_cap / self.largest_return)
            self.reward_scale.copy_(self.base_scale * scale)

    def _merge(self) -> None:
        """Merge the values of every process since the last merge, in the order of ranks."""
        parts = self.group.gather(torch.cat([pack_moments(m.count, m.mean, m.m2) for m in self.fresh]))
        sizes = [1 + 2 * m.mean.numel() for m in self.fresh]
        for total, mine, part in zip(self._all(), self.fresh, parts.split(sizes, 1), strict=True):
            total.merge(*pooled(part, total.mean.shape))
            mine.zero()
        if self.return_cap is not None:
            self.largest_return.copy_(self.group.gather(self.largest_return.view(1)).amax())

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args: Any, **more: Any) -> Any:
        """As in ``nn.Module``. States are saved at tick boundaries, when nothing is left to merge."""
        if self.group.size > 1:
            for moments in self.fresh:
                moments.zero()
        return super().load_state_dict(state_dict, *args, **more)

    def copy_to(self, device: torch.device) -> "Normalizer":
        """Return a private copy for a reader on ``device``: only its frozen tensors are ever filled."""
        return copy.deepcopy(self).to(device)

    def frozen(self) -> list[Tensor]:
        """Return the tensors that readers need, in a fixed order."""
        used = [getattr(self, f"{what}_{k}") for k in self.moments for what in ("scale", "shift")]
        return [*used, self.reward_scale]


def share_largest_return(normalizers: Sequence[Normalizer]) -> None:
    """Set the largest return of all ``normalizers``, which have the same settings, to the maximum over them."""
    if normalizers[0].return_cap is not None:
        device = normalizers[0].largest_return.device
        largest = torch.stack([one.largest_return.to(device) for one in normalizers]).amax()
        for one in normalizers:
            one.largest_return.copy_(largest)
