"""Distributions: the C51 projection and its selection rule, and the tanh-squashed Gaussian.

Written out, because ``torch.distributions`` validates its arguments with a host sync.
"""

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F


def project(support: Tensor, probs: Tensor, atoms: Tensor) -> Tensor:
    """Project a distribution onto a fixed, evenly spaced support (Bellemare et al. 2017, Eq. 7).

    Each target atom's mass is split between its two neighbours, in proportion to nearness; mass beyond the ends
    goes to the ends.

    Args:
        support: [B, Z'] where the mass sits.
        probs: [B, Z'] how much.
        atoms: [Z] the fixed support.
    Returns:
        [B, Z] probabilities with the same total mass.
    """
    size = atoms.shape[0]
    position = ((support - atoms[0]) / (atoms[1] - atoms[0])).clamp_(0, size - 1)  # in units of atoms
    # Atomic adds make a CUDA scatter depend on their order; the kernel form does not, and there the waste is cheap.
    return (_project_scatter if support.device.type == "cpu" else _project_kernel)(position, probs, size)


def _project_scatter(position: Tensor, probs: Tensor, size: int) -> Tensor:
    lower = position.floor()
    upper_share = probs * (position - lower)
    index = lower.to(torch.int64)
    out = probs.new_zeros(probs.shape[0], size)
    out.scatter_add_(1, index, probs - upper_share)
    return out.scatter_add_(1, (index + 1).clamp_(max=size - 1), upper_share)


def _project_kernel(position: Tensor, probs: Tensor, size: int) -> Tensor:
    """The same as a product with triangular weights max(0, 1 - |distance|), [B, Z', Z]."""
    grid = torch.arange(size, device=position.device, dtype=position.dtype)
    negated = (position.unsqueeze(-1) - grid).abs_().sub_(1).clamp_(max=0)
    return torch.bmm(probs.neg().unsqueeze(1), negated).squeeze(1)


def lower_mean(probs: Tensor, atoms: Tensor) -> Tensor:
    """Of an ensemble's distributions [E, B, Z], per row the whole one with the lowest mean: [B, Z].

    The elementwise minimum of two distributions is not a distribution: its mass is below one.
    """
    mean = probs @ atoms  # [E, B]
    choice = mean.argmin(0)  # [B]
    return probs.gather(0, choice.view(1, -1, 1).expand(1, *probs.shape[1:])).squeeze(0)


def squashed_gaussian(mean: Tensor, log_std: Tensor, gen: Generator) -> tuple[Tensor, Tensor]:
    """A reparameterised sample of tanh(Normal(mean, std)) and its log-density (Haarnoja et al. 2018, App. C).

    Args:
        mean, log_std: [B, A].
    Returns:
        action [B, A] in (-1, 1), log-probability [B].
    """
    noise = torch.randn(mean.shape, generator=gen, device=mean.device)
    raw = mean + log_std.exp() * noise
    # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), stable for large |u|
    jacobian = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    log_prob = (-0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - jacobian).sum(-1)
    return torch.tanh(raw), log_prob
