"""Reduction of images, position by position."""

import math

import torch


def averaged(x, side):
    """Means over the pixels that each of ``side`` x ``side`` equal areas touches, of images [B, C, H, W]."""
    y = torch.empty(*x.shape[:2], side, side, dtype=x.dtype)
    for i in range(side):
        for j in range(side):
            (top, bottom), (left, right) = (
                (k * size // side, math.ceil((k + 1) * size / side))
                for k, size in zip((i, j), x.shape[2:], strict=True)
            )
            y[:, :, i, j] = x[:, :, top:bottom, left:right].mean((2, 3))
    return y
