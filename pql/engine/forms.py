"""Operations in the forms that Inductor compiles into few, full kernels."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16
"""Bytes at whose multiples tensor cores want matrices to begin, and their rows."""

aten = torch.ops.aten


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a`` [..., M, K] times ``b`` [..., K, N], padded to multiples of ``ALIGNED`` bytes for tensor cores."""
    unit = ALIGNED // a.element_size()
    rows, depth, columns = (-size % unit for size in (a.shape[-2], a.shape[-1], b.shape[-1]))
    rows = 0 if a.stride(-1) == 1 else rows  # the rows of a transposed matrix are its length in memory
    out = torch.matmul(widened(a, rows, depth), widened(b, depth, columns))
    return out[..., : a.shape[-2], : b.shape[-1]] if rows or columns else out


def widened(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Add ``rows`` and ``columns`` of zeros to a matrix [..., M, N]."""
    if not (rows or columns):
        return matrix
    if matrix.stride(-1) != 1:
        return widened(matrix.mT, columns, rows).mT
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows))


def sum_and_product(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``addmm`` or ``baddbmm``, [..., M, N]: the next element-wise kernel adds the bias, without a copy of it."""
    out = product(a, b)
    return torch.add(out if alpha == 1 else out * alpha, bias if beta == 1 else bias * beta)


def adamw_(
    data: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    largest: list[Tensor],
    counts: list[Tensor],
    *,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """``_fused_adamw_`` of tensors [P] as element-wise operations, which Inductor fuses with clipping and targets."""
    assert not any((amsgrad, maximize, largest, grad_scale is not None))
    for p, g, m, v, count in zip(data, grads, means, squares, counts, strict=True):
        mean = m + (g - m) * (1 - beta1)
        square = v * beta2 + g * g * (1 - beta2)
        rise1, rise2 = (-torch.expm1(count * math.log(beta)) for beta in (beta1, beta2))  # 1 - beta^count, exactly
        step = lr / rise1 * mean / ((square / rise2).sqrt() + eps)
        for old, new in ((p, p * (1 - lr * weight_decay) - step), (m, mean), (v, square)):
            old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))


FORMS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.addmm.default: sum_and_product,
    aten.baddbmm.default: sum_and_product,
    aten.view.default: torch.reshape,  # a part of a padded product may not have the strides that a view needs
    aten._unsafe_view.default: torch.reshape,
    aten._fused_adamw_.default: adamw_,
    aten._fused_adamw_.tensor_lr: adamw_,
}
"""Functions to compile in place of operations."""


def cast_views(base: Tensor, dtype: torch.dtype, views: Sequence[tuple[int, tuple[int, ...]]]) -> list[Tensor]:
    """Cast contiguous parts of ``base`` [P] in one pass, each to an address that is a multiple of ``ALIGNED`` bytes.

    Args:
        views: offset and shape of each part.
    """
    unit, parts, starts = ALIGNED // dtype.itemsize, [], [0]
    for offset, shape in views:
        size = math.prod(shape)
        parts.append(torch.nn.functional.pad(base.narrow(0, offset, size).to(dtype), (0, -size % unit)))
        starts.append(starts[-1] + len(parts[-1]))
    whole = torch.cat(parts)
    return [
        whole.narrow(0, start, math.prod(shape)).view(shape) for start, (_, shape) in zip(starts, views, strict=False)
    ]
