"""Critics of off-policy actor-critics: state, targets and losses of an ensemble, scalar or categorical.

Sources: Bellemare et al. 2017 (C51), Fujimoto et al. 2018 (clipped double Q), Chen et al. 2021 (REDQ), Imani & White
2018 (HL-Gauss).
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Generator, Tensor

from pql.config import Config
from pql.config.algorithms import ActorCriticConfig
from pql.config.networks import ClimbingPolicyConfig, CriticConfig
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, Clock, follow, make_adamw, make_lr_schedule, polyak
from pql.engine.worker import State
from pql.nets.distributions import hl_gauss, lower_mean, project
from pql.nets.layers import batch_norms, batch_statistics, project_weights
from pql.nets.mlp import Critic
from pql.types import Batch, Metrics


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
    reduce: str = "min"  # the ensemble's target: min, projected, mean, own
    subset: int | None = None  # critics drawn for each target; None: all
    hl_sigma: float | None = None  # of HL-Gauss, in distances between atoms; None: C51
    joint: bool = False  # one batch of (s, a) and (s', a'), for BatchNorm


CriticStates = TypeVar("CriticStates", bound=CriticState)


def critic_step(state: CriticState, batch: Batch, next_action: Tensor, bonus: Tensor | None, gen: Generator) -> Metrics:
    """Regress all critics on a shared target, or each on its own, then update the target network if due.

    Args:
        next_action: [B, A] at ``batch.next_obs``.
        bonus: [B], added to the next state's value (SAC's entropy term), or None.
    """
    share = loss_share(batch.mask, batch.weight)
    now, ahead = both_states(state, batch, next_action)
    with torch.no_grad():
        if state.subset is not None:
            drawn = torch.rand(len(ahead), generator=gen, device=ahead.device).argsort()[: state.subset]
            ahead = ahead.index_select(0, drawn)
    loss_of = scalar_loss if state.atoms is None else categorical_loss
    loss, q = loss_of(state, batch, now, ahead, bonus)  # [E, B], [B]
    total = (loss * share).sum()
    state.optimizer.zero_grad()
    total.backward()
    norm = state.optimizer.step(mask=batch.mask)
    if state.clock is None:
        polyak(state.target, state.critic, state.tau)
    else:
        follow(state.target, state.critic, state.clock, state.target_every, state.tau)
    return {"loss/critic": total.detach(), "value/q": (q * share).sum(), "grad_norm/critic": norm}


def both_states(state: CriticState, batch: Batch, next_action: Tensor) -> tuple[Tensor, Tensor]:
    """Return the critics' outputs at (s, a) and those of the target critics at (s', a'), [E, B] or [E, B, Z] each.

    With BatchNorm both networks normalise (s, a) and (s', a') as one batch (CrossQ; Bhatt et al. 2024): the statistics
    of only one of them would not be those of the other.
    """
    if not state.joint:
        with torch.no_grad():
            ahead = state.target.module(batch.next_obs, next_action)
        return state.critic.module(batch.obs, batch.action), ahead
    obs = {name: torch.cat((x, batch.next_obs[name])) for name, x in batch.obs.items()}
    action, rows = torch.cat((batch.action, next_action)), torch.cat((batch.mask, batch.followed))
    with torch.no_grad(), batch_statistics(state.target.module, rows, tracked=False):
        ahead = state.target.module(obs, action)
    with batch_statistics(state.critic.module, rows, tracked=True):
        now = state.critic.module(obs, action)
    size = len(next_action)
    return now[:, :size], ahead[:, size:]


def scalar_loss(
    state: CriticState, batch: Batch, now: Tensor, ahead: Tensor, bonus: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Squared error against r + discount * (reduce_e Q'_e(s', a') + bonus). Returns losses [E, B] and values [B].

    Args:
        now: [E, B], Q(s, a).
        ahead: [E', B], Q'(s', a') of the target critics.
    """
    with torch.no_grad():
        target = bootstrapped(batch, target_value(ahead, state.reduce), bonus)
    return (now - target).square(), now.detach()[0]


