"""DDPG with n-step returns, TD3 and their distributional forms, as two update functions.

PQL is DDPG under the ``Concurrent`` schedule; TD3 (smoothing, twin critics, delay) and C51 are settings.
Sources: Lillicrap et al. 2016 (DDPG), Fujimoto et al. 2018 (TD3), Bellemare et al. 2017 (C51), Li et al. 2023 (PQL).
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.critics import CriticState, critic_step, loss_share, make_adam, make_atoms, value_state
from pql.algos.off_policy import AveragedState, OffPolicy, Tensors, Trainer, make_deterministic_policy, make_follower
from pql.collect.actors import Noise
from pql.config import Config, DdpgConfig
from pql.contract.env import EnvSpec
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, polyak
from pql.errors import ConfigError
from pql.nets.encoders import Outputs, read_specs, squashes
from pql.nets.layers import batch_statistics
from pql.nets.mlp import Critic, DeterministicPolicy
from pql.types import Batch, Metrics, Obs, ObsBatch


@dataclass(kw_only=True)
class PolicyState(AveragedState):
    """State of the P-learner. ``target`` is None if critic targets use the policy itself (PQL)."""

    target: Flat | None
    optimizer: AdamW
    tau: float
    reduce: str = "min"  # reduction over the ensemble: min, mean, first
    saturation_penalty: float = 0.0  # coefficient of the mean squared pre-tanh action


@dataclass
class ValueInputs:
    """The V-learner's private copy of the policy, for targets."""

    policy: nn.Module


@dataclass
class PolicyInputs:
    """The P-learner's private copy of the critic."""

    critic: Critic
    atoms: Tensor | None = None


def ddpg_value_update(state: CriticState, inputs: ValueInputs, batch: Batch, gen: Generator) -> Metrics:
    """Take one critic step towards r + discount * Q'(s', clip(pi(s') + clipped noise)). Mutates ``state`` only."""
    with torch.no_grad():
        action = inputs.policy(batch.next_obs)
        if state.smoothing > 0:
            noise = torch.randn(action.shape, generator=gen, device=action.device) * state.smoothing
            action = (action + noise.clamp_(-state.smoothing_clip, state.smoothing_clip)).clamp_(-1, 1)
    return critic_step(state, batch, action, None, gen)


def ddpg_policy_update(state: PolicyState, inputs: PolicyInputs, batch: ObsBatch, gen: Generator) -> Metrics:
    """Take one ascent step on Q(s, pi(s)) and update the target policy, if any. Mutates ``state`` only."""
    policy, share = state.policy.module, loss_share(batch.mask, batch.weight)
    with batch_statistics(policy, batch.mask, tracked=True):
        if state.saturation_penalty > 0:
            # A saturated tanh passes no gradient, so the policy could not recover (rlkit and SAC's first code do the
            # same).
            before = policy.before_tanh(batch.obs)  # type: ignore[operator]
            action, penalty = torch.tanh(before), before.square().mean(-1) * state.saturation_penalty
        else:
            action, penalty = policy(batch.obs), 0.0
    q = ensemble_value(inputs, batch.obs, action, state.reduce)
    loss = ((penalty - q) * share).sum()
    state.optimizer.zero_grad()
    loss.backward()
    norm = state.optimizer.step(mask=batch.mask)
    if state.target is not None:
        polyak(state.target, state.policy, state.tau)
    state.update_average()
    return {"loss/policy": loss.detach(), "grad_norm/policy": norm}


def ensemble_value(inputs: PolicyInputs, obs: Obs, action: Tensor, reduce: str) -> Tensor:
    """Return the ensemble's reduced value of (obs, action), [B]."""
    q = inputs.critic(obs, action)
    if inputs.atoms is not None:
        q = q.softmax(-1) @ inputs.atoms
    if reduce == "first":
        return q[0]
    return q.mean(0) if reduce == "mean" else q.amin(0)


# -- wiring -----------------------------------------------------------------------------------------------------------


def deterministic_policy(config: Config[DdpgConfig], spec: EnvSpec) -> nn.Module:
    """Create a tanh policy."""
    policy, net = (
        make_deterministic_policy(config, spec, DeterministicPolicy, probe_deterministic),
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


def ddpg_value_trainer(config: Config[DdpgConfig], critic: Critic, policy: nn.Module, device: torch.device) -> Trainer:
    """Create the V-learner's state and update."""
    algo, state = config.algo, value_state(CriticState, config, critic, device)
    state.smoothing, state.smoothing_clip = algo.smoothing, algo.smoothing_clip
    source = "target_policy" if algo.policy.target else "policy"
    pulls: Tensors = {source: Flat(policy).tensors()}
    owns: Tensors = {"critic": state.critic.tensors()}
    return Trainer(state, ddpg_value_update, ValueInputs(policy), pulls, owns)


def ddpg_policy_trainer(
    config: Config[DdpgConfig], policy: nn.Module, critic: Critic, size: int, device: torch.device
) -> Trainer:
    """Create the P-learner's state and update."""
    algo, flat = config.algo, Flat(policy, trained=True)
    net, optimizer = algo.policy, make_adam(config, flat, algo.policy, algo.p_per_v)
    pulls: Tensors = {"critic": Flat(critic).tensors()}
    owns: Tensors = {"policy": flat.tensors()}
    target = None
    if net.target:
        target = make_follower(policy, critic)
        owns["target_policy"] = target.tensors()
    state = PolicyState(
        policy=flat,
        target=target,
        optimizer=optimizer,
        tau=net.tau,
        reduce=net.reduce,
        saturation_penalty=net.saturation_penalty,
    )
    return Trainer(state, ddpg_policy_update, PolicyInputs(critic, make_atoms(config, device)), pulls, owns)


FAMILY = OffPolicy(
    DdpgConfig, deterministic_policy, deterministic_action, ddpg_value_trainer, ddpg_policy_trainer
).family()
