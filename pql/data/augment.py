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
    planes = x if last or x.dim() == 3 else x.movedim(1, -1)  # [B, H, W, ...]
    down, right = (
        (torch.arange(size, device=x.device) + by.unsqueeze(1)).clamp(0, size - 1)
        for size, by in zip(planes.shape[1:3], offset, strict=True)
    )
    rows = torch.arange(len(x), device=x.device)
    out = planes[rows[:, None, None], down[:, :, None], right[:, None, :]]
    return out if planes is x else out.movedim(-1, 1)


def jittered(x: Tensor, brightness: Tensor, contrast: Tensor) -> Tensor:
    """Multiply images of bytes by ``brightness``, then their distance from their mean by ``contrast``, [B] both.

    Each step is clamped to the range of bytes; the result is rounded.
    """
    bright = (x * column(brightness, x)).clamp_(0, 255)
    mean = bright.mean([*range(1, x.dim())], keepdim=True)
    return torch.lerp(mean, bright, column(contrast, x)).clamp_(0, 255).round_().to(torch.uint8)
