"""Optimisation over one flat parameter tensor: clip, AdamW (fused, capturable on CUDA), polyak averaging."""

import torch
from torch import Tensor

from pql.nets import Flat


class AdamW:
    """AdamW with gradient-norm clipping on a :class:`Flat`. The learning rate is a device scalar.

    One fused kernel for the step, called without ``torch.optim``'s own wrapper, which costs more than the step itself
    on small networks (the update rule and its defaults are the same; a test holds the two equal).

    Args:
        clip: largest gradient norm; None: no clipping.
        weight_decay: decoupled (Loshchilov & Hutter 2019).
    """

    BETA1, BETA2 = 0.9, 0.999

    def __init__(self, flat: Flat, lr: float, clip: float | None = None, weight_decay: float = 0.0, eps: float = 1e-8):
        device = flat.data.device
        self.flat, self.clip, self.weight_decay, self.eps = flat, clip, weight_decay, eps
        self.lr = torch.tensor(lr, device=device)
        self.count = torch.zeros((), device=device)  # steps taken
        self.mean = torch.zeros_like(flat.data, requires_grad=False)
        self.square = torch.zeros_like(flat.data, requires_grad=False)

    def zero_grad(self) -> None:
        assert self.flat.data.grad is not None
        self.flat.data.grad.zero_()

    @torch.no_grad()
    def step(self) -> Tensor:
        """Clip, step; returns the gradient norm before clipping (0-dim)."""
        grad = self.flat.data.grad
        assert grad is not None
        norm = torch.linalg.vector_norm(grad)
        if self.clip is not None:
            grad.mul_((self.clip / (norm + 1e-6)).clamp_(max=1.0))
        self.count += 1
        torch._fused_adamw_(
            [self.flat.data], [grad], [self.mean], [self.square], [], [self.count], lr=self.lr,
            beta1=self.BETA1, beta2=self.BETA2, weight_decay=self.weight_decay, eps=self.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        return {"lr": self.lr, "count": self.count, "mean": self.mean, "square": self.square}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


@torch.no_grad()
def polyak(target: Flat, source: Flat, tau: float) -> None:
    """target <- (1 - tau) target + tau source, in one kernel."""
    target.data.lerp_(source.data, tau)
