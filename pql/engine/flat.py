"""Parameters of a network as one tensor, for optimisers, averages and copies."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from pql.nets.layers import batch_norms
from pql.nets.mlp import Reads


class Flat:
    """Parameters of a module as views of one contiguous tensor, and their gradients as views of another.

    Gradient clipping, optimiser step, Polyak averaging and weight broadcast then take one kernel each. It changes the
    module, whose parameters take no gradients unless it is trained.

    Attributes:
        data: [P] all parameters; a leaf tensor whose ``grad`` is [P] if the module is trained.
        statistics: [S] running statistics of all BatchNorm layers.
        sent: [P + S + 1] gradient, statistics and one extra element, averaged over processes together; empty if not
            trained.
        borrowed: parameters that belong to another network (:class:`Reads`); not in ``data``, but published with it.
        after: methods ``after_step`` of the module and its parts, which its optimiser calls after each step.
    """

    def __init__(self, module: nn.Module, trained: bool = False):
        self.module = module
        self.after: list[Callable[[], None]] = [
            cast(Any, m).after_step for m in module.modules() if hasattr(m, "after_step")
        ]
        self.borrowed, buffers = borrowed_parameters(module), running_statistics(module)
        others = {id(p.requires_grad_(False)) for p in self.borrowed}
        parameters = [p for p in module.parameters() if id(p) not in others]
        values = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.data, size = nn.Parameter(values, requires_grad=trained), values.numel()
        statistics = torch.cat([values[:0], *(getattr(layer, name).reshape(-1) for layer, name in buffers)])
        self.sent = values.new_zeros(size + statistics.numel() + 1 if trained else 0)
        grad = self.sent[:size] if trained else None
        self.data.grad = grad
        self.statistics = self.sent[size:-1].copy_(statistics) if trained else statistics
        self.parameters, start = parameters, 0
        for p in parameters:
            stop = start + p.numel()
            p.data = self.data.detach()[start:stop].view_as(p)
            p.grad = grad[start:stop].view_as(p) if grad is not None else None
            p.requires_grad_(trained)
            start = stop
        start = 0
        for layer, name in buffers:
            stop = start + getattr(layer, name).numel()
            setattr(layer, name, self.statistics[start:stop].view_as(getattr(layer, name)))
            start = stop

    def differentiate(self, loss: Tensor) -> None:
        """Write the gradient of ``loss`` (0-dim) to ``data.grad``; zeros for parameters on which it does not depend."""
        parts = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        torch.cat([part.reshape(-1) for part in parts], out=self.data.grad)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are published: parameters, statistics if there are any, borrowed parameters."""
        own = [self.data, self.statistics] if self.statistics.numel() else [self.data]
        return [*own, *self.borrowed]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's state dict, under its own names."""
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load in place: views and captured CUDA graphs stay valid."""
        self.module.load_state_dict(state)


def borrowed_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of encoders that are lent to networks in ``module``."""
    readers = [m for m in module.modules() if isinstance(m, Reads) and m.borrows and m.encoder is not None]
    return [p for m in readers for p in cast(nn.Module, m.encoder).parameters()]


def running_statistics(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return layer and name of the running statistics of each BatchNorm layer."""
    return [(layer, name) for layer in batch_norms(module) for name in ("running_mean", "running_var")]
