"""Critics of off-policy actor-critics: state, targets and losses of an ensemble, scalar or categorical.

Sources: Bellemare et al. 2017 (C51), Fujimoto et al. 2018 (clipped double Q), Chen et al. 2021 (REDQ), Imani & White
2018 (HL-Gauss).
"""

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Generator, Tensor, nn

from pql.config import Config
from pql.config.algorithms import ActorCriticConfig
from pql.config.networks import ClimbingPolicyConfig, CriticConfig
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, Clock, follow, make_adamw, make_lr_schedule, polyak
from pql.engine.worker import PULLED, State
from pql.nets.distributions import hl_gauss, lower_mean, project
from pql.nets.layers import batch_statistics, project_weights
from pql.nets.mlp import Critic
from pql.types import Batch, Metrics


@dataclass(kw_only=True)
class CriticState(State):
    """State of the V-learner.

    Attributes:
        critic, target: the ensemble and its target network.
        clock: counts updates; None: the target moves at every update.
        policy: copy of the policy, or of the target policy.
        atoms: [Z] support of categorical critics, or None.
    """

    critic: Flat
    target: Flat
    optimizer: AdamW
    clock: Clock | None
    policy: nn.Module = field(metadata=PULLED)
    atoms: Tensor | None


CriticStates = TypeVar("CriticStates", bound=CriticState)


def critic_step(
    state: CriticState,
    batch: Batch,
    settings: ActorCriticConfig,
    next_action: Tensor,
    bonus: Tensor | None,
    gen: Generator,
) -> Metrics:
    """Regress all critics on a shared target, or each on its own, then update the target network if due.

    Args:
        next_action: [B, A] at ``batch.next_obs``.
        bonus: [B], added to the next state's value (SAC's entropy term), or None.
    """
    net, share = settings.critic, loss_share(batch.mask, batch.weight)
    q, next_q = both_states(state, batch, next_action)  # [E, B] or [E, B, Z] each
    if net.subset is not None:
        drawn = torch.rand(len(next_q), generator=gen, device=next_q.device).argsort()[: net.subset]
        next_q = next_q.index_select(0, drawn)

    if state.atoms is None:
        loss, value = scalar_loss(net, batch, q, next_q, bonus)  # [E, B], [B]
    else:
        loss, value = categorical_loss(net, state.atoms, batch, q, next_q, bonus)
    total = (loss * share).sum()

    norm = state.optimizer.minimize(total, mask=batch.mask)
    if state.clock is None:
        polyak(state.target, state.critic, net.tau)
    else:
        follow(state.target, state.critic, state.clock, net.target_every, net.tau)
    return {"loss/critic": total.detach(), "value/q": (value * share).sum(), "grad_norm/critic": norm}


def both_states(state: CriticState, batch: Batch, next_action: Tensor) -> tuple[Tensor, Tensor]:
    """Return the critics' outputs at (s, a) and those of the target critics at (s', a'), [E, B] or [E, B, Z] each.

    With BatchNorm both networks normalise (s, a) and (s', a') as one batch (CrossQ; Bhatt et al. 2024);
    otherwise Q(s, a) and Q(s', a') would be normalised differently.
    """
    if not state.critic.statistics.numel():
        with torch.no_grad():
            next_q = state.target.module(batch.next_obs, next_action)
        return state.critic.module(batch.obs, batch.action), next_q
    obs = {name: torch.cat((x, batch.next_obs[name])) for name, x in batch.obs.items()}
    action, rows = torch.cat((batch.action, next_action)), torch.cat((batch.mask, batch.followed))
    with torch.no_grad(), batch_statistics(state.target.module, rows, tracked=False):
        next_q = state.target.module(obs, action)
    with batch_statistics(state.critic.module, rows, tracked=True):
        q = state.critic.module(obs, action)
    size = len(next_action)
    return q[:, :size], next_q[:, size:]


