"""Q-networks for discrete actions: plain, dueling, categorical, quantile or noisy ones, feedforward or recurrent.

Sources: Mnih et al. 2015 (DQN), Wang et al. 2016 (dueling), Bellemare et al. 2017 (C51), Fortunato et al. 2018 (noisy
networks), Dabney et al. 2018 (IQN). This file contains no losses and no exploration schedules.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from pql.nets.layers import bfloat16
from pql.nets.memory import Lstm
from pql.nets.mlp import Layers, NetInput, NoisyLinear, Reads, mlp
from pql.types import Obs


@torch.no_grad()
def redraw_noise(net: nn.Module, gen: Generator) -> None:
    """Draw new noise for every noisy layer of ``net``, in place. Does nothing without noisy layers."""
    buffers = [b for m in net.modules() if isinstance(m, NoisyLinear) for b in (m.noise_in, m.noise_out)]
    if not buffers:
        return
    sizes = [b.numel() for b in buffers]
    z = torch.randn(sum(sizes), generator=gen, device=buffers[0].device)
    torch._foreach_copy_(buffers, (z.sign() * z.abs().sqrt()).split(sizes))


def precise_end(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Return ``layers`` of ``x`` [..., D]; under autocast the last layer is computed in float32.

    Values of actions differ by much less than their size, which bfloat16 would round to the same number.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return layers(x)
    x = layers[:-1](x)
    with bfloat16(False, x):
        return layers[-1](x.float())


class QNetwork(Reads):
    """Q-network: obs [B, D] -> values of all n actions [B, n], or logits [B, n, Z] if ``atoms`` is given.

    Dueling: Q = V + A - mean_a A (per atom, if categorical). The last layer of ``hidden`` is separate for V and A; the
    layers before it are shared.

    Args:
        atoms: support [Z] of categorical values.
        shared_grad: if dueling, factor on the gradient that enters the shared layers.

    Attributes:
        splits: the last layer of ``hidden`` belongs to the streams without dueling, too.
        size: width of the streams' input.
    """

    atoms: Tensor | None
    splits = False

    def __init__(
        self,
        source: NetInput,
        actions: int,
        layers: Layers,
        atoms: Tensor | None = None,
        dueling: bool = False,
        shared_grad: float = 1.0,
    ):
        super().__init__(source)
        self.register_buffer("atoms", atoms, persistent=False)
        self.shape = (actions,) if atoms is None else (actions, atoms.shape[0])
        self.shared_grad = shared_grad
        hidden = layers.hidden
        shared, own = (hidden[:-1], hidden[-1:]) if dueling or self.splits else ((), hidden)
        self.size = size = shared[-1] if shared else source.size

        def build(size_in: int, hidden: Sequence[int], size_out: int) -> nn.Sequential:
            return mlp(size_in, replace(layers, hidden=hidden), size_out)

        self.trunk = nn.Sequential(*list(build(source.size, shared, 1))[:-1])
        self.advantage = build(size, own, actions * (1 if atoms is None else atoms.shape[0]))
        self.value = build(size, own, 1 if atoms is None else atoms.shape[0]) if dueling else None

    def forward(self, obs: Obs) -> Tensor:
        """Values [B, n], or logits [B, n, Z]."""
        with self.precision(obs):
            return self.head(self.features(obs))

    def head(self, x: Tensor) -> Tensor:
        """Features [..., F] -> values [..., n], or logits [..., n, Z]."""
        return self.streams(self.trunk(x))

    def streams(self, x: Tensor) -> Tensor:
        """Output of the shared layers [..., size] -> values [..., n], or logits [..., n, Z]."""
        if self.value is not None and self.shared_grad != 1 and x.requires_grad:
            x.register_hook(lambda grad: grad * self.shared_grad)
        out = precise_end(self.advantage, x).unflatten(-1, self.shape)
        if self.value is None:
            return out
        axis = -len(self.shape)  # of the actions
        return out - out.mean(axis, keepdim=True) + precise_end(self.value, x).unflatten(-1, (1, *self.shape[1:]))

    def values(self, obs: Obs) -> Tensor:
        """Q(s, a), [B, n]; the means, if categorical."""
        out = self(obs)
        return out if self.atoms is None else out.softmax(-1) @ self.atoms

    def mean_action(self, obs: Obs, state: Obs | None = None) -> Any:
        """Return the greedy action, [B] int64. Noisy layers use their means unless noise was drawn."""
        return self.values(obs).argmax(-1)


class QuantileNetwork(QNetwork):
    """Implicit quantile network (IQN): obs [B, D] -> quantiles of each action's return [B, n, K].

    The output of the shared layers, all of ``hidden`` except the last, is multiplied by relu(W c + b), where c are the
    cosines cos(pi i tau), i = 0 ... cosines - 1, of the quantile tau (Dabney et al. 2018, Eq. 4). Values are means over
    the K fixed quantiles (k + 1/2) / K.

    Args:
        quantiles: (K, number of cosines).
    """

    splits = True

    def __init__(
        self,
        source: NetInput,
        actions: int,
        layers: Layers,
        quantiles: tuple[int, int],
        dueling: bool = False,
        shared_grad: float = 1.0,
    ):
        super().__init__(source, actions, layers, dueling=dueling, shared_grad=shared_grad)
        self.quantiles, self.cosines = quantiles
        self.embedding = nn.Linear(self.cosines, self.size)

    def forward(self, obs: Obs, tau: Tensor | None = None) -> Tensor:
        """Quantiles [B, n, K] at ``tau`` [B, K], in [0, 1]; None: at the fixed ones."""
        with self.precision(obs):
            x = self.trunk(self.features(obs))
            if tau is None:
                tau = (torch.arange(self.quantiles, device=x.device) + 0.5) / self.quantiles  # [K]
            precise = self.embedding.weight.dtype  # with ``amp`` x is bfloat16, too coarse for cosines of 64 pi tau
            frequency = math.pi * torch.arange(self.cosines, device=x.device, dtype=precise)
            waves = torch.cos(tau.to(precise).unsqueeze(-1) * frequency)
            factor = torch.relu(self.embedding(waves))  # [B, K, size] or [K, size]
            return self.streams(x.unsqueeze(-2) * factor).transpose(-1, -2)

    def values(self, obs: Obs) -> Tensor:
        """Q(s, a), [B, n]: means over the fixed quantiles."""
        return self(obs).mean(-1)


class RecurrentQNetwork(QNetwork):
    """Recurrent Q-network: observations -> (encoder ->) LSTM -> the layers of a :class:`QNetwork` -> values [..., n].

    Its state is a carry [N, 2 H] as in ``pql.nets.actor_critic``: hidden and cell state concatenated, zeros at the
    beginning of an episode.

    Args:
        lstm: units H.

    Attributes:
        carry_size: 2 H.
    """

    def __init__(
        self, source: NetInput, lstm: int, actions: int, layers: Layers, dueling: bool = False, shared_grad: float = 1.0
    ):
        super().__init__(replace(source, size=lstm), actions, layers, dueling=dueling, shared_grad=shared_grad)
        self.memory, self.carry_size = Lstm(source.size, lstm), 2 * lstm

    def step(self, obs: Obs, carry: Tensor) -> tuple[Tensor, Tensor]:
        """One step: [N, D] and the carry before it [N, 2 H] -> values [N, n] and the carry after it."""
        with self.precision(obs):
            carry = self.memory.step(self.features(obs), carry)
            return self.head(carry[..., : self.memory.hidden]), carry

    def unroll(self, obs: Obs, carry: Tensor, first: Tensor) -> Tensor:
        """Rows [T, B, D] -> values [T, B, n].

        Args:
            carry: [B, 2 H] before row 0.
            first: [T, B] bool; row t + 1 begins an episode.
        """
        with self.precision(obs):
            after, _ = self.memory.unroll(self.features(obs), carry, first)
            return self.head(after[..., : self.memory.hidden])

    def remember(self, obs: Obs, carry: Tensor, first: Tensor) -> Tensor:
        """Return the carry for row T, [B, 2 H]. Arguments as for :meth:`unroll`."""
        with self.precision(obs):
            return self.memory.unroll(self.features(obs), carry, first)[1]

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Recurrent state of one environment: name -> shape."""
        return {"carry": (self.carry_size,)}

    def mean_action(self, obs: Obs, state: Obs | None = None) -> Any:
        """Return the greedy action, [N] int64, and the next state."""
        assert state is not None
        values, carry = self.step(obs, state["carry"])
        return values.argmax(-1), {"carry": carry}
