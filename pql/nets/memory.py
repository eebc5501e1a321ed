"""Recurrent layers, and the memories of off-policy actor-critics, which run over sequences before an update.

The state of a recurrent layer is one tensor [N, C], the *carry*: hidden and cell state concatenated (GRU: the hidden
state), zeros at the beginning of an episode. A memory takes the place of a network's encoder. Its output is an
observation group of its own, computed over a sequence; the network then reads the sequence's rows like others.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from pql.nets.mlp import NetInput
from pql.types import Obs

RECALLED = {"policy": "policy's memory", "critic": "critics' memory"}
"""Observation groups of the memories' outputs, by network; no simulator has groups of these names."""


class Lstm(nn.Module):
    """LSTM over observations [T, N, D], reset at the beginning of each episode.

    Attributes:
        carry_size: C, 2 H.
    """

    states: ClassVar[int] = 2  # in a carry: hidden and cell state

    def __init__(self, size_in: int, hidden: int):
        super().__init__()
        self.hidden, self.carry_size = hidden, self.states * hidden
        self.cell: nn.RNNCellBase = (nn.LSTMCell if self.states == 2 else nn.GRUCell)(size_in, hidden)

    def step(self, x: Tensor, carry: Tensor) -> Tensor:
        """Advance ``carry`` [N, 2 H] by one input ``x`` [N, D]; the first half of the new carry is the output."""
        hidden, cell = carry.chunk(2, -1)
        return torch.cat(self.cell(x, (hidden, cell)), -1).float()

    def unroll(self, x: Tensor, carry: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Run over the rows of a rollout.

        Args:
            x: [T, N, D].
            carry: [N, 2 H] before row 0.
            first: [T, N] bool; row t + 1 begins an episode (as ``Step.first``).
        Returns:
            The carry after each row, before the reset, [T, N, 2 H]; the carry at the start of row T, [N, 2 H].
        """
        after, keep = [], (~first).unsqueeze(-1).to(carry.dtype)
        for t in range(x.shape[0]):
            after.append(self.step(x[t], carry))
            carry = after[-1] * keep[t]
        return torch.stack(after), carry


class Gru(Lstm):
    """GRU with the interface of :class:`Lstm`; its carry is the hidden state, [N, H]."""

    states = 1

    def step(self, x: Tensor, carry: Tensor) -> Tensor:
        """Advance ``carry`` [N, H] by one input ``x`` [N, D]."""
        return self.cell(x, carry).float()


CELLS: dict[str, type[Lstm]] = {"lstm": Lstm, "gru": Gru}


class PolicyMemory(nn.Module):
    """Memory of a policy: observations -> (encoder ->) recurrent layer -> the input [..., H] of its first layer.

    Args:
        source: what the layer reads.
        kind: name in ``CELLS``.
        size: units H.

    Attributes:
        groups: names of the observation groups that it reads.
    """

    def __init__(self, source: NetInput, kind: str, size: int):
        super().__init__()
        self.groups: tuple[str, ...] = getattr(source.encoder, "groups", (source.group,))
        self.encoder, self.cell = source.encoder, CELLS[kind](source.size, size)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Recurrent state of one environment: name -> shape."""
        return {"carry": (self.cell.carry_size,)}

    def seen(self, obs: Obs) -> Tensor:
        """Features of an observation, [..., D]."""
        return obs[self.groups[0]] if self.encoder is None else self.encoder(obs)

    def forward(self, obs: Obs) -> Tensor:
        """Return the output computed before, [..., H]."""
        return obs[RECALLED["policy"]]

    def step(self, obs: Obs, carry: Tensor) -> tuple[Obs, Tensor]:
        """One step: observations [N, ...] and the carry before it [N, C] -> observations with the output, and the carry
        after it."""
        carry = self.cell.step(self.seen(obs), carry)
        return {**obs, RECALLED["policy"]: carry[..., : self.cell.hidden]}, carry

    def recall(self, obs: Obs, action: Tensor, first: Tensor, carry: Tensor, burn_in: int) -> Tensor:
        """Return the outputs in the rows from ``burn_in`` on, [T - burn_in, B, H].

        Args:
            obs: [T, B, ...].
            action: [T, B, A].
            first: [T, B] bool; row t + 1 begins an episode.
            carry: [B, C] before row 0.
            burn_in: rows that only refresh the carry, without gradients.
        """
        lead, obs = cut(obs, burn_in)
        if burn_in:
            with torch.no_grad():
                carry = self.cell.unroll(self.inputs(lead, action[:burn_in]), carry, first[:burn_in])[1]
        action, first = action[burn_in:], first[burn_in:]
        after, _ = self.cell.unroll(self.inputs(obs, action), carry, first)
        return self.shown(after, carry, first)[..., : self.cell.hidden]

    def inputs(self, obs: Obs, action: Tensor) -> Tensor:
        """Return the layer's input, [T, B, D], at observations [T, B, ...] and actions [T, B, A]."""
        return self.seen(obs)

    def shown(self, after: Tensor, start: Tensor, first: Tensor) -> Tensor:
        """Return the carries that rows show, [T, B, C]: those ``after`` each. ``start``: before row 0, [B, C]."""
        return after


class CriticMemory(PolicyMemory):
    """Memory of critics: a recurrent layer over the rows (observation, action) before the current one.

    The critics' input are the current observation's features and the layer's output, [..., D + H].
    """

    def __init__(self, source: NetInput, kind: str, size: int, action_size: int):
        super().__init__(source, kind, size)
        self.cell = CELLS[kind](source.size + action_size, size)

    def forward(self, obs: Obs) -> Tensor:
        """Return features and the output computed before, [..., D + H]."""
        return torch.cat((self.seen(obs), obs[RECALLED["critic"]]), -1)

    def recall(self, obs: Obs, action: Tensor, first: Tensor, carry: Tensor, burn_in: int) -> Tensor:
        """As a policy's, from a carry of zeros, because collectors have no critics: [T - burn_in, B, H]."""
        zeros = carry.new_zeros(len(carry), self.cell.carry_size)
        return super().recall(obs, action, first, zeros, burn_in)

    def inputs(self, obs: Obs, action: Tensor) -> Tensor:
        return torch.cat((self.seen(obs), action), -1)

    def shown(self, after: Tensor, start: Tensor, first: Tensor) -> Tensor:
        return torch.cat((start.unsqueeze(0), after[:-1] * ~first[:-1].unsqueeze(-1)))


def cut(obs: Obs, rows: int) -> tuple[Obs, Obs]:
    """Split every group [T, ...] into its first ``rows`` rows and the rest."""
    return {k: v[:rows] for k, v in obs.items()}, {k: v[rows:] for k, v in obs.items()}