def scalar_loss(
    net: CriticConfig, batch: Batch, q: Tensor, next_q: Tensor, bonus: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Squared error against r + discount * (target_e Q'_e(s', a') + bonus). Returns losses [E, B] and values [B].

    Args:
        q: [E, B], Q(s, a).
        next_q: [E', B], Q'(s', a') of the target critics.
    """
    with torch.no_grad():
        target = bootstrapped(batch, target_value(next_q, net.target), bonus)
    return (q - target).square(), q.detach()[0]


def categorical_loss(
    net: CriticConfig, atoms: Tensor, batch: Batch, q: Tensor, next_q: Tensor, bonus: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy against the target's distribution: projected (C51), or HL-Gauss around its mean.

    Returns losses [E, B] and values [B].

    Args:
        atoms: [Z].
        q: [E, B, Z], logits at (s, a).
        next_q: [E', B, Z], logits of the target critics at (s', a').
    """
    with torch.no_grad():
        probs = next_q.softmax(-1)
        if net.loss == "hl_gauss":
            mean = bootstrapped(batch, target_value(probs @ atoms, net.target), bonus)
            target = hl_gauss(mean, atoms, net.sigma)
        else:
            target = projected(batch, target_distribution(probs, atoms, net.target), atoms, bonus)
            # Projection moves mass beyond the support to its ends, so that the order of two means may change.
            target = lower_mean(target, atoms) if net.target == "projected" else target
    log_probs = q.log_softmax(-1)  # [E, B, Z]
    return -(target * log_probs).sum(-1), log_probs.detach()[0].exp() @ atoms


def bootstrapped(batch: Batch, value: Tensor, bonus: Tensor | None) -> Tensor:
    """Return r + discount * (value + bonus), in the shape of ``value``: [B], or [E, B] for targets of each critic."""
    return torch.addcmul(batch.reward, batch.discount, value if bonus is None else value + bonus)


def target_value(value: Tensor, rule: str) -> Tensor:
    """Return an ensemble's values [E, B] as the target's: [B], or [E, B] where each critic has its own.

    Args:
        rule: ``algo.critic.target``.
    """
    if rule == "own":
        return value
    return value.amin(0) if rule == "min" else value.mean(0)


def target_distribution(probs: Tensor, atoms: Tensor, rule: str) -> Tensor:
    """Return an ensemble's distributions [E, B, Z] as the target's: [B, Z], or [E, B, Z] if all are projected.

    Args:
        rule: ``algo.critic.target``.
    """
    if rule in ("own", "projected"):
        return probs
    return lower_mean(probs, atoms) if rule == "min" else probs.mean(0)


def projected(batch: Batch, probs: Tensor, atoms: Tensor, bonus: Tensor | None) -> Tensor:
    """Project the distributions ``probs`` [B, Z] or [E, B, Z] at the next state to targets of the same shape."""
    value = atoms if bonus is None else atoms + bonus.unsqueeze(-1)
    support = (batch.reward.unsqueeze(-1) + batch.discount.unsqueeze(-1) * value).expand(probs.shape)
    return project(support.reshape(-1, len(atoms)), probs.reshape(-1, len(atoms)), atoms).view(probs.shape)


def loss_share(mask: Tensor, weight: Tensor) -> Tensor:
    """Return the loss weight of each row, mask * weight / sum(mask), [B]; zeros if no row is valid."""
    return mask * weight / mask.sum().clamp(min=1)


def make_critic_state(
    kind: type[CriticStates], config: Config[ActorCriticConfig], critic: Critic, policy: nn.Module, **more: Any
) -> CriticStates:
    """Create the V-learner's state.

    Args:
        kind: its class.
        policy: the V-learner's copy.
        more: fields that ``kind`` adds.
    """
    net, flat = config.algo.critic, Flat(critic, trained=True)
    return kind(
        critic=flat,
        target=Flat(copy.deepcopy(critic)),
        optimizer=make_adam(config, flat, net),
        clock=Clock(flat.data.device) if net.target_every > 1 else None,
        policy=policy,
        atoms=make_atoms(config, flat.data.device),
        **more,
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
