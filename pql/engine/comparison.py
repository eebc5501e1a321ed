"""Comparison of a compiled function with its operations, run eagerly."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter

from pql.engine.forms import product, sum_and_product
from pql.engine.tape import tensors_of

LARGE = 64 * 2**20
"""Bytes above which a tensor is not copied for a comparison: a replay."""

NOISE = 1e-3
"""Size below which a result is compared as if it had this size: a divergence of equal policies is rounding alone."""

MANY = 2**18
"""Elements above which the sizes of a result are not kept."""

aten = torch.ops.aten


def varied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor of any shape; of one of zeros, evenly spaced numbers between 0 and 1."""
    copy = tensor.detach().clone()
    if copy.is_floating_point() and not copy.any():
        copy.copy_(torch.linspace(0.01, 0.99, copy.numel(), device=copy.device).view(copy.shape))
    return copy


def relative(one: Tensor, two: Tensor, before: Tensor | None = None, size: float = 0.0) -> float:
    """Return how far two results of equal shape are apart, relative to the second, to its change or to ``size``, if
    that is larger; inf if what is NaN or infinite in one is not so in the other."""
    if not two.is_floating_point():
        return float((one != two).double().mean()) if two.numel() else 0.0
    if not one.isfinite().equal(two.isfinite()):
        return math.inf
    one, two = (torch.nan_to_num(t.double(), posinf=0.0, neginf=0.0) for t in (one, two))
    change = two if before is None else two - before.double().nan_to_num()
    apart = (one - two).norm()
    return float(apart / change.norm().clamp(min=size)) if apart > 1e-6 * two.norm().clamp(min=NOISE) else 0.0


class Sizes(Interpreter):
    """Runs a graph eagerly, and keeps how large numbers were before terms cancelled.

    A mean of values, or an entropy less its target, can be near zero, while rounding is in proportion to what was
    added. The size of a sum is the sum of sizes, that of a product their product, that of another result its absolute
    value.
    """

    def __init__(self, graph: torch.fx.GraphModule):
        super().__init__(graph)
        self._sizes: dict[int, Tensor] = {}  # by address
        self._alive: list[Tensor] = []  # so that no address is used twice

    def of(self, number: Tensor) -> float:
        """Return the size of a tensor of one element, or of what was added to it; 0 for one of another shape."""
        known = self._sizes.get(number.data_ptr())
        return float(known) if known is not None and number.numel() == known.numel() == 1 else 0.0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        packet = getattr(target, "overloadpacket", None)
        out = super().call_function(target, args, kwargs)
        if packet in (aten._foreach_add_, aten.add_):
            for number, added in zip(tensors_of(args[0]), tensors_of(args[1]), strict=False):
                self._sizes[number.data_ptr()] = self._known(added)
        elif isinstance(out, Tensor) and out.is_floating_point() and out.numel() <= MANY:
            self._keep(out, self._size(target, packet, args, kwargs))
        return out

    def _keep(self, out: Tensor, size: Tensor | None) -> None:
        if size is not None:
            self._alive.append(out)
            self._sizes[out.data_ptr()] = size.float()

    def _known(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return abs(value) if isinstance(value, (int, float)) else value
        known = self._sizes.get(value.data_ptr())
        return value.float().abs() if known is None or known.numel() != value.numel() else known.reshape(value.shape)

    def _size(self, target: Any, packet: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return the size of an operation's result, of its shape; None: its absolute value."""
        if packet is aten.cat:
            return torch.cat([self._known(t) for t in args[0]], *args[1:])
        if packet in (aten.sum, aten.mean, aten.neg, aten._to_copy, aten.clone):
            return packet(self._known(args[0]), *args[1:], **kwargs).abs()
        if packet in (aten.add, aten.sub, aten.rsub):
            return self._known(args[0]) + self._known(args[1]) * abs(kwargs.get("alpha", 1))
        if packet in (aten.mul, aten.mv) or target in (product, sum_and_product):
            return target(*map(self._known, args), **kwargs)
        return self._known(args[0]) / abs(args[1]) if packet is aten.div else None
