"""DDPG with n-step returns, TD3 and their distributional forms, as two update functions.

PQL is DDPG under the ``Concurrent`` schedule; TD3 (smoothing, twin critics, delay) and C51 are settings.
Sources: Lillicrap et al. 2016 (DDPG), Fujimoto et al. 2018 (TD3), Bellemare et al. 2017 (C51), Li et al. 2023 (PQL).
"""

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.off_policy import OffPolicy, Tensors, Trainer, make_adam, make_atoms, make_deterministic_policy
from pql.collect.actors import Noise
from pql.config import Config, DdpgConfig
from pql.config.algorithms import ActorCriticConfig
from pql.config.families import own
from pql.contract.env import EnvSpec
from pql.engine.optim import AdamW, Clock, follow, polyak
from pql.engine.worker import State
from pql.errors import ConfigError
from pql.nets.distributions import hl_gauss, lower_mean, project
from pql.nets.encoders import Outputs, squashes
from pql.nets.mlp import Critic, DeterministicPolicy, Flat
from pql.types import Batch, Metrics, Obs, ObsBatch


@dataclass
class CriticState(State):
    """State of the V-learner. ``atoms`` [Z] makes the critic categorical."""

    critic: Flat
    target: Flat
    optimizer: AdamW
    tau: float
    smoothing: float = 0.0  # standard deviation of the target action's noise
    smoothing_clip: float = 0.0
    atoms: Tensor | None = None
    target_every: int = 1  # updates between target updates
    clock: Clock | None = None  # None: the target moves at every update
    reduce: str = "min"  # the ensemble's target: min, mean, own
    subset: int | None = None  # critics drawn for each target; None: all
    hl_sigma: float | None = None  # of HL-Gauss, in distances between atoms; None: C51


@dataclass
class PolicyState(State):
    """State of the P-learner. ``target`` is None if critic targets use the policy itself (PQL)."""

    policy: Flat
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


def critic_step(state: CriticState, batch: Batch, next_action: Tensor, bonus: Tensor | None, gen: Generator) -> Metrics:
    """Regress all critics on a shared target, or each on its own, then update the target network if due.

    Args:
        next_action: [B, A] at ``batch.next_obs``.
        bonus: [B], added to the next state's value (SAC's entropy term), or None.
    """
    share = loss_share(batch.mask, batch.weight)
    with torch.no_grad():
        ahead = state.target.module(batch.next_obs, next_action)  # [E, B] or [E, B, Z]
        if state.subset is not None:
            drawn = torch.rand(len(ahead), generator=gen, device=ahead.device).argsort()[: state.subset]
            ahead = ahead.index_select(0, drawn)
    loss_of = scalar_loss if state.atoms is None else categorical_loss
    loss, q = loss_of(state, batch, ahead, bonus)  # [E, B], [B]
    total = (loss * share).sum()
    state.optimizer.zero_grad()
    total.backward()
    norm = state.optimizer.step(mask=batch.mask)
    if state.clock is None:
        polyak(state.target, state.critic, state.tau)
    else:
        follow(state.target, state.critic, state.clock, state.target_every, state.tau)
    return {"loss/critic": total.detach(), "value/q": (q * share).sum(), "grad_norm/critic": norm}


def scalar_loss(state: CriticState, batch: Batch, ahead: Tensor, bonus: Tensor | None) -> tuple[Tensor, Tensor]:
    """Squared error against r + discount * (reduce_e Q'_e(s', a') + bonus). Returns losses [E, B] and values [B].

    Args:
        ahead: [E', B], Q'(s', a') of the target critics.
    """
    with torch.no_grad():
        target = bootstrapped(batch, reduced(ahead, state.reduce), bonus)
    q = state.critic.module(batch.obs, batch.action)  # [E, B]
    return (q - target).square(), q.detach()[0]


