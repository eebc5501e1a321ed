"""Augmentation of sampled images: random shifts (DrQ-v2, Yarats et al. 2022), brightness and contrast.

Images are [B, C, H, W], [B, H, W, C] or [B, H, W]. Everything is drawn for each row of a batch.
"""

import torch
from torch import Generator, Tensor

from pql.types import Obs, column


class Augment:
    """Shift and jitter the images among observation groups.

    Args:
        images: names of the groups, and whether their channels are the last axis.
        shift: largest shift in pixels; 0: none.
        jitter: largest deviation of both factors from 1; 0: none. Images are then bytes.
    """

    def __init__(self, images: dict[str, bool], shift: int, jitter: float):
        self.images = images if shift or jitter else {}
        self.shift, self.jitter = shift, jitter

    def __call__(self, obs: Obs, gen: Generator) -> Obs:
        """Return observations [B, ...] with augmented images; other groups are not copied."""
        return {k: self._image(v, self.images[k], gen) if k in self.images else v for k, v in obs.items()}

    def _image(self, x: Tensor, last: bool, gen: Generator) -> Tensor:
        if self.shift:
            offset = torch.randint(-self.shift, self.shift + 1, (2, len(x)), generator=gen, device=x.device)
            x = shifted(x, offset, last)
        if self.jitter:
            factor = torch.rand(2, len(x), generator=gen, device=x.device)
            x = jittered(x, *(1 + self.jitter * (2 * factor - 1)))
        return x


def shifted(x: Tensor, offset: Tensor, last: bool = False) -> Tensor:
    """Return images whose pixel (i, j) is pixel (i + down, j + right) of ``x``, or the nearest one inside.

    This is a random crop of the image padded by repeated borders.

    Args:
        offset: [2, B] int64: down and right.
        last: the channels are the last axis.
    """
    height = 1 if last or x.dim() == 3 else 2
    for axis, by in enumerate(offset, height):
        places = torch.arange(x.shape[axis], device=x.device) + by.unsqueeze(1)  # [B, size]
        x = picked(x, axis, places.clamp(0, x.shape[axis] - 1))
    return x.contiguous()


def picked(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """Return the entries ``index`` [B, size] of each row of ``x`` [B, ...] along ``axis``, which has this size.

    Whole lines are copied: on a CPU much faster than an index for each pixel.
    """
    lines = x.movedim(axis, 1).contiguous()
    first = torch.arange(len(x), device=x.device).unsqueeze(1) * x.shape[axis]
    out = lines.flatten(0, 1).index_select(0, (first + index).flatten())
    return out.view(lines.shape).movedim(1, axis)


def jittered(x: Tensor, brightness: Tensor, contrast: Tensor) -> Tensor:
    """Multiply images of bytes by ``brightness``, and their distance from their mean by ``contrast``, [B] both.

    The result is rounded and clamped to bytes.
    """
    out = x.float()
    mean = out.mean([*range(1, x.dim())])
    shift = brightness * (1 - contrast) * mean + 0.5  # 0.5: bytes are rounded down
    return out.mul_(column(brightness * contrast, x)).add_(column(shift, x)).clamp_(0, 255).to(torch.uint8)
