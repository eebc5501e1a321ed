"""Action values: obs -> Q(s, a) of every discrete action, plain or dueling, scalar or categorical, with noisy layers;
or recurrent.

Sources: Mnih et al. 2015 (DQN), Wang et al. 2016 (dueling), Bellemare et al. 2017 (C51), Fortunato et al. 2018 (noisy
networks). This file knows nothing of losses or exploration schedules.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from pql.nets.actor_critic import Lstm
from pql.nets.mlp import Reads, mlp
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
        self,
        group: str,
        obs_size: int,
        actions: int,
        hidden: Sequence[int],
        activation: str,
        layer_norm: bool,
        encoder: nn.Module | None = None,
        atoms: Tensor | None = None,
        dueling: bool = False,
        noisy: float | None = None,
        shared_grad: float = 1.0,
    ):
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
        return self.head(self.features(obs))

    def head(self, x: Tensor) -> Tensor:
        """Features [..., F] -> as ``forward``."""
        x = self.trunk(x)
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

    def mean_action(self, obs: Obs, state: Obs | None = None) -> Any:
        """The greedy action, [B] int64; with noisy layers that nobody has drawn for, that of the means."""
        return self.values(obs).argmax(-1)


class RecurrentQNetwork(QNetwork):
    """Observations -> (encoder ->) LSTM -> values of all actions, [..., n], by the layers of a :class:`QNetwork`.

    Its memory is a carry as in ``pql.nets.actor_critic``: hidden and cell state side by side, zeros where an episode
    begins.

    Args:
        obs_size: of the observation group, or of the encoder's features.
        lstm: units H.

    Attributes:
        carry_size: 2 H.
    """

    def __init__(
        self,
        group: str,
        obs_size: int,
        lstm: int,
        actions: int,
        hidden: Sequence[int],
        activation: str,
        layer_norm: bool,
        encoder: nn.Module | None = None,
        dueling: bool = False,
        shared_grad: float = 1.0,
    ):
        super().__init__(
            group, lstm, actions, hidden, activation, layer_norm, encoder, dueling=dueling, shared_grad=shared_grad
        )
        self.memory, self.carry_size = Lstm(obs_size, lstm), 2 * lstm

    def step(self, obs: Obs, carry: Tensor) -> tuple[Tensor, Tensor]:
        """One row: [N, D] and the carry before it -> values [N, n] and the carry after it."""
        carry = self.memory.step(self.features(obs), carry)
        return self.head(carry[..., : self.memory.hidden]), carry

    def unroll(self, obs: Obs, carry: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, B, D] -> values [T, B, n], and the carry after each row, not yet zeroed, [T, B, 2 H].

        Args:
            carry: [B, 2 H] before row 0.
            first: [T, B] bool; row t + 1 begins an episode.
        """
        after, _ = self.memory.unroll(self.features(obs), carry, first)
        return self.head(after[..., : self.memory.hidden]), after

    def remember(self, obs: Obs, carry: Tensor, first: Tensor) -> Tensor:
        """The carry for row T, [B, 2 H]; as ``unroll``, without values."""
        return self.memory.unroll(self.features(obs), carry, first)[1]

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of one environment's memory."""
        return {"carry": (self.carry_size,)}

    def mean_action(self, obs: Obs, state: Obs | None = None) -> Any:
        """The greedy action, [N] int64, and the state after it."""
        assert state is not None
        values, carry = self.step(obs, state["carry"])
        return values.argmax(-1), {"carry": carry}
