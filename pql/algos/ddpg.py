"""DDPG(n), TD3 and their distributional form: two update functions over named state.

PQL is these two under the ``Concurrent`` schedule; TD3 (smoothing, twin critics, delay) and C51 are settings.
Sources: Lillicrap et al. 2016 (DDPG), Fujimoto et al. 2018 (TD3), Bellemare et al. 2017 (C51), Li et al. 2023 (PQL).
"""

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.off_policy import ActorCritic, Tensors, Trainer, make_atoms, make_policy
from pql.config import Config, DdpgConfig
from pql.config.algorithms import ActorCriticConfig
from pql.config.families import own
from pql.contract.env import EnvSpec
from pql.engine.optim import AdamW, Clock, follow, polyak
from pql.engine.worker import State
from pql.errors import ConfigError
from pql.nets.distributions import lower_mean, project
from pql.nets.encoders import Outputs
from pql.nets.mlp import Critic, DeterministicPolicy, Flat
from pql.types import Batch, Metrics, Obs, ObsBatch


@dataclass
class ValueState(State):
    """What the V-learner owns. ``atoms`` [Z] makes the critic categorical."""

    critic: Flat
    target: Flat
    optimizer: AdamW
    tau: float
    smoothing: float = 0.0  # standard deviation of the target action's noise
    smoothing_clip: float = 0.0
    atoms: Tensor | None = None
    target_every: int = 1  # updates between moves of the target
    clock: Clock | None = None  # None: it moves with each


@dataclass
class PolicyState(State):
    """What the P-learner owns. ``target`` is None where the policy itself forms the targets (PQL)."""

    policy: Flat
    target: Flat | None
    optimizer: AdamW
    tau: float
    reduce: str = "min"  # how an ensemble's values become one: min, mean, first
    saturation_penalty: float = 0.0  # per unit of the mean square of what the policy's tanh takes


@dataclass
class ValueInputs:
    """The V-learner's private copies: the policy that forms targets."""

    policy: nn.Module


@dataclass
class PolicyInputs:
    """The P-learner's private copies: the critic that it climbs."""

    critic: Critic
    atoms: Tensor | None = None


def value_update(state: ValueState, inputs: ValueInputs, batch: Batch, gen: Generator) -> Metrics:
    """One critic step towards r + discount * Q'(s', clip(pi(s') + clipped noise)). Mutates ``state`` only."""
    with torch.no_grad():
        action = inputs.policy(batch.next_obs)
        if state.smoothing > 0:
            noise = torch.randn(action.shape, generator=gen, device=action.device) * state.smoothing
            action = (action + noise.clamp_(-state.smoothing_clip, state.smoothing_clip)).clamp_(-1, 1)
    return critic_step(state, batch, action, None)


def critic_step(state: ValueState, batch: Batch, next_action: Tensor, bonus: Tensor | None) -> Metrics:
    """Regress every critic of the ensemble on one shared target, then move the target network where it is due.

    Args:
        next_action: [B, A] at ``batch.next_obs``.
        bonus: [B] added to the value of the next state (SAC's entropy term), or None.
    """
    share = loss_share(batch.mask, batch.weight)
    loss_of = scalar_loss if state.atoms is None else categorical_loss
    loss, q = loss_of(state, batch, next_action, bonus)  # [E, B], [B]
    total = (loss * share).sum()
    state.optimizer.zero_grad()
    total.backward()
    norm = state.optimizer.step(mask=batch.mask)
    if state.clock is None:
        polyak(state.target, state.critic, state.tau)
    else:
        follow(state.target, state.critic, state.clock, state.target_every, state.tau)
    return {"loss/critic": total.detach(), "value/q": (q * share).sum(), "grad_norm/critic": norm}


def scalar_loss(state: ValueState, batch: Batch, next_action: Tensor, bonus: Tensor | None) -> tuple[Tensor, Tensor]:
    """Squared error against r + discount * (min_e Q'_e(s', a') + bonus). Returns ([E, B], [B] values)."""
    with torch.no_grad():
        value = state.target.module(batch.next_obs, next_action).amin(0)
        target = torch.addcmul(batch.reward, batch.discount, value if bonus is None else value + bonus)
    q = state.critic.module(batch.obs, batch.action)  # [E, B]
    return (q - target).square(), q.detach()[0]