def categorical_loss(
    state: CriticState, batch: Batch, now: Tensor, ahead: Tensor, bonus: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy against the target's distribution: projected (C51), or HL-Gauss around its mean.

    Returns losses [E, B] and values [B].

    Args:
        now: [E, B, Z], logits at (s, a).
        ahead: [E', B, Z], logits of the target critics at (s', a').
    """
    atoms = state.atoms
    assert atoms is not None
    with torch.no_grad():
        probs = ahead.softmax(-1)
        if state.hl_sigma is not None:
            target = hl_gauss(
                bootstrapped(batch, target_value(probs @ atoms, state.reduce), bonus), atoms, state.hl_sigma
            )
        else:
            target = projected(batch, target_distribution(probs, atoms, state.reduce), atoms, bonus)
            # Projection moves mass beyond the support to its ends, so that the order of two means may change.
            target = lower_mean(target, atoms) if state.reduce == "projected" else target
    log_probs = now.log_softmax(-1)  # [E, B, Z]
    return -(target * log_probs).sum(-1), log_probs.detach()[0].exp() @ atoms


def bootstrapped(batch: Batch, value: Tensor, bonus: Tensor | None) -> Tensor:
    """Return r + discount * (value + bonus), in the shape of ``value``: [B], or [E, B] for targets of each critic."""
    return torch.addcmul(batch.reward, batch.discount, value if bonus is None else value + bonus)


def target_value(value: Tensor, reduce: str) -> Tensor:
    """Return an ensemble's values [E, B] as the target's: [B], or [E, B] where each critic has its own."""
    if reduce == "own":
        return value
    return value.amin(0) if reduce == "min" else value.mean(0)


def target_distribution(probs: Tensor, atoms: Tensor, reduce: str) -> Tensor:
    """Return an ensemble's distributions [E, B, Z] as the target's: [B, Z], or [E, B, Z] if all are projected."""
    if reduce in ("own", "projected"):
        return probs
    return lower_mean(probs, atoms) if reduce == "min" else probs.mean(0)


def projected(batch: Batch, probs: Tensor, atoms: Tensor, bonus: Tensor | None) -> Tensor:
    """Project the distributions ``probs`` [B, Z] or [E, B, Z] at the next state to targets of the same shape."""
    ahead = atoms if bonus is None else atoms + bonus.unsqueeze(-1)
    support = (batch.reward.unsqueeze(-1) + batch.discount.unsqueeze(-1) * ahead).expand(probs.shape)
    return project(support.reshape(-1, len(atoms)), probs.reshape(-1, len(atoms)), atoms).view(probs.shape)


def loss_share(mask: Tensor, weight: Tensor) -> Tensor:
    """Return the loss weight of each row, mask * weight / sum(mask), [B]; zeros if no row is valid."""
    return mask * weight / mask.sum().clamp(min=1)


def value_state(
    kind: type[CriticStates], config: Config[ActorCriticConfig], critic: Critic, device: torch.device
) -> CriticStates:
    """Create critics, target and optimiser of an off-policy actor-critic algorithm.

    Args:
        kind: class of the state.
    """
    net, flat = config.algo.critic, Flat(critic, trained=True)
    return kind(
        critic=flat,
        target=Flat(copy.deepcopy(critic)),
        optimizer=make_adam(config, flat, net),
        tau=net.tau,
        atoms=make_atoms(config, device),
        target_every=net.target_every,
        clock=Clock(device) if net.target_every > 1 else None,
        reduce=net.target,
        subset=net.subset,
        joint=bool(batch_norms(critic)),
        hl_sigma=net.sigma if net.atoms is not None and net.loss == "hl_gauss" else None,
    )


def make_adam(
    config: Config[ActorCriticConfig], flat: Flat, net: CriticConfig | ClimbingPolicyConfig, per_update: float = 1.0
) -> AdamW:
    """Create the optimiser of a network, with the algorithm's learning-rate schedule.

    Args:
        per_update: its steps per critic update.
    """
    optimizer, algo = make_adamw(flat, net), config.algo
    optimizer.schedule = make_lr_schedule(algo, algo.clocked(per_update))
    if net.net is None and net.projected != "none":
        optimizer.project = partial(project_weights, cast(Any, flat.module).net, net.projected)
    return optimizer


def make_atoms(config: Config[ActorCriticConfig], device: torch.device) -> Tensor | None:
    """Return the categorical critic's support [Z], or None for a scalar critic."""
    net = config.algo.critic
    return None if net.atoms is None else torch.linspace(net.v_min, net.v_max, net.atoms, device=device)
