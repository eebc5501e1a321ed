"""DQN and its descendants: one update function.

Double, dueling, n-step, C51, IQN, Munchausen targets, noisy layers and priorities are settings. Sources: Mnih et al.
2015 (DQN), van Hasselt et al. 2016 (double), Bellemare et al. 2017 (C51), Schaul et al. 2016 (priorities), Fortunato et
al. 2018 (noisy layers), Hessel et al. 2018 (Rainbow), Imani & White 2018 (HL-Gauss), Dabney et al. 2018 (IQN),
Vieillard et al. 2020 (Munchausen), Clark et al. 2025 (BTR).
"""

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from pql.algos.critics import loss_share
from pql.algos.value import ValueBased, ValueState, make_q_network
from pql.config import DqnConfig, MunchausenConfig
from pql.data.sequences import Sequence
from pql.engine.optim import follow
from pql.nets.distributions import hl_gauss, project
from pql.nets.q import QNetwork, QuantileNetwork, redraw_noise
from pql.types import Batch, Metrics


def dqn_update(state: ValueState, batch: Batch, settings: DqnConfig, gen: Generator) -> Metrics:
    """Take one step of Q(s, a) towards r + discount * Q'(s', a*) and update priorities. Mutates ``state`` only."""
    net, target_net = state.nets
    redraw_noise(net, gen)
    redraw_noise(target_net, gen)
    if isinstance(net, QuantileNetwork):
        tau = torch.rand(2, *batch.reward.shape, net.quantiles, generator=gen, device=batch.reward.device)
        loss, error, q = value_quantile_loss(net, target_net, settings, batch, tau)
    else:
        loss_of = value_scalar_loss if net.atoms is None else value_categorical_loss
        loss, error, q = loss_of(net, target_net, settings, batch)  # [B] each
    metrics = value_step(state, batch, loss, error, q)
    if state.priorities is not None:
        state.priorities.update(batch.index, error, batch.mask)
    return metrics


def value_step(state: ValueState, batch: Batch | Sequence, loss: Tensor, error: Tensor, q: Tensor) -> Metrics:
    """Take an optimiser step on the weighted mean of ``loss``; the target network follows.

    Args:
        loss, error, q: [B], or [L, B] of sequences.
    """
    total = (loss * loss_share(batch.mask, batch.weight)).sum()
    norm = state.optimizer.minimize(total, mask=batch.mask)
    follow(state.target, state.q, state.clock, state.target_every)
    share = loss_share(batch.mask, torch.ones_like(batch.weight))
    return {
        "loss/critic": total.detach(),
        "value/q": (q * share).sum(),
        "value/td_error": (error.abs() * share).sum(),
        "grad_norm/critic": norm,
        "replay/weight_mean": (batch.weight * share).sum(),
    }


def value_scalar_loss(
    net: QNetwork, target_net: QNetwork, settings: DqnConfig, batch: Batch
) -> tuple[Tensor, Tensor, Tensor]:
    """Half the squared TD error, or the Huber loss. Returns (loss, TD error, value), [B] each."""
    values = net(batch.obs)
    with torch.no_grad():
        target = value_targets(net, values, target_net(batch.next_obs), settings, batch)
    q = at(values, batch.action)
    error = target - q
    return huber(error, settings.huber), error.detach(), q.detach()


