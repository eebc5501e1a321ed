"""Distributions: the C51 projection, the tanh-squashed Gaussian of SAC, and the action distributions of on-policy
algorithms (diagonal Gaussian, clamped or squashed, categorical, and products of categoricals).

``torch.distributions`` is not used: it validates its arguments with a host synchronisation.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Protocol

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

_form = threading.local()


@contextmanager
def fusing() -> Iterator[None]:
    """Within the block, in this thread, functions take the forms that a compiler fuses into few kernels."""
    _form.fused = True
    try:
        yield
    finally:
        _form.fused = False


def project(support: Tensor, probs: Tensor, atoms: Tensor) -> Tensor:
    """Project a distribution onto a fixed, evenly spaced support (Bellemare et al. 2017, Eq. 7).

    The mass of each source atom is split linearly between its two neighbours; mass beyond the ends goes to the ends.

    Args:
        support: [B, Z'] source atoms, ascending in each row, such as r + discount * z.
        probs: [B, Z'] their probabilities.
        atoms: [Z] the fixed support.
    Returns:
        [B, Z] probabilities with the same total mass.
    """
    if getattr(_form, "fused", False):
        return _project_dense(support, probs, atoms)
    # A CUDA scatter adds in no fixed order: its bits differ from run to run.
    return (_project_scatter if support.device.type == "cpu" else _project_sums)(support, probs, atoms)


def _project_dense(support: Tensor, probs: Tensor, atoms: Tensor) -> Tensor:
    """Compute sum_j p_j max(0, 1 - |x_j - k|) for each atom k: Z' Z terms a row, without memory for them if fused."""
    size = atoms.shape[0]
    position = ((support - atoms[0]) / ((atoms[-1] - atoms[0]) / (size - 1))).clamp(0, size - 1)
    grid = torch.arange(size, dtype=atoms.dtype, device=atoms.device)
    share = (1 - (position.unsqueeze(-1) - grid).abs()).clamp(min=0)  # [B, Z', Z]
    return (probs.unsqueeze(-1) * share).sum(1)


def _project_scatter(support: Tensor, probs: Tensor, atoms: Tensor) -> Tensor:
    size = atoms.shape[0]
    step = (atoms[-1] - atoms[0]) / (size - 1)  # the difference of two neighbours would be rounded too coarsely
    position = ((support - atoms[0]) / step).clamp_(0, size - 1)  # in units of atoms
    lower = position.floor()
    upper_share = probs * (position - lower)
    index = lower.to(torch.int64)
    out = probs.new_zeros(probs.shape[0], size + 1)  # the extra entry takes the zero shares above the last atom
    out.scatter_add_(1, index, probs - upper_share)
    return out.scatter_add_(1, index + 1, upper_share)[:, :size]


def _project_sums(support: Tensor, probs: Tensor, atoms: Tensor) -> Tensor:
    """Compute the projection by gathers from running sums: in a fixed order, without products rounded to TF32.

    An atom's share, sum_j p_j max(0, 1 - |x_j - k|), is the second difference at k of the ramp
    R(k) = sum_j p_j max(0, k - x_j) = k sum_{x_j <= k} p_j - sum_{x_j <= k} p_j x_j. In float64, as ramps are up to Z
    times as large as their differences.
    """
    size, fixed = atoms.shape[0], atoms.double()
    position = ((support.double() - fixed[0]) / ((fixed[-1] - fixed[0]) / (size - 1))).clamp_(0, size - 1)
    mass = probs.double()
    sums = F.pad(torch.stack((mass, mass * position)).cumsum(-1), (1, 0))  # [2, B, 1 + Z']
    grid = torch.arange(-1, size + 1, dtype=torch.float64, device=atoms.device).repeat(len(probs), 1)  # [B, Z + 2]
    below = torch.searchsorted(position, grid, right=True)
    mass_below, moment_below = sums.gather(-1, below.expand(2, -1, -1))
    return (grid * mass_below - moment_below).diff(n=2).clamp_(min=0).to(probs.dtype)


def hl_gauss(value: Tensor, atoms: Tensor, sigma: float) -> Tensor:
    """Return the histogram of Normal(value, sigma d) over bins centred at the atoms (Imani & White 2018), [..., Z].

    The first and the last bin get the mass beyond them, as in the C51 projection.

    Args:
        value: [...] means.
        atoms: [Z] evenly spaced, at a distance d.
        sigma: standard deviation in units of d.
    """
    step = (atoms[-1] - atoms[0]) / (atoms.shape[0] - 1)
    edges = (atoms[:-1] + atoms[1:]) / 2  # [Z - 1]
    below = 0.5 * (1 + torch.erf((edges - value.unsqueeze(-1)) / (math.sqrt(2) * sigma * step)))  # [..., Z - 1]
    return F.pad(below, (1, 0)).neg() + F.pad(below, (0, 1), value=1.0)


def lower_mean(probs: Tensor, atoms: Tensor) -> Tensor:
    """Select per row the member of an ensemble [E, B, Z] whose distribution has the lowest mean: [B, Z].

    The elementwise minimum of two distributions would not be a distribution: its mass is below one.

    Args:
        probs: [E, B, Z].
        atoms: [Z] the support.
    """
    mean = probs @ atoms  # [E, B]
    choice = mean.argmin(0)  # [B]
    return probs.gather(0, choice.view(1, -1, 1).expand(1, *probs.shape[1:])).squeeze(0)


def squashed_gaussian(mean: Tensor, log_std: Tensor, gen: Generator) -> tuple[Tensor, Tensor]:
    """Draw a reparameterised sample of tanh(Normal(mean, std)) with its log-density (Haarnoja et al. 2018, App. C).

    Args:
        mean, log_std: [B, A].
    Returns:
        action [B, A] in (-1, 1), log-probability [B].
    """
    noise = torch.randn(mean.shape, generator=gen, device=mean.device)
    raw = mean + log_std.exp() * noise
    log_prob = (-0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - log_tanh_slope(raw)).sum(-1)
    return torch.tanh(raw), log_prob


class ActionDist(Protocol):
    """Family of action distributions over tensors.

    The parameters ``params`` are one tensor [..., P], so that a rollout can store them. ``raw`` is the action before
    it is clamped or squashed, [..., A] float32, [...] or [..., K] int64.
    """

    size: int  # outputs of the network
    params_size: int  # P

    def sample(self, params: Tensor, gen: Generator) -> Tensor:
        """Draw ``raw`` actions."""
        ...

    def action(self, raw: Tensor) -> Tensor:
        """Map ``raw`` to the environment's action: [..., A] in [-1, 1], or the same integers."""
        ...

    def mode(self, params: Tensor) -> Tensor:
        """Return the environment's action without exploration."""
        ...

    def log_prob(self, params: Tensor, raw: Tensor) -> Tensor:
        """Log-density of ``raw``, [...]. For a squashed action without the Jacobian, which cancels in all ratios."""
        ...

    def entropy(self, params: Tensor, gen: Generator) -> Tensor:
        """Entropy of the action, [...]: exact, or, if squashed, estimated from one reparameterised sample."""
        ...

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Exact KL(old || new) of parameters [..., P], [...]."""
        ...


class DiagGaussian:
    """Diagonal Gaussian; actions are clamped to [-1, 1] or squashed by a tanh.

    Parameters are [..., 2 A]: means, then log standard deviations. ``raw`` is [..., A] float32.
    """

    def __init__(self, size: int, squash: bool = False):
        self.size, self.params_size, self.squash = size, 2 * size, squash

    def sample(self, params: Tensor, gen: Generator) -> Tensor:
        mean, log_std = params.chunk(2, -1)
        noise = torch.randn(mean.shape, generator=gen, device=mean.device)
        return torch.addcmul(mean, log_std.exp(), noise)

    def action(self, raw: Tensor) -> Tensor:
        return torch.tanh(raw) if self.squash else raw.clamp(-1, 1)

    def mode(self, params: Tensor) -> Tensor:
        return self.action(params.chunk(2, -1)[0])

    def log_prob(self, params: Tensor, raw: Tensor) -> Tensor:
        mean, log_std = params.chunk(2, -1)
        z = (raw - mean) * torch.exp(-log_std)
        return (-0.5 * z.square() - log_std).sum(-1) - 0.5 * math.log(2 * math.pi) * self.size

    def entropy(self, params: Tensor, gen: Generator) -> Tensor:
        mean, log_std = params.chunk(2, -1)
        gaussian = log_std.sum(-1) + 0.5 * math.log(2 * math.pi * math.e) * self.size
        if not self.squash:
            return gaussian
        raw = mean + log_std.exp() * torch.randn(mean.shape, generator=gen, device=mean.device)
        return gaussian + log_tanh_slope(raw).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        (mean, log_std), (new_mean, new_log_std) = old.chunk(2, -1), new.chunk(2, -1)
        gap = new_log_std - log_std
        shift = ((mean - new_mean) * torch.exp(-new_log_std)).square()
        return (gap + 0.5 * (torch.exp(-2 * gap) + shift) - 0.5).sum(-1)


class Categorical:
    """Categorical over ``n`` actions. Parameters are logits [..., n]; ``raw`` is [...] int64."""

    def __init__(self, n: int):
        self.size = self.params_size = n

    def sample(self, params: Tensor, gen: Generator) -> Tensor:
        # argmax of p / Exp(1) is a sample of p; torch.multinomial synchronises with the host to check its input.
        race = torch.empty_like(params).exponential_(generator=gen)
        return (params.softmax(-1) / race).argmax(-1)

    def action(self, raw: Tensor) -> Tensor:
        return raw

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def log_prob(self, params: Tensor, raw: Tensor) -> Tensor:
        return params.log_softmax(-1).gather(-1, raw.unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tensor, gen: Generator) -> Tensor:
        log_p = params.log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        log_p = old.log_softmax(-1)
        return (log_p.exp() * (log_p - new.log_softmax(-1))).sum(-1)


class MultiCategorical:
    """Product of independent categoricals over nvec[0], nvec[1], ... actions.

    Parameters are the logits of all, one after the other, [..., sum(nvec)]; ``raw`` is [..., K] int64. Neighbours with
    the same number of actions are computed together.
    """

    def __init__(self, nvec: Sequence[int]):
        self.size = self.params_size = sum(nvec)
        self.blocks = [(len([*same]), n) for n, same in groupby(nvec)]  # (k, n): k categoricals over n actions
        self.one = [Categorical(n) for _, n in self.blocks]

    def sample(self, params: Tensor, gen: Generator) -> Tensor:
        return torch.cat([one.sample(p, gen) for one, p in zip(self.one, self._split(params), strict=True)], -1)

    def action(self, raw: Tensor) -> Tensor:
        return raw

    def mode(self, params: Tensor) -> Tensor:
        return torch.cat([p.argmax(-1) for p in self._split(params)], -1)

    def log_prob(self, params: Tensor, raw: Tensor) -> Tensor:
        parts = zip(self.one, self._split(params), raw.split([k for k, _ in self.blocks], -1), strict=True)
        return torch.cat([one.log_prob(p, r) for one, p, r in parts], -1).sum(-1)

    def entropy(self, params: Tensor, gen: Generator) -> Tensor:
        parts = zip(self.one, self._split(params), strict=True)
        return torch.cat([one.entropy(p, gen) for one, p in parts], -1).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        parts = zip(self.one, self._split(old), self._split(new), strict=True)
        return torch.cat([one.kl(p, q) for one, p, q in parts], -1).sum(-1)

    def _split(self, params: Tensor) -> list[Tensor]:
        """[..., sum(nvec)] -> [..., k, n] for each block."""
        parts = params.split([k * n for k, n in self.blocks], -1)
        return [part.unflatten(-1, block) for part, block in zip(parts, self.blocks, strict=True)]


def log_tanh_slope(raw: Tensor) -> Tensor:
    """Return log(1 - tanh(raw)^2) elementwise, [...], as 2 (log 2 - raw - softplus(-2 raw)): stable for large |raw|."""
    return 2 * (math.log(2) - raw - F.softplus(-2 * raw))
