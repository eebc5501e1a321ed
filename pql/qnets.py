"""Action values: obs -> Q(s, a) of every discrete action, plain or dueling, scalar or categorical, with noisy layers.

Sources: Mnih et al. 2015 (DQN), Wang et al. 2016 (dueling), Bellemare et al. 2017 (C51), Fortunato et al. 2018 (noisy
networks). This file knows nothing of losses or exploration schedules.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from pql.nets import Reads, mlp
from pql.types import Obs


class NoisyLinear(nn.Module):
    """y = (W + S * e_out e_in^T) x + b + s * e_out, with factorised noise e = sign(z) sqrt|z|, z ~ N(0, 1).

    The noise lives in buffers at fixed addresses, zeros until somebody draws it (see :func:`redraw_noise`): the layer
    then uses its means. It is part of no checkpoint. (Fortunato et al. 2018, Eq. 10, 11 and section 3.2.)

    Args:
        sigma: sigma_0; every noise weight begins as sigma_0 / sqrt(size_in).
    """

    noise_in: Tensor
    noise_out: Tensor

    def __init__(self, size_in: int, size_out: int, sigma: float = 0.5):
        super().__init__()
        bound = size_in**-0.5
        self.weight = nn.Parameter(torch.empty(size_out, size_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(size_out).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((size_out, size_in), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((size_out,), sigma * bound))
        self.register_buffer("noise_in", torch.zeros(size_in), persistent=False)
        self.register_buffer("noise_out", torch.zeros(size_out), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.addcmul(self.weight, self.weight_sigma, torch.outer(self.noise_out, self.noise_in))
        return F.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, self.noise_out))


@torch.no_grad()
def redraw_noise(net: nn.Module, gen: Generator) -> None:
    """Draw new noise for every noisy layer of ``net``, in place; nothing where it has none."""
    buffers = [b for m in net.modules() if isinstance(m, NoisyLinear) for b in (m.noise_in, m.noise_out)]
    if not buffers:
        return
    sizes = [b.numel() for b in buffers]
    z = torch.randn(sum(sizes), generator=gen, device=buffers[0].device)
    torch._foreach_copy_(buffers, (z.sign() * z.abs().sqrt()).split(sizes))


class QNetwork(Reads):
    """obs -> values of all n actions, [B, n], or logits of their distributions, [B, n, Z], where ``atoms`` is given.

    Dueling: Q = V + A - mean_a A, for categorical values by atom; the streams have the last of ``hidden`` apart and
    share what comes before.

    Args:
        obs_size: of the observation group, or of the encoder's features.
        atoms: the categorical support [Z].
        noisy: sigma_0 of noisy layers after the encoder; None: ordinary ones.
        shared_grad: dueling: factor on the gradient that enters what the streams share.
    """

    atoms: Tensor | None

    def __init__(
        self, group: str, obs_size: int, actions: int, hidden: Sequence[int], activation: str, layer_norm: bool,
        encoder: nn.Module | None = None, atoms: Tensor | None = None, dueling: bool = False,
        noisy: float | None = None, shared_grad: float = 1.0,
    ):  # fmt: skip
        super().__init__(group, encoder)
        self.register_buffer("atoms", atoms, persistent=False)
        self.shape = (actions,) if atoms is None else (actions, atoms.shape[0])
        self.shared_grad = shared_grad
        linear: Callable[[int, int], nn.Module] = nn.Linear if noisy is None else partial(NoisyLinear, sigma=noisy)
        build = partial(mlp, activation=activation, layer_norm=layer_norm, linear=linear)
        shared, own = (hidden[:-1], hidden[-1:]) if dueling else ((), hidden)
        size = shared[-1] if shared else obs_size
        self.trunk = nn.Sequential(*list(build(obs_size, shared, 1))[:-1])
        self.advantage = build(size, own, actions * (1 if atoms is None else atoms.shape[0]))
        self.value = build(size, own, 1 if atoms is None else atoms.shape[0]) if dueling else None

    def forward(self, obs: Obs) -> Tensor:
        x = self.trunk(self.features(obs))
        if self.value is not None and self.shared_grad != 1 and x.requires_grad:
            x.register_hook(lambda grad: grad * self.shared_grad)
        out = self.advantage(x).unflatten(-1, self.shape)
        if self.value is None:
            return out
        axis = -len(self.shape)  # of the actions
        return out - out.mean(axis, keepdim=True) + self.value(x).unflatten(-1, (1, *self.shape[1:]))

    def values(self, obs: Obs) -> Tensor:
        """Q(s, a), [B, n]; of distributions, their means."""
        out = self(obs)
        return out if self.atoms is None else out.softmax(-1) @ self.atoms

    def mean_action(self, obs: Obs) -> Tensor:
        """The greedy action, [B] int64; with noisy layers that nobody has drawn for, that of the means."""
        return self.values(obs).argmax(-1)
