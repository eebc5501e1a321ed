"""DQN and its descendants: one update function; double, dueling, n-step, C51, noisy layers and priorities are settings.

Sources: Mnih et al. 2015 (DQN), van Hasselt et al. 2016 (double), Bellemare et al. 2017 (C51), Schaul et al. 2016
(priorities), Fortunato et al. 2018 (noisy layers), Hessel et al. 2018 (Rainbow).
"""

import torch
from torch import Generator, Tensor

from pql.algos.critics import loss_share
from pql.algos.value import ValueBased, ValueState, make_q_network
from pql.config import DqnConfig
from pql.engine.optim import follow
from pql.nets.distributions import project
from pql.nets.q import QNetwork, redraw_noise
from pql.types import Batch, Metrics


def dqn_update(state: ValueState, inputs: DqnConfig, batch: Batch, gen: Generator) -> Metrics:
    """Take one step of Q(s, a) towards r + discount * Q'(s', a*) and update priorities. Mutates ``state`` only."""
    net, target_net = state.nets
    redraw_noise(net, gen)
    redraw_noise(target_net, gen)
    loss_of = value_scalar_loss if net.atoms is None else value_categorical_loss
    loss, error, q = loss_of(net, target_net, inputs, batch)  # [B] each
    total = (loss * loss_share(batch.mask, batch.weight)).sum()
    state.optimizer.zero_grad()
    total.backward()
    norm = state.optimizer.step(mask=batch.mask)
    follow(state.target, state.q, state.clock, state.target_every)
    if state.priorities is not None:
        state.priorities.update(batch.index, error, batch.mask)
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
    with torch.no_grad():
        ahead = target_net(batch.next_obs)  # [B, n]
        best = choose(net, ahead, settings, batch)
        target = torch.addcmul(batch.reward, batch.discount, at(ahead, best))
    q = at(net(batch.obs), batch.action)
    error = target - q
    return huber(error, settings.huber), error.detach(), q.detach()


def value_categorical_loss(
    net: QNetwork, target_net: QNetwork, settings: DqnConfig, batch: Batch
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy against the projected target distribution. Returns (loss, KL(target || prediction), value), [B]."""
    atoms = net.atoms
    assert atoms is not None
    with torch.no_grad():
        ahead = target_net(batch.next_obs).softmax(-1)  # [B, n, Z]
        best = choose(net, ahead @ atoms, settings, batch)
        support = batch.reward.unsqueeze(-1) + batch.discount.unsqueeze(-1) * atoms
        target = project(support, at(ahead, best), atoms)
    log_probs = at(net(batch.obs), batch.action).log_softmax(-1)  # [B, Z]
    loss = -(target * log_probs).sum(-1)
    kl = loss.detach() + torch.xlogy(target, target).sum(-1)
    return loss, kl.clamp(min=0), log_probs.detach().exp() @ atoms


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
