"""Optimisation over one flat parameter tensor: clip, AdamW, RAdam or RMSProp, polyak averaging. All capturable."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pql.config.algorithms import ReplayAlgoConfig
from pql.config.networks import TrainedNetConfig
from pql.engine.collectives import ALONE, Group
from pql.engine.flat import Flat
from pql.engine.graph import host_reads


class Optimizer:
    """Base of optimisers on a :class:`Flat`: gradient-norm clipping, and the learning rate as a device scalar.

    A step with a non-finite gradient is skipped.

    Args:
        clip: largest gradient norm; None: no clipping.

    Attributes:
        broken: 0-dim float; 1 if the last gradient was not finite.
        project: called after each step, with ``skip``, to change the weights in place (unit-norm weights).
        extra: returns a 0-dim term that :meth:`minimize` adds to the loss.
    """

    project: Callable[[Tensor | None], None] | None = None
    extra: Callable[[], Tensor] | None = None

    def __init__(self, flat: Flat, lr: float, clip: float | None = None):
        self.flat, self.clip = flat, clip
        self.lr = torch.tensor(lr, device=flat.data.device)
        self.broken = self._whole = torch.zeros_like(self.lr)
        self.group = ALONE

    def connect(self, group: Group) -> None:
        """Average gradients over the processes of ``group`` from now on."""
        self.group = group

    def minimize(self, loss: Tensor, skip: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Take a :meth:`step` on the gradient of ``loss`` (0-dim). Returns its norm before clipping, 0-dim."""
        self.flat.differentiate(loss if self.extra is None else loss + self.extra())
        return self.step(skip, mask)

    @torch.no_grad()
    def step(self, skip: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Average over processes, clip, step, call the ``after_step`` methods of the module's parts.

        Returns the gradient norm before clipping (0-dim).

        Args:
            skip: 0-dim float; where it is 1, nothing changes.
            mask: 1 for each row that contributes to the gradient, to weight processes by rows; None: equal weights.
        """
        grad = self.flat.data.grad
        assert grad is not None
        self.group.mean_(self.flat.sent, mask)
        norm = torch.linalg.vector_norm(grad)
        skip = self._guard(norm, skip)
        if self.clip is not None:
            scale = (self.clip / (norm + 1e-6)).clamp_(max=1.0)
            if not host_reads(scale.device) or not scale >= 1:  # eager: reading it saves a pass over all gradients
                grad.mul_(scale)
        self.apply(grad, skip)
        for after in self.flat.after:
            after()
        if self.project is not None:
            self.project(skip)
        return norm

    def _guard(self, norm: Tensor, skip: Tensor | None) -> Tensor | None:
        """Return ``skip``, or 1 if ``norm`` is not finite."""
        if host_reads(norm.device) and math.isfinite(norm):  # eager: the value may be read
            self.broken = self._whole
            return skip
        self.broken = (norm - norm != 0).to(norm)
        return self.broken if skip is None else torch.maximum(skip, self.broken)

    def apply(self, grad: Tensor, skip: Tensor | None) -> None:
        """Step along the clipped gradient ``grad`` [P]."""
        self.rule(self.flat.data, grad, self.state_dict(), skip)

    def rule(self, data: Tensor, grad: Tensor, state: Mapping[str, Tensor], skip: Tensor | None) -> None:
        """Apply the update rule element by element, to all parameters [P] or some of them.

        Args:
            data, grad: [C]; ``data`` is changed in place.
            state: entries of ``state_dict``; those with a value per parameter are sliced to these parameters. Changed
                in place, except ``lr``.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return ``lr``, moments of past gradients ([P] each) and counts (0-dim)."""
        return {"lr": self.lr}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class LrSchedule:
    """Factor on a learning rate that falls from 1 to ``final`` within ``updates`` optimiser steps.

    Args:
        kind: ``cosine`` (Loshchilov & Hutter 2017) or ``linear``.
    """

    def __init__(self, kind: str, updates: float, final: float):
        self.kind, self.updates, self.final = kind, updates, final

    def __call__(self, count: Tensor) -> Tensor:
        """Return the factor of the step after ``count`` steps, 0-dim both."""
        done = (count / self.updates).clamp(max=1)
        left = 0.5 * (1 + torch.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.final + (1 - self.final) * left


class AdamW(Optimizer):
    """AdamW in one fused kernel.

    It bypasses the Python wrapper of ``torch.optim``, which costs more than the step itself on small networks. Update
    rule and defaults are the same; a test checks that they agree.

    Args:
        weight_decay: decoupled (Loshchilov & Hutter 2019).
        eps: added to the root of the second moment; None: 1e-8.
        betas: decay of the running means of gradients and squared gradients.

    Attributes:
        schedule: of the learning rate, by steps taken; None: constant.
    """

    def __init__(
        self,
        flat: Flat,
        lr: float,
        clip: float | None = None,
        weight_decay: float = 0.0,
        eps: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
    ):
        super().__init__(flat, lr, clip)
        self.beta1, self.beta2 = betas
        self.schedule: LrSchedule | None = None
        self.weight_decay, self.eps = weight_decay, 1e-8 if eps is None else eps
        self.count = torch.zeros((), device=flat.data.device)  # steps taken
        self.mean = torch.zeros_like(flat.data, requires_grad=False)
        self.square = torch.zeros_like(flat.data, requires_grad=False)

    def rule(self, data: Tensor, grad: Tensor, state: Mapping[str, Tensor], skip: Tensor | None) -> None:
        lr = state["lr"] if self.schedule is None else state["lr"] * self.schedule(state["count"])
        state["count"].add_(1 if skip is None else 1 - skip)
        self._fused(data, grad, state, skip, lr)

    def _fused(self, data: Tensor, grad: Tensor, state: Mapping[str, Tensor], skip: Tensor | None, lr: Tensor) -> None:
        # ``found_inf`` is meant for loss scaling: if it is 1, the kernel changes nothing.
        torch._fused_adamw_(
            [data],
            [grad],
            [state["mean"]],
            [state["square"]],
            [],
            [state["count"]],
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {"lr": self.lr, "count": self.count, "mean": self.mean, "square": self.square}


class RAdam(AdamW):
    """RAdam (Liu et al. 2020, Algorithm 2): Adam's step times a factor that rises to 1 as the estimate of the second
    moment becomes reliable; only momentum in the first few steps, before there is an estimate.

    ``eps`` is placed as in Adam (and optax; ``torch.optim.RAdam`` adds it before the bias correction), and weight decay
    is multiplied by the same factor.
    """

    CERTAIN = 5.0  # length of the approximated moving average above which the second moment is used

    def rule(self, data: Tensor, grad: Tensor, state: Mapping[str, Tensor], skip: Tensor | None) -> None:
        state["count"].add_(1 if skip is None else 1 - skip)
        # In double: differences of nearly equal numbers follow.
        count, longest = state["count"].double().clamp_(min=1), 2 / (1 - self.beta2) - 1
        decay = self.beta2**count
        length = longest - 2 * count * decay / (1 - decay)
        certain = length > self.CERTAIN
        factor = ((length - 4) * (length - 2) * longest) / ((longest - 4) * (longest - 2) * length)
        lr = state["lr"]
        self._fused(data, grad, state, skip, lr * torch.where(certain, factor, 0).sqrt().float())
        plain = lr * (~certain / (1 - self.beta1**count)).float()
        data.addcmul_(state["mean"], plain if skip is None else plain * (1 - skip), value=-1)


class RMSProp(Optimizer):
    """RMSProp (Tieleman & Hinton 2012), uncentred: data -= lr grad / (sqrt(square) + eps).

    Args:
        decay: decay of the running mean of squared gradients.
        eps: added to its root; None: 1e-5.
    """

    def __init__(self, flat: Flat, lr: float, clip: float | None = None, decay: float = 0.99, eps: float | None = None):
        super().__init__(flat, lr, clip)
        self.decay, self.eps = decay, 1e-5 if eps is None else eps
        self.square = torch.zeros_like(flat.data, requires_grad=False)

    def rule(self, data: Tensor, grad: Tensor, state: Mapping[str, Tensor], skip: Tensor | None) -> None:
        go: float | Tensor = 1.0 if skip is None else 1 - skip
        if skip is not None:
            grad = torch.where(skip > 0, 0.0, grad)  # 0 times a non-finite value would stay non-finite
        square = state["square"]
        square.lerp_(grad.square(), (1 - self.decay) * go)
        data.addcdiv_(grad, self.root(square).div_(-state["lr"] * go))  # few passes over memory: this is a hot spot

    def root(self, square: Tensor) -> Tensor:
        """Return the divisor of the gradient, [C]."""
        return square.sqrt().add_(self.eps)

    def state_dict(self) -> dict[str, Tensor]:
        return {"lr": self.lr, "square": self.square}


class RMSPropTF(RMSProp):
    """RMSProp as in TensorFlow: data -= lr grad / sqrt(square + eps), ``square`` 1 at first.

    With small gradients, an ``eps`` under the root reduces steps much more than the same value added to the root.
    """

    def __init__(self, flat: Flat, lr: float, clip: float | None = None, decay: float = 0.99, eps: float | None = None):
        super().__init__(flat, lr, clip, decay, eps)
        self.square.fill_(1.0)

    def root(self, square: Tensor) -> Tensor:
        return square.add(self.eps).sqrt_()


def annealed(ticks: Tensor, steps_per_tick: int, steps: int) -> Tensor:
    """Return the linear decay from 1 to 0 over ``steps`` env steps, after ``ticks`` ticks (0-dim; shape [])."""
    return (1 - ticks * (steps_per_tick / steps)).clamp_(min=0)


@torch.no_grad()
def polyak(target: Flat, source: Flat, tau: float | Tensor) -> None:
    """target <- (1 - tau) target + tau source over all parameters [P], in one kernel, and over BatchNorm's statistics.

    ``tau``: a number or 0-dim.
    """
    target.data.lerp_(source.data, tau)
    if source.statistics.numel():
        target.statistics.lerp_(source.statistics, tau)


class Clock:
    """Number of updates so far, on the device; decides when a target network is updated."""

    def __init__(self, device: torch.device):
        self.updates = torch.zeros((), dtype=torch.int64, device=device)

    def state_dict(self) -> dict[str, Tensor]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.updates.copy_(state["updates"])


@torch.no_grad()
def follow(target: Flat, source: Flat, clock: Clock, period: int, tau: float = 1.0) -> None:
    """Count an update, and apply :func:`polyak` to the target at every ``period``-th, without a branch."""
    clock.updates += 1
    due = (clock.updates % period == 0).to(source.data.dtype)
    # polyak with tau 1 copies bit for bit, with 0 it changes nothing.
    polyak(target, source, due if tau == 1 else due * tau)


def make_adamw(flat: Flat, net: TrainedNetConfig, kind: type[AdamW] = AdamW) -> AdamW:
    """Create the optimiser of a network with its settings."""
    return kind(flat, net.lr, net.grad_clip, net.weight_decay, net.eps, (net.beta1, net.beta2))


def make_lr_schedule(algo: ReplayAlgoConfig, per_update: float = 1.0) -> LrSchedule | None:
    """Return the schedule of an optimiser that takes ``per_update`` steps per critic update; None: constant."""
    if algo.lr_schedule == "constant":
        return None
    return LrSchedule(algo.lr_schedule, algo.lr_updates * per_update, algo.lr_final)
