"""On-policy networks: a stochastic policy and a state value, each an MLP with an optional LSTM before it.

The state of a recurrent network is one tensor [N, 2 H], the *carry*: hidden and cell state concatenated; zeros at the
beginning of an episode. A feedforward network has a carry of size 0. P is the number of distribution parameters, F the
size of the features. This file contains no losses.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pql.contract.env import ObsSpec
from pql.nets.distributions import ActionDist, DiagGaussian
from pql.nets.encoders import Encoder
from pql.nets.layers import bfloat16
from pql.nets.memory import Lstm, cut
from pql.nets.mlp import Layers, NetInput, Reads, groups_read, mlp
from pql.types import Obs


class Body(Reads):
    """Feature network: observations -> (encoder ->) (LSTM ->) MLP with an activation after every layer, or residual
    blocks.

    Args:
        layers: of the MLP or the blocks; none: the features are those of the LSTM or the encoder.
        lstm: units H; None: feedforward.

    Attributes:
        size: number of features F.
        carry_size: 2 H, or 0 for a feedforward network.
    """

    def __init__(self, source: NetInput, layers: Layers, lstm: int | None = None):
        super().__init__(source)
        self.size, self.carry_size = [lstm or source.size, *layers.hidden][-1], 2 * (lstm or 0)
        self.memory = Lstm(source.size, lstm) if lstm else None
        self.trunk = nn.Sequential(*list(mlp(lstm or source.size, layers, 1))[:-1])
        plain = self.encoder.plain_layers() if isinstance(self.encoder, Encoder) else ()
        for layer in (*plain, *self.trunk.modules()):
            if isinstance(layer, nn.Conv2d | nn.Linear):
                orthogonal(layer, math.sqrt(2))

    def forward(self, obs: Obs) -> Tensor:
        """Feedforward: [..., D] -> features [..., F]."""
        assert self.memory is None
        return self.trunk(self.features(obs))

    def step(self, obs: Obs, carry: Tensor) -> tuple[Tensor, Tensor]:
        """Recurrent, one step: [N, D] and the carry before it [N, 2 H] -> features [N, F] and the carry after it."""
        assert self.memory is not None
        carry = self.memory.step(self.features(obs), carry)
        return self.trunk(carry[..., : self.memory.hidden]), carry

    def unroll(self, obs: Obs, carry: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Recurrent: [T, N, D] -> features [T, N, F], carries after each row [T, N, 2 H], carry for row T [N, 2 H]."""
        assert self.memory is not None
        after, carry = self.memory.unroll(self.features(obs), carry, first)
        return self.trunk(after[..., : self.memory.hidden]), after, carry


class OwnBody(nn.Module):
    """Features from a user's feedforward network with inputs [B, ...]: leading axes such as [T, N] are flattened."""

    carry_size = 0

    def __init__(self, network: nn.Module, obs: Mapping[str, ObsSpec]):
        super().__init__()
        self.network, self.groups = network, groups_read(network)
        self.axes = {k: len(obs[k].shape) for k in self.groups}
        with torch.no_grad():
            self.size = network({k: torch.zeros(2, *s.shape, dtype=s.dtype) for k, s in obs.items()}).shape[-1]

    def forward(self, obs: Obs) -> Tensor:
        """Observation groups [..., D], [..., C, H, W], ... -> features [..., F]."""
        seen = {k: obs[k] for k in self.groups}
        k, x = next(iter(seen.items()))
        lead = x.shape[: x.dim() - self.axes[k]]
        out = self.network({k: v.reshape(-1, *v.shape[v.dim() - self.axes[k] :]) for k, v in seen.items()})
        return out.view(*lead, self.size)


def orthogonal(layer: nn.Conv2d | nn.Linear, gain: float) -> None:
    """Initialise with orthogonal weights and zero bias, as PPO needs (Engstrom et al. 2020)."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


class StochasticPolicy(nn.Module):
    """Policy: obs["policy"] -> parameters of an action distribution, [..., P] float32.

    Args:
        init_std: initial standard deviation of a Gaussian, a parameter that does not depend on the observation; None:
            its logarithm is an output of the last layer, initially about 0.
        amp: compute matrix products in bfloat16 (parameters stay float32). It applies to acting and to learning, so
            that the learner recomputes the collector's distributions.
    """

    log_std: nn.Parameter | None

    def __init__(self, body: Body | OwnBody, dist: ActionDist, init_std: float | None = 1.0, amp: bool = False):
        super().__init__()
        self.body, self.dist, self.amp, self.groups = body, dist, amp, body.groups
        self.head = nn.Linear(body.size, dist.params_size if init_std is None else dist.size)
        orthogonal(self.head, 0.01)
        own_std = isinstance(dist, DiagGaussian) and init_std is not None
        self.log_std = nn.Parameter(torch.full((dist.size,), math.log(init_std or 1.0))) if own_std else None

    def params(self, features: Tensor) -> Tensor:
        """Features [..., F] -> distribution parameters [..., P]."""
        out = self.head(features)
        out = out.float() if out.dtype == torch.bfloat16 else out
        return out if self.log_std is None else torch.cat((out, self.log_std.expand_as(out)), -1)

    def forward(self, obs: Obs) -> Tensor:
        """Feedforward: [..., D] -> distribution parameters [..., P]."""
        with bfloat16(self.amp, next(iter(obs.values()))):
            return self.params(self.body(obs))

    def step(self, obs: Obs, carry: Tensor) -> tuple[Tensor, Tensor]:
        """Recurrent, one step: [N, D] and ``carry`` [N, 2 H] -> parameters [N, P] and the next carry [N, 2 H]."""
        assert isinstance(self.body, Body)
        with bfloat16(self.amp, next(iter(obs.values()))):
            features, carry = self.body.step(obs, carry)
            return self.params(features), carry

    def unroll(self, obs: Obs, carry: Tensor, first: Tensor) -> Tensor:
        """Recurrent, a rollout: [T, N, D], carry before row 0 [N, 2 H], ``first`` [T, N] -> parameters [T, N, P]."""
        assert isinstance(self.body, Body)
        with bfloat16(self.amp, next(iter(obs.values()))):
            return self.params(self.body.unroll(obs, carry, first)[0])

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Recurrent state of one environment: name -> shape; empty if feedforward. Zeros at an episode's beginning."""
        return {"carry": (self.body.carry_size,)} if self.body.carry_size else {}

    def mean_action(self, obs: Obs, state: Obs | None = None) -> Any:
        """Return the mode of the distribution, [N, A] in [-1, 1] or [N] int64; if recurrent, (action, next state)."""
        if not self.body.carry_size:
            return self.dist.mode(self(obs))
        assert state is not None
        params, carry = self.step(obs, state["carry"])
        return self.dist.mode(params), {"carry": carry}


