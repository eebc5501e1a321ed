"""DDPG with n-step returns, TD3 and their distributional forms, as two update functions.

PQL is DDPG under the ``Concurrent`` schedule; TD3 (smoothing, twin critics, delay) and C51 are settings.
Sources: Lillicrap et al. 2016 (DDPG), Fujimoto et al. 2018 (TD3), Bellemare et al. 2017 (C51), Li et al. 2023 (PQL).
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.builders import replay_learner
from pql.algos.critics import CriticState, critic_step, loss_share, make_critic_state
from pql.algos.off_policy import OffPolicy, PolicyDraw, ValueDraw
from pql.algos.policies import PolicyState, ensemble_value, make_follower, make_policy_network, make_policy_state
from pql.algos.registry import Setup
from pql.collect.actors import Noise
from pql.config import Config, DdpgConfig
from pql.contract.env import EnvSpec
from pql.engine.flat import Flat
from pql.engine.optim import polyak
from pql.engine.worker import Learner
from pql.errors import ConfigError
from pql.nets.encoders import Outputs, read_specs, squashes
from pql.nets.layers import batch_statistics
from pql.nets.mlp import Critic, DeterministicPolicy
from pql.types import Batch, Metrics, Obs, ObsBatch


@dataclass(kw_only=True)
class DdpgPolicyState(PolicyState):
    """State of DDPG's P-learner. ``target`` is None if critic targets use the policy itself (PQL)."""

    target: Flat | None


def ddpg_value_update(state: CriticState, batch: Batch, settings: DdpgConfig, gen: Generator) -> Metrics:
    """Take one critic step towards r + discount * Q'(s', clip(pi(s') + clipped noise)). Mutates ``state`` only."""
    with torch.no_grad():
        action = state.policy(batch.next_obs)  # [B, A]
        if settings.smoothing > 0:
            noise = torch.randn(action.shape, generator=gen, device=action.device) * settings.smoothing
            action = (action + noise.clamp_(-settings.smoothing_clip, settings.smoothing_clip)).clamp_(-1, 1)
    return critic_step(state, batch, settings, action, None, gen)


def ddpg_policy_update(state: DdpgPolicyState, batch: ObsBatch, settings: DdpgConfig, gen: Generator) -> Metrics:
    """Take one ascent step on Q(s, pi(s)) and update the target policy, if any. Mutates ``state`` only."""
    net, policy, share = settings.policy, state.policy.module, loss_share(batch.mask, batch.weight)
    with batch_statistics(policy, batch.mask, tracked=True):
        if net.saturation_penalty > 0:
            # A saturated tanh passes no gradient, so the policy could not recover (rlkit and SAC's first code do the
            # same).
            before = policy.before_tanh(batch.obs)  # type: ignore[operator]
            action, penalty = torch.tanh(before), before.square().mean(-1) * net.saturation_penalty
        else:
            action, penalty = policy(batch.obs), 0.0
    q = ensemble_value(state, batch.obs, action, net.reduce)
    loss = ((penalty - q) * share).sum()

    norm = state.optimizer.minimize(loss, mask=batch.mask)
    if state.target is not None:
        polyak(state.target, state.policy, net.tau)
    state.update_average(net.average)
    return {"loss/policy": loss.detach(), "grad_norm/policy": norm}


# -- wiring -----------------------------------------------------------------------------------------------------------


def deterministic_policy(config: Config[DdpgConfig], spec: EnvSpec) -> nn.Module:
    """Create a tanh policy."""
    policy, net = (
        make_policy_network(config, spec, DeterministicPolicy, probe_deterministic),
        config.algo.policy,
    )
    if net.net is not None and net.saturation_penalty > 0 and not squashes(policy, read_specs(config, spec)):
        allowed = f"0, or a method before_tanh(obs) of algo.policy.net={net.net} whose tanh is forward(obs)"
        raise ConfigError("algo.policy.saturation_penalty", net.saturation_penalty, allowed)
    return policy


def probe_deterministic(network: nn.Module, obs: Obs, action: Tensor) -> Outputs:
    """Return a deterministic policy's outputs for two rows, [2, A] each."""
    outputs = {"forward(obs)": network(obs), "mean_action(obs)": cast(Any, network).mean_action(obs)}
    return [(call, output, list(action.shape)) for call, output in outputs.items()]


def deterministic_action(policy: nn.Module, obs: Obs, noise: Noise) -> Tensor:
    """Return the policy's action [N, A]."""
    return policy(obs)


def ddpg_value_learner(setup: Setup[DdpgConfig], critic: Critic, policy: nn.Module, draw: ValueDraw) -> Learner:
    """Create the V-learner."""
    state = make_critic_state(CriticState, setup.config, critic, policy)
    source = "target_policy" if setup.config.algo.policy.target else "policy"
    return replay_learner(
        setup, state, ddpg_value_update, draw, {source: Flat(policy).tensors()}, {"critic": state.critic.tensors()}
    )


def ddpg_policy_learner(setup: Setup[DdpgConfig], policy: nn.Module, critic: Critic, draw: PolicyDraw) -> Learner:
    """Create the P-learner."""
    target = make_follower(policy, critic) if setup.config.algo.policy.target else None
    state = make_policy_state(DdpgPolicyState, setup.config, policy, critic, target=target)
    publishes = {"policy": state.policy.tensors()}
    if target is not None:
        publishes["target_policy"] = target.tensors()
    return replay_learner(setup, state, ddpg_policy_update, draw, {"critic": Flat(critic).tensors()}, publishes)


DDPG = OffPolicy(DdpgConfig, deterministic_policy, deterministic_action, ddpg_value_learner, ddpg_policy_learner)
"""Algorithms that change a part of it, or have more settings, are made by ``dataclasses.replace``."""

FAMILY = DDPG.family()