def value_quantile_loss(
    net: QuantileNetwork, target_net: QNetwork, settings: DqnConfig, batch: Batch, tau: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantile Huber loss, summed over the K predicted quantiles and averaged over the K of the target.

    Args:
        tau: [2, B, K] in [0, 1]: the quantiles of s and of s'.

    Returns (loss, mean over the target's quantiles of the summed absolute errors, value), [B] each. Source: Dabney et
    al. 2018, Eq. 2 and 3.
    """
    delta = settings.huber
    assert delta is not None
    quantiles = net(batch.obs, tau[0])  # [B, n, K]
    with torch.no_grad():
        target = value_targets(net, quantiles.mean(-1), target_net(batch.next_obs, tau[1]), settings, batch)
    q = at(quantiles, batch.action)
    error = target.unsqueeze(1) - q.unsqueeze(2)  # [B, K, K]: predicted, target
    slope = (tau[0].unsqueeze(2) - (error.detach() < 0).to(q.dtype)).abs()
    loss = (slope * huber(error, delta) / delta).sum(1).mean(1)
    return loss, error.detach().abs().sum(1).mean(1), q.detach().mean(1)


def value_categorical_loss(
    net: QNetwork, target_net: QNetwork, settings: DqnConfig, batch: Batch
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy against the projected target distribution, or HL-Gauss around its mean (Farebrother et al. 2024).

    Returns (loss, KL(target || prediction), value), [B] each.
    """
    atoms = net.atoms
    assert atoms is not None
    with torch.no_grad():
        ahead = target_net(batch.next_obs).softmax(-1)  # [B, n, Z]
        best = choose(net, ahead @ atoms, settings, batch)
        if settings.critic.loss == "hl_gauss":
            mean = torch.addcmul(batch.reward, batch.discount, at(ahead, best) @ atoms)
            target = hl_gauss(mean, atoms, settings.critic.sigma)
        else:
            support = batch.reward.unsqueeze(-1) + batch.discount.unsqueeze(-1) * atoms
            target = project(support, at(ahead, best), atoms)
    log_probs = at(net(batch.obs), batch.action).log_softmax(-1)  # [B, Z]
    loss = -(target * log_probs).sum(-1)
    kl = loss.detach() + torch.xlogy(target, target).sum(-1)
    return loss, kl.clamp(min=0), log_probs.detach().exp() @ atoms


def value_targets(net: QNetwork, now: Tensor, ahead: Tensor, settings: DqnConfig, batch: Batch) -> Tensor:
    """Return r + discount * value of s', [B] or [B, K] as ``ahead``.

    Args:
        now: values of ``net`` at s, [B, n].
        ahead: values [B, n] or quantiles [B, n, K] of the target network at s'.
    """
    soft, reward = settings.munchausen, batch.reward
    means = ahead if ahead.dim() == 2 else ahead.mean(-1)
    if soft.alpha == 0:
        value = at(ahead, choose(net, means, settings, batch))
    else:
        value, reward = soft_value(ahead, means, soft.tau), reward + munchausen_bonus(now, batch.action, soft)
    shape = (-1, *[1] * (value.dim() - 1))
    return torch.addcmul(reward.view(shape), batch.discount.view(shape), value)


def munchausen_bonus(values: Tensor, action: Tensor, settings: MunchausenConfig) -> Tensor:
    """Return alpha * tau log pi(a|s), clipped below and at 0 before the factor alpha, [B].

    pi is the softmax of ``values`` [B, n] / tau. Source: Vieillard et al. 2020, Eq. 1; the values are the trained
    network's, as in BTR, not the target network's.
    """
    log_policy = settings.tau * F.log_softmax(values / settings.tau, -1)
    return settings.alpha * at(log_policy, action).clamp(settings.clip, 0)


def soft_value(ahead: Tensor, means: Tensor, tau: float) -> Tensor:
    """Return sum_a pi(a) (q(a) - tau log pi(a)), [B] or [B, K] as ``ahead``; pi is the softmax of ``means`` / tau.

    Args:
        ahead: q, [B, n] or [B, n, K].
        means: [B, n].
    """
    log_policy = F.log_softmax(means / tau, -1)
    policy = log_policy.exp()
    entropy = -(policy * log_policy).sum(-1)
    shape = (1,) * (ahead.dim() - 2)
    return (policy.view(*means.shape, *shape) * ahead).sum(1) + tau * entropy.view(-1, *shape)


def choose(net: QNetwork, ahead: Tensor, settings: DqnConfig, batch: Batch) -> Tensor:
    """Return the action at s' whose value is the target, [B].

    It is greedy in the target network's values ``ahead`` [B, n]; with double Q-learning, in the values of ``net`` (van
    Hasselt et al. 2016).
    """
    return (net.values(batch.next_obs) if settings.double else ahead).argmax(-1)


def at(values: Tensor, action: Tensor) -> Tensor:
    """Select each row's entry at its action [B]: [B, n, ...] -> [B, ...]."""
    index = action.view(-1, *[1] * (values.dim() - 1)).expand(-1, 1, *values.shape[2:])
    return values.gather(1, index).squeeze(1)


def huber(error: Tensor, delta: float | None) -> Tensor:
    """Huber loss: e^2 / 2 up to |e| = delta, then delta (|e| - delta / 2); e^2 / 2 if delta is None. Any shape."""
    if delta is None:
        return 0.5 * error.square()
    size = error.abs()
    inside = size.clamp(max=delta)
    return inside * (size - 0.5 * inside)


FAMILY = ValueBased(DqnConfig, make_q_network, dqn_update).family()
