"""Optimisation over one flat parameter tensor: clip, AdamW (fused) or RMSProp, polyak averaging. All capturable."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pql.nets import Flat


class Optimizer:
    """Gradient-norm clipping and a learning rate that is a device scalar, on a :class:`Flat`.

    Args:
        clip: largest gradient norm; None: no clipping.
    """

    def __init__(self, flat: Flat, lr: float, clip: float | None = None):
        self.flat, self.clip = flat, clip
        self.lr = torch.tensor(lr, device=flat.data.device)

    def zero_grad(self) -> None:
        assert self.flat.data.grad is not None
        self.flat.data.grad.zero_()

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> Tensor:
        """Clip, step; returns the gradient norm before clipping (0-dim).

        Args:
            skip: 0-dim float; where it is 1, nothing changes.
        """
        grad = self.flat.data.grad
        assert grad is not None
        norm = torch.linalg.vector_norm(grad)
        if self.clip is not None:
            grad.mul_((self.clip / (norm + 1e-6)).clamp_(max=1.0))
        self.apply(grad, skip)
        return norm

    def apply(self, grad: Tensor, skip: Tensor | None) -> None:
        """Step along ``grad`` [P], which is clipped already."""
        self.rule(self.flat.data, grad, self.state_dict(), skip)

    def rule(self, data: Tensor, grad: Tensor, state: Mapping[str, Tensor], skip: Tensor | None) -> None:
        """The update rule, element by element: on all parameters, or on some.

        Args:
            data, grad: [C]; ``data`` is changed in place.
            state: as ``state_dict`` has it, with the rows of these parameters where it holds a row for each; changed in
                place, but for ``lr``.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """``lr``, what the rule remembers of past gradients ([P] each), and counts (0-dim)."""
        return {"lr": self.lr}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class AdamW(Optimizer):
    """AdamW.

    One fused kernel for the step, called without ``torch.optim``'s own wrapper, which costs more than the step itself
    on small networks (the update rule and its defaults are the same; a test holds the two equal).

    Args:
        weight_decay: decoupled (Loshchilov & Hutter 2019).
        eps: beside the root of the second moment; None: 1e-8.
    """

    BETA1, BETA2 = 0.9, 0.999

    def __init__(
        self, flat: Flat, lr: float, clip: float | None = None, weight_decay: float = 0.0, eps: float | None = None
    ):
        super().__init__(flat, lr, clip)
        self.weight_decay, self.eps = weight_decay, 1e-8 if eps is None else eps
        self.count = torch.zeros((), device=flat.data.device)  # steps taken
        self.mean = torch.zeros_like(flat.data, requires_grad=False)
        self.square = torch.zeros_like(flat.data, requires_grad=False)

    def rule(self, data: Tensor, grad: Tensor, state: Mapping[str, Tensor], skip: Tensor | None) -> None:
        state["count"].add_(1 if skip is None else 1 - skip)
        # ``found_inf`` is meant for loss scaling: where it is 1, the kernel leaves everything as it is.
        torch._fused_adamw_(
            [data], [grad], [state["mean"]], [state["square"]], [], [state["count"]], lr=state["lr"],
            beta1=self.BETA1, beta2=self.BETA2, weight_decay=self.weight_decay, eps=self.eps,
            amsgrad=False, maximize=False, found_inf=skip,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Tensor]:
        return {"lr": self.lr, "count": self.count, "mean": self.mean, "square": self.square}


class RMSProp(Optimizer):
    """RMSProp (Tieleman & Hinton 2012), uncentred: data -= lr grad / (sqrt(square) + eps).

    Args:
        decay: of the running mean of squared gradients.
        eps: beside its root; None: 1e-5.
    """

    def __init__(self, flat: Flat, lr: float, clip: float | None = None, decay: float = 0.99, eps: float | None = None):
        super().__init__(flat, lr, clip)
        self.decay, self.eps = decay, 1e-5 if eps is None else eps
        self.square = torch.zeros_like(flat.data, requires_grad=False)

    def rule(self, data: Tensor, grad: Tensor, state: Mapping[str, Tensor], skip: Tensor | None) -> None:
        go: float | Tensor = 1.0 if skip is None else 1 - skip
        square = state["square"]
        square.add_((grad.square() - square).mul_((1 - self.decay) * go))
        data.sub_((grad / (square.sqrt() + self.eps)).mul_(state["lr"] * go))

    def state_dict(self) -> dict[str, Tensor]:
        return {"lr": self.lr, "square": self.square}


@torch.no_grad()
def polyak(target: Flat, source: Flat, tau: float) -> None:
    """target <- (1 - tau) target + tau source, in one kernel."""
    target.data.lerp_(source.data, tau)