def categorical_loss(state: CriticState, batch: Batch, ahead: Tensor, bonus: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cross-entropy against the target's distribution: projected (C51), or HL-Gauss around its mean.

    Returns losses [E, B] and values [B].

    Args:
        ahead: [E', B, Z], logits of the target critics at (s', a').
    """
    atoms = state.atoms
    assert atoms is not None
    with torch.no_grad():
        probs = ahead.softmax(-1)
        if state.hl_sigma is not None:
            target = hl_gauss(bootstrapped(batch, reduced(probs @ atoms, state.reduce), bonus), atoms, state.hl_sigma)
        else:
            target = projected(batch, chosen(probs, atoms, state.reduce), atoms, bonus)
    log_probs = state.critic.module(batch.obs, batch.action).log_softmax(-1)  # [E, B, Z]
    return -(target * log_probs).sum(-1), log_probs.detach()[0].exp() @ atoms


def bootstrapped(batch: Batch, value: Tensor, bonus: Tensor | None) -> Tensor:
    """Return r + discount * (value + bonus), in the shape of ``value``: [B], or [E, B] for targets of each critic."""
    return torch.addcmul(batch.reward, batch.discount, value if bonus is None else value + bonus)


def reduced(value: Tensor, reduce: str) -> Tensor:
    """Return an ensemble's values [E, B] as the target's: [B], or [E, B] where each critic has its own."""
    if reduce == "own":
        return value
    return value.amin(0) if reduce == "min" else value.mean(0)


def chosen(probs: Tensor, atoms: Tensor, reduce: str) -> Tensor:
    """Return an ensemble's distributions [E, B, Z] as the target's: [B, Z], or [E, B, Z] where each has its own."""
    if reduce == "own":
        return probs
    return lower_mean(probs, atoms) if reduce == "min" else probs.mean(0)


def projected(batch: Batch, probs: Tensor, atoms: Tensor, bonus: Tensor | None) -> Tensor:
    """Project the distributions ``probs`` [B, Z] or [E, B, Z] at the next state to targets of the same shape."""
    ahead = atoms if bonus is None else atoms + bonus.unsqueeze(-1)
    support = (batch.reward.unsqueeze(-1) + batch.discount.unsqueeze(-1) * ahead).expand(probs.shape)
    return project(support.reshape(-1, len(atoms)), probs.reshape(-1, len(atoms)), atoms).view(probs.shape)


def ddpg_policy_update(state: PolicyState, inputs: PolicyInputs, batch: ObsBatch, gen: Generator) -> Metrics:
    """Take one ascent step on Q(s, pi(s)) and update the target policy, if any. Mutates ``state`` only."""
    policy, share = state.policy.module, loss_share(batch.mask, batch.weight)
    if state.saturation_penalty > 0:
        # A saturated tanh passes no gradient, so the policy could not recover (rlkit and SAC's first code do the same).
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
    return {"loss/policy": loss.detach(), "grad_norm/policy": norm}


def ensemble_value(inputs: PolicyInputs, obs: Obs, action: Tensor, reduce: str) -> Tensor:
    """Return the ensemble's reduced value of (obs, action), [B]."""
    q = inputs.critic(obs, action)
    if inputs.atoms is not None:
        q = q.softmax(-1) @ inputs.atoms
    if reduce == "first":
        return q[0]
    return q.mean(0) if reduce == "mean" else q.amin(0)


def loss_share(mask: Tensor, weight: Tensor) -> Tensor:
    """Return the loss weight of each row, mask * weight / sum(mask), [B]; zeros if no row is valid."""
    return mask * weight / mask.sum().clamp(min=1)


# -- wiring -----------------------------------------------------------------------------------------------------------


def deterministic_policy(config: Config, spec: EnvSpec) -> nn.Module:
    """Create a tanh policy."""
    policy, net = (
        make_deterministic_policy(config, spec, DeterministicPolicy, probe_deterministic),
        own(config, DdpgConfig).policy,
    )
    if net.net is not None and net.saturation_penalty > 0 and not squashes(policy, spec):
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


def value_state(config: Config, critic: Critic, device: torch.device) -> CriticState:
    """Create critics, target and optimiser of an off-policy actor-critic algorithm."""
    algo = own(config, ActorCriticConfig)
    net, flat = algo.critic, Flat(critic, trained=True)
    return CriticState(
        critic=flat,
        target=Flat(copy.deepcopy(critic)),
        optimizer=make_adam(config, flat, net),
        tau=net.tau,
        atoms=make_atoms(config, device),
        target_every=net.target_every,
        clock=Clock(device) if net.target_every > 1 else None,
        reduce=net.target,
        subset=net.subset,
        hl_sigma=net.sigma if net.atoms is not None and net.loss == "hl_gauss" else None,
    )


def ddpg_value_trainer(config: Config, critic: Critic, policy: nn.Module, device: torch.device) -> Trainer:
    """Create the V-learner's state and update."""
    algo, state = own(config, DdpgConfig), value_state(config, critic, device)
    state.smoothing, state.smoothing_clip = algo.smoothing, algo.smoothing_clip
    source = "target_policy" if algo.policy.target else "policy"
    pulls: Tensors = {source: [Flat(policy).data]}
    owns: Tensors = {"critic": [state.critic.data]}
    return Trainer(state, ddpg_value_update, ValueInputs(policy), pulls, owns)


def ddpg_policy_trainer(config: Config, policy: nn.Module, critic: Critic, size: int, device: torch.device) -> Trainer:
    """Create the P-learner's state and update."""
    algo, flat = own(config, DdpgConfig), Flat(policy, trained=True)
    net, optimizer = algo.policy, make_adam(config, flat, algo.policy, algo.p_per_v)
    pulls: Tensors = {"critic": [Flat(critic).data]}
    owns: Tensors = {"policy": [flat.data]}
    target = Flat(copy.deepcopy(policy)) if net.target else None
    if target is not None:
        owns["target_policy"] = [target.data]
    state = PolicyState(flat, target, optimizer, net.tau, net.reduce, net.saturation_penalty)
    return Trainer(state, ddpg_policy_update, PolicyInputs(critic, make_atoms(config, device)), pulls, owns)


FAMILY = OffPolicy(
    DdpgConfig, deterministic_policy, deterministic_action, ddpg_value_trainer, ddpg_policy_trainer
).family()
