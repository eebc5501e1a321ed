"""Layers of off-policy networks: batched linear layers, normalisations, hyperspherical blocks; unit-norm weights.

Sources: Ioffe & Szegedy 2015 (BatchNorm), Bhatt et al. 2024 (CrossQ: one batch of both states), Palenicek et al. 2026
(XQC), FlashSAC (arXiv 2604.04539), Lee et al. 2025 (SimbaV2, arXiv 2502.15280).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORM_EPS = 1e-8  # keeps a norm of zero from dividing


def bfloat16(on: bool, like: Tensor) -> torch.autocast:
    """Autocast to bfloat16 on the device of ``like`` (any shape). It caches no cast weights: each replay of a captured
    CUDA graph must cast them again."""
    return torch.autocast(like.device.type, torch.bfloat16, enabled=on, cache_enabled=False)


class EnsembleLinear(nn.Module):
    """E linear layers as one batched product: [B, in] or [E, B, in] -> [E, B, out]."""

    bias: Tensor | None

    def __init__(self, ensemble: int, size_in: int, size_out: int, bias: bool = True):
        super().__init__()
        bound = size_in**-0.5  # torch.nn.Linear's own default
        self.weight = nn.Parameter(torch.empty(ensemble, size_in, size_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(ensemble, 1, size_out).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.expand(self.weight.shape[0], -1, -1)
        return torch.bmm(x, self.weight) if self.bias is None else torch.baddbmm(self.bias, x, self.weight)


class EnsembleLayerNorm(nn.Module):
    """LayerNorm over the last axis of [E, B, size], with a gain and a bias per ensemble member."""

    def __init__(self, ensemble: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ensemble, 1, size))
        self.bias = nn.Parameter(torch.zeros(ensemble, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.layer_norm(x, x.shape[-1:]), self.weight)


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last axis (Zhang & Sennrich 2019), in float32 also where its input is bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class EnsembleRMSNorm(nn.Module):
    """RMSNorm over the last axis of [E, B, size] (Zhang & Sennrich 2019), with a gain per ensemble member."""

    def __init__(self, ensemble: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ensemble, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * self.weight


class BatchNorm(nn.Module):
    """BatchNorm over the rows of [B, size], or of [E, B, size] with statistics of each ensemble member.

    It uses its running statistics, which are state like weights: published, saved and exported. Only inside
    :func:`batch_statistics` does it use those of the batch. ``train()`` and ``eval()`` have no effect.

    Args:
        ensemble: E; None: no ensemble.
        momentum: weight of a batch in the running statistics.

    Attributes:
        running_mean, running_var: [size], or [E, 1, size]; the variance is the unbiased one.
        rows: [B] 1 for each row that counts, while the batch's statistics are used; else None.
        tracked: whether the running statistics follow those of the batch.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, size: int, ensemble: int | None = None, momentum: float = 0.01, eps: float = 1e-5):
        super().__init__()
        shape = (size,) if ensemble is None else (ensemble, 1, size)
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("running_mean", torch.zeros(shape))
        self.register_buffer("running_var", torch.ones(shape))
        self.momentum, self.eps = momentum, eps
        self.rows: Tensor | None = None
        self.tracked = False

    def forward(self, x: Tensor) -> Tensor:
        with bfloat16(False, x):  # moments of half precision are too coarse
            x = x.float() if x.dtype == torch.bfloat16 else x
            if self.rows is None:
                mean, var, centred = self.running_mean, self.running_var, x - self.running_mean
            else:
                share = (self.rows / self.rows.sum().clamp(min=1)).unsqueeze(0)  # [1, B]
                mean = share @ x  # [..., 1, size]
                centred = x - mean
                var = share @ centred.square()
                if self.tracked:
                    self.track(mean.detach(), var.detach(), self.rows.sum())
            return torch.addcmul(self.bias, centred, torch.rsqrt(var + self.eps) * self.weight)

    @torch.no_grad()
    def track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Move the running statistics towards those of ``count`` rows; not towards a value that is not finite."""
        var = var * (count / (count - 1).clamp(min=1))
        known = torch.isfinite(mean + var) & (count > 1)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            step = torch.where(known, running.lerp(new, self.momentum), running)
            running.copy_(step.view(running.shape))


def batch_norms(net: nn.Module) -> list[BatchNorm]:
    """Return the BatchNorm layers of ``net``."""
    return [module for module in net.modules() if isinstance(module, BatchNorm)]


@contextmanager
def batch_statistics(net: nn.Module, rows: Tensor, tracked: bool) -> Iterator[None]:
    """Let the :class:`BatchNorm` layers of ``net`` use the statistics of the batch.

    Args:
        rows: [B] 1 for each row that counts, 0 for filler rows.
        tracked: the running statistics follow.
    """
    layers = batch_norms(net)
    for layer in layers:
        layer.rows, layer.tracked = rows, tracked
    try:
        yield
    finally:
        for layer in layers:
            layer.rows, layer.tracked = None, False


class Scaler(nn.Module):
    """Elementwise factor on [..., size], ``initial`` at first, learned in units of ``initial / scale`` (SimbaV2)."""

    def __init__(self, size: int, initial: float, scale: float, ensemble: int | None):
        super().__init__()
        shape = (size,) if ensemble is None else (ensemble, 1, size)
        self.weight = nn.Parameter(torch.full(shape, scale))
        self.unit = initial / scale

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight * self.unit)


def on_sphere(x: Tensor) -> Tensor:
    """Scale the last axis to norm 1, [..., size]."""
    return F.normalize(x, dim=-1, eps=NORM_EPS)


class SphereInput(nn.Module):
    """First layer of a hyperspherical network: norm(s * W norm([x, 3])), [..., in] -> [..., size].

    The constant keeps the length of ``x``, which the norm would remove (Lee et al. 2025, section 4.1).

    Args:
        linear: of ``size_in + 1`` inputs, without bias.
    """

    SHIFT = 3.0

    def __init__(self, linear: nn.Module, size: int, ensemble: int | None):
        super().__init__()
        scale = math.sqrt(2 / size)
        self.linear, self.scaler = linear, Scaler(size, scale, scale, ensemble)

    def forward(self, x: Tensor) -> Tensor:
        return on_sphere(self.scaler(self.linear(on_sphere(F.pad(x, (0, 1), value=self.SHIFT)))))


class SphereBlock(nn.Module):
    """Hyperspherical residual block: norm(x + a * (norm(W2 relu(s * W1 x)) - x)), with an inner width of 4 sizes.

    [..., size] -> [..., size] (Lee et al. 2025, section 4.2).

    Args:
        up, down: linear layers to four times ``size`` and back, without biases.
        blocks: number of blocks of the network; a is 1 / (blocks + 1) at first.
    """

    def __init__(self, up: nn.Module, down: nn.Module, size: int, blocks: int, ensemble: int | None):
        super().__init__()
        self.up, self.down = up, down
        scale = math.sqrt(2 / size) / 2
        self.scaler = Scaler(4 * size, scale, scale, ensemble)
        self.rate = Scaler(size, 1 / (blocks + 1), size**-0.5, ensemble)

    def forward(self, x: Tensor) -> Tensor:
        ahead = on_sphere(self.down(F.relu(self.scaler(self.up(x))) + NORM_EPS))
        return on_sphere(x + self.rate(ahead - x))


# -- unit-norm weights -------------------------------------------------------------------------------------------------


@torch.no_grad()
def project_weights(net: nn.Module, kind: str, skip: Tensor | None = None) -> None:
    """Scale weights to a fixed norm, in place: [out, in] and [E, in, out] by output, gains [..., size] as a whole.

    Args:
        kind: ``none``; ``linear``: the weights of each output of each linear layer to norm 1 (XQC); ``all``: also gain
            and bias of each BatchNorm jointly, and the gain of each RMSNorm, to norm sqrt(size) (FlashSAC).
        skip: 0-dim float; where it is 1, nothing changes.
    """
    if kind == "none":
        return
    for weights, axis, norm in weight_groups(net, kind == "all"):
        square = sum((w.square().sum(axis, keepdim=True) for w in weights), torch.zeros((), device=weights[0].device))
        scale = norm * torch.rsqrt(square + NORM_EPS)
        if skip is not None:
            scale = torch.where(skip > 0, 1.0, scale)
        for weight in weights:
            weight.mul_(scale)


def weight_groups(net: nn.Module, norms: bool) -> Iterator[tuple[list[Tensor], int, float]]:
    """Yield weights that share a norm, the axis over which it is taken, and its value.

    Args:
        norms: also the parameters of normalisation layers.
    """
    for module in net.modules():
        if isinstance(module, nn.Linear | EnsembleLinear):
            yield [module.weight], 1, 1.0
        elif norms and isinstance(module, BatchNorm):
            yield [module.weight, module.bias], -1, math.sqrt(module.weight.shape[-1])
        elif norms and isinstance(module, nn.RMSNorm | EnsembleRMSNorm):
            yield [module.weight], -1, math.sqrt(module.weight.shape[-1])