def categorical_loss(
    state: ValueState, batch: Batch, next_action: Tensor, bonus: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy against the projected target distribution: the whole one with the lower mean."""
    atoms = state.atoms
    assert atoms is not None
    with torch.no_grad():
        probs = lower_mean(state.target.module(batch.next_obs, next_action).softmax(-1), atoms)  # [B, Z]
        ahead = atoms if bonus is None else atoms + bonus.unsqueeze(-1)
        support = batch.reward.unsqueeze(-1) + batch.discount.unsqueeze(-1) * ahead
        target = project(support, probs, atoms)
    log_probs = state.critic.module(batch.obs, batch.action).log_softmax(-1)  # [E, B, Z]
    return -(target * log_probs).sum(-1), log_probs.detach()[0].exp() @ atoms


def policy_update(state: PolicyState, inputs: PolicyInputs, batch: ObsBatch, gen: Generator) -> Metrics:
    """One ascent step on Q(s, pi(s)); moves the target policy where there is one. Mutates ``state`` only."""
    policy, share = state.policy.module, loss_share(batch.mask, batch.weight)
    if state.saturation_penalty > 0:
        # A tanh far out passes no gradient on: without a way back a policy that once ran there stays, whatever the
        # critic learns later (rlkit and SAC's first code penalise the same square).
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
    """The ensemble's value of (obs, action) as one number per row, [B]."""
    q = inputs.critic(obs, action)
    if inputs.atoms is not None:
        q = q.softmax(-1) @ inputs.atoms
    if reduce == "first":
        return q[0]
    return q.mean(0) if reduce == "mean" else q.amin(0)


def loss_share(mask: Tensor, weight: Tensor) -> Tensor:
    """What each row contributes to a loss: mask * weight / sum(mask), [B]; zeros where no row counts."""
    return mask * weight / mask.sum().clamp(min=1)


# -- wiring -----------------------------------------------------------------------------------------------------------


def deterministic_policy(config: Config, spec: EnvSpec) -> nn.Module:
    """A tanh policy, freshly initialised."""
    policy, net = make_policy(config, spec, DeterministicPolicy, probe), own(config, DdpgConfig).policy
    if net.net is not None and net.saturation_penalty > 0 and not squashes(policy, spec):
        allowed = f"0, or a method before_tanh(obs) of algo.policy.net={net.net} whose tanh is forward(obs)"
        raise ConfigError("algo.policy.saturation_penalty", net.saturation_penalty, allowed)
    return policy


def probe(network: nn.Module, obs: Obs, action: Tensor) -> Outputs:
    """A deterministic policy's outputs, [2, A] each."""
    outputs = {"forward(obs)": network(obs), "mean_action(obs)": cast(Any, network).mean_action(obs)}
    return [(call, output, list(action.shape)) for call, output in outputs.items()]


@torch.no_grad()
def squashes(policy: nn.Module, spec: EnvSpec) -> bool:
    """Whether ``forward`` is the tanh of ``before_tanh``; tried on two rows, with other weights than it has."""
    if not hasattr(policy, "before_tanh"):
        return False
    moved, gen = cast(Any, copy.deepcopy(policy)), torch.Generator().manual_seed(0)
    for weight in moved.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=gen)
    drawn = {k: torch.randn(2, *s.shape, generator=gen) for k, s in spec.obs.items()}
    kinds = {k: s.dtype for k, s in spec.obs.items()}
    obs = {k: v if kinds[k].is_floating_point else (100 * v.abs()).to(kinds[k]) for k, v in drawn.items()}
    return torch.allclose(torch.tanh(moved.before_tanh(obs)).float(), moved(obs).float(), atol=1e-5)


def act(policy: nn.Module, obs: Obs, gen: Generator) -> Tensor:
    """The policy's action, [N, A]."""
    return policy(obs)


def value_state(config: Config, critic: Critic, device: torch.device) -> ValueState:
    """Critics, their target and optimiser, of any actor-critic algorithm on a replay."""
    algo = own(config, ActorCriticConfig)
    net, flat = algo.critic, Flat(critic, trained=True)
    return ValueState(
        critic=flat,
        target=Flat(copy.deepcopy(critic)),
        optimizer=AdamW(flat, net.lr, net.grad_clip, net.weight_decay, net.eps),
        tau=net.tau,
        atoms=make_atoms(config, device),
        target_every=net.target_every,
        clock=Clock(device) if net.target_every > 1 else None,
    )


def value_trainer(config: Config, critic: Critic, policy: nn.Module, device: torch.device) -> Trainer:
    """The V-learner's side."""
    algo, state = own(config, DdpgConfig), value_state(config, critic, device)
    state.smoothing, state.smoothing_clip = algo.smoothing, algo.smoothing_clip
    source = "target_policy" if algo.policy.target else "policy"
    pulls: Tensors = {source: [Flat(policy).data]}
    owns: Tensors = {"critic": [state.critic.data]}
    return Trainer(state, value_update, ValueInputs(policy), pulls, owns)


def policy_trainer(config: Config, policy: nn.Module, critic: Critic, size: int, device: torch.device) -> Trainer:
    """The P-learner's side."""
    net = own(config, DdpgConfig).policy
    flat = Flat(policy, trained=True)
    optimizer = AdamW(flat, net.lr, net.grad_clip, net.weight_decay, net.eps)
    pulls: Tensors = {"critic": [Flat(critic).data]}
    owns: Tensors = {"policy": [flat.data]}
    target = Flat(copy.deepcopy(policy)) if net.target else None
    if target is not None:
        owns["target_policy"] = [target.data]
    state = PolicyState(flat, target, optimizer, net.tau, net.reduce, net.saturation_penalty)
    return Trainer(state, policy_update, PolicyInputs(critic, make_atoms(config, device)), pulls, owns)


FAMILY = ActorCritic(DdpgConfig, deterministic_policy, act, value_trainer, policy_trainer).family()
