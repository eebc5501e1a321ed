"""Convolutional networks of image encoders, from images [B, C, H, W] in [0, 1] to features [B, F]."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pql.config import EncoderConfig, ValueEncoderConfig
from pql.nets.layers import bfloat16

Size = tuple[int, int, int]
"""Size of an image: (channels, height, width)."""


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels at each position of [B, C, H, W] (Gallici et al. 2024, PQN)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def reduced(x: Tensor, side: int, last: bool = False) -> Tensor:
    """Reduce images to ``side`` x ``side`` by averages over areas; the means of bytes are rounded to bytes.

    Args:
        x: [B, C, H, W] or [B, H, W]; [B, H, W, C] if ``last``.
    """
    planes = x.movedim(-1, 1) if last else x
    small = F.adaptive_avg_pool2d(planes if x.is_floating_point() else planes.float(), side)
    small = small if x.is_floating_point() else small.round_().to(x.dtype)
    return small.movedim(1, -1) if last else small


def feature_head(size: int, features: int, *after: nn.Module) -> list[nn.Module]:
    """Return the final layers: flatten, then a linear layer and ``after`` if ``features`` is above 0."""
    return [nn.Flatten(), *([nn.Linear(size, features), *after] if features else [])]


def small_layers(size: Size, channels: Sequence[int], settings: EncoderConfig) -> nn.Sequential:
    """Build 3 x 3 convolutions of stride 2, then Linear, LayerNorm and tanh, as in DrQ-v2 (Yarats et al. 2022)."""
    layers: list[nn.Module] = []
    inside, rows, columns = size
    for outside in channels:
        norms = [ChannelNorm(outside)] if settings.layer_norm else []
        layers += [nn.Conv2d(inside, outside, 3, stride=2, padding=1), *norms, nn.ReLU(inplace=True)]
        inside, rows, columns = outside, math.ceil(rows / 2), math.ceil(columns / 2)
    features = settings.features or 0
    return nn.Sequential(*layers, *feature_head(inside * rows * columns, features, nn.LayerNorm(features), nn.Tanh()))


CONVOLUTIONS = {"nature": ((8, 4), (4, 2), (3, 1)), "squint": ((4, 2), (4, 1))}
"""(kernel, stride) of the convolutions without padding, by kind."""


def unpadded(size: Size, channels: Sequence[int], settings: EncoderConfig) -> tuple[list[nn.Module], int]:
    """Build convolutions without padding, each followed by ReLU. Returns them and the elements of the last map."""
    layers: list[nn.Module] = []
    inside, rows, columns = size
    for outside, (kernel, stride) in zip(channels, CONVOLUTIONS[settings.kind], strict=False):
        norms = [ChannelNorm(outside)] if settings.layer_norm else []
        layers += [nn.Conv2d(inside, outside, kernel, stride), *norms, nn.ReLU(inplace=True)]
        inside, rows, columns = outside, (rows - kernel) // stride + 1, (columns - kernel) // stride + 1
    return layers, inside * rows * columns


def nature(size: Size, channels: Sequence[int], settings: EncoderConfig) -> nn.Sequential:
    """Build the network of Mnih et al. 2015; channels [16, 32] and 256 features give A3C's (Mnih et al. 2016)."""
    layers, count = unpadded(size, channels, settings)
    features = settings.features or 0
    norm = [nn.LayerNorm(features)] if settings.layer_norm and features else []
    return nn.Sequential(*layers, *feature_head(count, features, *norm, nn.ReLU(inplace=True)))


def squint(size: Size, channels: Sequence[int], settings: EncoderConfig) -> nn.Sequential:
    """Build the network of Squint (arXiv 2602.21203) for images of 16 x 16: it ends with Linear, LayerNorm, tanh."""
    layers, count = unpadded(size, channels, settings)
    features = settings.features or 0
    return nn.Sequential(*layers, *feature_head(count, features, nn.LayerNorm(features), nn.Tanh()))


def least_side(kind: str, count: int) -> int:
    """Return the smallest image side, in pixels, that ``count`` convolutions of ``nature`` or ``squint`` accept."""
    side = 1
    for kernel, stride in reversed(CONVOLUTIONS[kind][:count]):
        side = (side - 1) * stride + kernel
    return side


