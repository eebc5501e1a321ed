"""Optimisation over one flat parameter tensor: clip, AdamW (fused, capturable on CUDA), polyak averaging."""

import torch
from torch import Tensor

from pql.nets import Flat


class AdamW:
    """AdamW with gradient-norm clipping on a :class:`Flat`. The learning rate is a device scalar.

    Args:
        clip: largest gradient norm; None: no clipping.
        weight_decay: decoupled (Loshchilov & Hutter 2019).
    """

    def __init__(self, flat: Flat, lr: float, clip: float | None = None, weight_decay: float = 0.0, eps: float = 1e-8):
        device = flat.data.device
        self.flat, self.clip = flat, clip
        self.lr = torch.tensor(lr, device=device)
        self.inner = torch.optim.AdamW(
            [flat.data], lr=self.lr, eps=eps, weight_decay=weight_decay, fused=True, capturable=device.type == "cuda"
        )
        state = self.inner.state[flat.data]
        # Made here, not by the first step, so that a captured graph and a checkpoint always find them.
        state["step"] = torch.zeros((), device=device)
        state["exp_avg"] = torch.zeros_like(flat.data, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(flat.data, requires_grad=False)

    def zero_grad(self) -> None:
        assert self.flat.data.grad is not None
        self.flat.data.grad.zero_()

    def step(self) -> Tensor:
        """Clip, step; returns the gradient norm before clipping (0-dim)."""
        grad = self.flat.data.grad
        assert grad is not None
        norm = torch.linalg.vector_norm(grad)
        if self.clip is not None:
            grad.mul_((self.clip / (norm + 1e-6)).clamp_(max=1.0))
        self.inner.step()
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        return {"lr": self.lr, **self.inner.state[self.flat.data]}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


@torch.no_grad()
def polyak(target: Flat, source: Flat, tau: float) -> None:
    """target <- (1 - tau) target + tau source, in one kernel."""
    target.data.lerp_(source.data, tau)