class StateValue(nn.Module):
    """State value: features [..., F] -> [...] float32. ``body`` is None if it shares the policy's body."""

    def __init__(self, body: Body | OwnBody | None, size: int):
        super().__init__()
        self.body = body
        self.head = nn.Linear(size, 1)
        orthogonal(self.head, 1.0)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features).squeeze(-1).float()


class ActorCritic(nn.Module):
    """A policy and a state value, with separate bodies or a shared one. The policy's parameters come first."""

    def __init__(self, policy: StochasticPolicy, value: StateValue):
        super().__init__()
        self.policy, self.value = policy, value

    @property
    def value_body(self) -> Body | OwnBody:
        """Body that the value reads: its own, or the policy's."""
        return self.value.body or self.policy.body

    def forward(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Feedforward: [..., D] -> parameters [..., P], value [...]."""
        with bfloat16(self.policy.amp, next(iter(obs.values()))):
            features = self.policy.body(obs)
            own = self.value.body
            return self.policy.params(features), self.value(features if own is None else own(obs))

    def values(self, obs: Obs) -> Tensor:
        """Feedforward: [..., D] -> value [...]."""
        with bfloat16(self.policy.amp, next(iter(obs.values()))):
            return self.value(self.value_body(obs))

    def unroll(self, obs: Obs, carry: Tensor, value_carry: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Recurrent: rows [T, N, D] -> parameters [T, N, P], value [T, N].

        Args:
            carry: of the policy before row 0, [N, 2 H].
            value_carry: of the value before row 0, [N, 2 H]; not read if the body is shared.
            first: [T, N] bool; row t + 1 begins an episode.
        """
        with bfloat16(self.policy.amp, next(iter(obs.values()))):
            body, own = self.policy.body, self.value.body
            assert isinstance(body, Body)
            features = body.unroll(obs, carry, first)[0]
            seen = own.unroll(obs, value_carry, first)[0] if isinstance(own, Body) else features
            return self.policy.params(features), self.value(seen)

    def unroll_values(self, obs: Obs, carry: Tensor, first: Tensor, final_row: Tensor) -> tuple[Tensor, Tensor]:
        """Recurrent: values of a segment, bootstrap values included.

        Args:
            obs: [T + 1 + K, N, D]: T rows, row T (the next observation), K final observations.
            carry: [N, 2 H] of the value, before row 0.
            first: [T, N] bool; row t + 1 begins an episode.
            final_row: [K, N] int64; row of the step that ended in each final observation.
        Returns:
            values [T + 1 + K, N]; the carry for row T [N, 2 H].
        """
        body, (now, rest) = self.value_body, cut(obs, first.shape[0])
        assert isinstance(body, Body)
        with bfloat16(self.policy.amp, next(iter(obs.values()))):
            features, after, carry = body.unroll(now, carry, first)
            return self.value(torch.cat((features, tail(body, rest, after, carry, final_row)))), carry

    def evaluate(self, obs: Obs, carry: Tensor, first: Tensor, final_row: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate a segment in one pass: parameters [T, N, P] and values [T + 1 + K, N].

        Only the T rows have gradients. A recurrent network must share its body.

        Args:
            obs, first, final_row: as in :meth:`unroll_values`.
            carry: [N, 2 H] before row 0; [N, 0] if feedforward.
        """
        body, (now, rest) = self.policy.body, cut(obs, first.shape[0])
        if not isinstance(body, Body) or body.memory is None:
            params, value = self(now)
            with torch.no_grad():
                later = self.values(rest)
            return params, torch.cat((value, later))
        assert self.value.body is None
        with bfloat16(self.policy.amp, next(iter(obs.values()))):
            features, after, carry = body.unroll(now, carry, first)
            with torch.no_grad():
                beyond = tail(body, rest, after, carry, final_row)
            return self.policy.params(features), self.value(torch.cat((features, beyond)))


def tail(body: Body, obs: Obs, after: Tensor, carry: Tensor, final_row: Tensor) -> Tensor:
    """Recurrent features of the bootstrap observations of a segment, [1 + K, N, F].

    Row T continues from ``carry``; a final observation from the carry after its row, before the reset.

    Args:
        obs: [1 + K, N, D]: row T, then K final observations.
        after: [T, N, 2 H]; carry after each row.
        carry: [N, 2 H]; for row T.
        final_row: [K, N] int64; row of each final observation.
    """
    index = final_row.unsqueeze(-1).expand(-1, -1, body.carry_size)
    left = torch.cat((carry.unsqueeze(0), after.gather(0, index)))  # [1 + K, N, 2 H]
    features = body.step({k: v.flatten(0, 1) for k, v in obs.items()}, left.flatten(0, 1))[0]
    return features.view(*left.shape[:2], -1)