# -- residual networks ------------------------------------------------------------------------------------------------


class SpectralConv2d(nn.Conv2d):
    """Convolution with the weights W / sigma, sigma the largest singular value of W as a matrix [out, in k k].

    Source: Miyato et al. 2018. ``left`` [out] and ``right`` [in k k] estimate the singular vectors; each step of the
    optimiser is followed by one power iteration, so that forward passes change nothing. They are parameters without a
    gradient, which are copied, published and saved with the weights that they belong to.
    """

    def __init__(self, inside: int, outside: int, kernel: int, padding: int):
        super().__init__(inside, outside, kernel, padding=padding)
        self.left = nn.Parameter(F.normalize(torch.randn(outside), dim=0))
        self.right = nn.Parameter(F.normalize(torch.randn(self.weight[0].numel()), dim=0))
        for _ in range(16):  # 15, as in torch.nn.utils.parametrizations, and the one of the first forward pass there
            self.after_step()

    @torch.no_grad()
    def after_step(self) -> None:
        """Take a power iteration with the present weights. Optimisers call it after each step."""
        matrix = self.weight.flatten(1)
        self.left.copy_(F.normalize(matrix @ self.right, dim=0))
        self.right.copy_(F.normalize(matrix.T @ self.left, dim=0))

    def normalized(self) -> Tensor:
        """Return W / sigma, [out, in, k, k]; the gradient goes through sigma, too."""
        with bfloat16(False, self.weight):  # acting and exports divide by the float32 one
            sigma = self.left.detach() @ (self.weight.flatten(1) @ self.right.detach())
            return self.weight / sigma

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.normalized(), self.bias)

    @torch.no_grad()
    def folded(self) -> nn.Conv2d:
        """Return an ordinary convolution with the weights W / sigma."""
        size, weight = self.kernel_size, self.normalized()
        plain = nn.Conv2d(weight.shape[1], weight.shape[0], cast(Any, size), padding=cast(Any, self.padding))
        plain.load_state_dict({"weight": weight, "bias": self.bias})
        return plain


def fold(net: nn.Module) -> nn.Module:
    """Replace every :class:`SpectralConv2d` inside ``net`` by an ordinary convolution, in place; returns ``net``."""
    for module in [*net.modules()]:
        for name, child in module.named_children():
            if isinstance(child, SpectralConv2d):
                setattr(module, name, child.folded())
    return net


class Residual(nn.Module):
    """Residual block: x + conv(relu(conv(relu(x)))) on [B, C, H, W]."""

    def __init__(self, channels: int, spectral_norm: bool = False):
        super().__init__()
        conv = SpectralConv2d if spectral_norm else nn.Conv2d
        self.first, self.second = (conv(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x)), inplace=True))


class MaxPoolTo(nn.Module):
    """Adaptive max pooling: [B, C, H, W] -> [B, C, side, side].

    Output i is the maximum of inputs floor(i n / side) to ceil((i + 1) n / side) - 1 of the n along an axis. On CUDA,
    the gradient of ``nn.AdaptiveMaxPool2d`` is not reproducible; this one's is.
    """

    def __init__(self, side: int):
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        for axis in (2, 3):
            size = x.shape[axis]
            parts = [(i * size // self.side, -(-(i + 1) * size // self.side)) for i in range(self.side)]
            x = torch.stack([x.narrow(axis, low, high - low).amax(axis) for low, high in parts], axis)
        return x


def resnet(size: Size, channels: Sequence[int], settings: EncoderConfig) -> nn.Sequential:
    """Build the deep network of Espeholt et al. 2018 (IMPALA).

    Each section is a convolution, a max pooling of stride 2 and two residual blocks; three sections have 15
    convolutions. Spectral norm and the pooling at the end: Schmidt & Schmied 2021, Clark et al. 2025 (BTR).
    """
    spectral = isinstance(settings, ValueEncoderConfig) and settings.spectral_norm
    layers: list[nn.Module] = []
    inside, rows, columns = size
    for outside in channels:
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks = [Residual(outside, spectral) for _ in range(2)]
        layers += [nn.Conv2d(inside, outside, 3, padding=1), pool, *blocks]
        inside, rows, columns = outside, math.ceil(rows / 2), math.ceil(columns / 2)
    if settings.pool is not None:
        layers.append(MaxPoolTo(settings.pool))
        rows = columns = settings.pool
    layers.append(nn.ReLU(inplace=True))
    head = feature_head(inside * rows * columns, settings.features or 0, nn.ReLU(inplace=True))
    return nn.Sequential(*layers, *head)


# -- products of two branches -----------------------------------------------------------------------------------------

HADAMAX = ((8, 4, 4), (4, 2, 2), (3, 3, 1))
"""(kernel of the convolutions, window of the pooling, its stride) of the blocks of Kooi et al. 2025."""


def pad_same(x: Tensor, window: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad [B, C, H, W] so that windows of the stride give ceil(H / stride) x ceil(W / stride) outputs.

    Where the padding is odd, the larger part is at the bottom and at the right, as in XLA ("SAME").
    """
    pads: list[int] = []
    for size in (x.shape[3], x.shape[2]):
        total = max(0, (math.ceil(size / stride) - 1) * stride + window - size)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


class ProductBlock(nn.Module):
    """Block of Hadamax: elementwise product of two branches, then max pooling; [B, C, H, W] -> [B, C', H', W'].

    Each branch is a convolution of stride 1, LayerNorm over the channels and GELU. Source: Kooi et al. 2025.

    Args:
        kernel: of the convolutions.
        window, stride: of the pooling.
    """

    def __init__(self, inside: int, outside: int, kernel: int, window: int, stride: int):
        super().__init__()
        convs = [nn.Conv2d(inside, outside, kernel) for _ in range(2)]
        for conv in convs:
            nn.init.xavier_normal_(conv.weight)
            nn.init.zeros_(cast(Tensor, conv.bias))
        norms = [ChannelNorm(outside, eps=1e-6) for _ in convs]
        branches = [nn.Sequential(c, n, nn.GELU("tanh")) for c, n in zip(convs, norms, strict=True)]
        self.one, self.other = branches
        self.kernel, self.window, self.stride = kernel, window, stride

    def forward(self, x: Tensor) -> Tensor:
        x = pad_same(x, self.kernel, 1)
        x = self.one(x) * self.other(x)
        return F.max_pool2d(pad_same(x, self.window, self.stride, -math.inf), self.window, self.stride)


def hadamax(size: Size, channels: Sequence[int], settings: EncoderConfig) -> nn.Sequential:
    """Build the encoder of Kooi et al. 2025 (repository Jacobkooi/Hadamax at abc1326): :class:`ProductBlock` layers,
    then Linear, LayerNorm and GELU."""
    layers: list[nn.Module] = []
    inside, rows, columns = size
    for outside, (kernel, window, stride) in zip(channels, HADAMAX, strict=False):
        layers.append(ProductBlock(inside, outside, kernel, window, stride))
        inside, rows, columns = outside, math.ceil(rows / stride), math.ceil(columns / stride)
    features = settings.features or 0
    after = [nn.LayerNorm(features, eps=1e-6), nn.GELU("tanh")] if features else []
    head = feature_head(inside * rows * columns, features, *after)
    if features:
        linear = head[1]
        assert isinstance(linear, nn.Linear)
        nn.init.kaiming_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
    return nn.Sequential(*layers, *head)


# -- the choice -------------------------------------------------------------------------------------------------------


class Network(NamedTuple):
    """CNN architecture: its constructor and default sizes."""

    make: Callable[[Size, Sequence[int], EncoderConfig], nn.Sequential]
    channels: tuple[int, ...]
    features: int


NETWORKS = {
    "small": Network(small_layers, (16, 32, 32), 128),
    "squint": Network(squint, (32, 64), 50),
    "nature": Network(nature, (32, 64, 64), 512),
    "resnet": Network(resnet, (16, 32, 32), 256),
    "hadamax": Network(hadamax, (32, 64, 64), 512),
}


def make_cnn(size: Size, settings: EncoderConfig) -> nn.Sequential:
    """Build the network that ``settings`` choose, for images of ``size``."""
    network = NETWORKS[settings.kind]
    features = network.features if settings.features is None else settings.features
    return network.make(size, settings.channels or network.channels, replace(settings, features=features))
