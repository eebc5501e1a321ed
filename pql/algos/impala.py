"""IMPALA: an actor-critic on rollouts of a slightly older policy, corrected by V-trace.

Source: Espeholt et al. 2018. Losses are averaged instead of summed, and a KL penalty may be added, both as in Espeholt
et al. 2020 (SEED RL). Unlike in PPO, every row is used once, and the targets come from the network being updated: one
pass gives values, targets and gradients. The policy may change within a rollout, because each row stores the
distribution that its action was drawn from.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from pql.algos.on_policy import OnPolicy
from pql.algos.ppo import PpoState, begin_ppo_tick, grouped, make_state, masked_moments, rows_lag
from pql.config import ImpalaConfig
from pql.data.normalize import EPSILON
from pql.data.returns import Corrected, valued_rows, vtrace
from pql.data.rollout import Segment, minibatches
from pql.types import Metrics, Obs


class Unroll(NamedTuple):
    """All rows of B environments; fields as in :class:`~pql.data.rollout.Segment`, with B of its columns."""

    obs: Obs  # [T + 1 + K + 1, B, ...]
    action: Tensor
    params: Tensor
    reward: Tensor
    alive: Tensor
    goes_on: Tensor
    successor: Tensor
    first: Tensor
    mask: Tensor
    carry: Tensor  # [1, B, C]
    final_row: Tensor
    version: Tensor


def draw_impala(state: PpoState, segment: Segment, settings: ImpalaConfig, gen: Generator) -> Iterator[Unroll]:
    """Yield a tick's minibatches; each contains all rows, in order, of some of the environments."""
    begin_ppo_tick(state, segment, settings)
    named = segment._asdict()
    columns = {k: named[k] for k in Unroll._fields if k not in ("obs", "carry")}
    columns |= {"carry": segment.carry.unsqueeze(0), **{f"obs/{k}": v for k, v in segment.obs.items()}}
    parts = [columns] if settings.minibatches == 1 else minibatches(columns, 1, settings.minibatches, 1, gen)
    for part in parts:
        obs, rest = grouped(part)
        yield Unroll(obs=obs, **rest)


def impala_update(state: PpoState, batch: Unroll, settings: ImpalaConfig, gen: Generator) -> Metrics:
    """Take one step on policy, value, entropy and KL. Mutates ``state`` only.

    With E the sum or the mean over rows, the loss is -E[weight A log pi] + value_coef E[(v - V)^2] / 2
    - entropy_coef E[H] + kl_coef E[KL(mu || pi)].
    """
    dist, mask = state.net.policy.dist, batch.mask
    params, values = state.net.evaluate(batch.obs, batch.carry[0], batch.first, batch.final_row)
    log_prob, value = dist.log_prob(params, batch.action), values[: mask.shape[0]]
    log_ratio = (log_prob - dist.log_prob(batch.params, batch.action)).detach()
    target, advantage, weight = correct(settings, batch, log_ratio, values.detach())
    rows = state.group.sum_(mask.sum()).clamp(min=1)  # over all processes
    share = mask / mask.sum().clamp(min=1)
    policy_loss = -(share * weight * advantage * log_prob).sum()
    critic_loss = 0.5 * (share * (target - value).square()).sum()
    entropy = (share * dist.entropy(params, gen)).sum()
    kl = (share * dist.kl(batch.params, params)).sum()
    loss = policy_loss + settings.value_coef * critic_loss - settings.entropy_coef * entropy + settings.kl_coef * kl
    norm = state.optimizer.minimize(loss * rows if settings.reduce == "sum" else loss, mask=mask)
    with torch.no_grad():
        explained = 1 - masked_moments(target - value, mask)[1] / (masked_moments(target, mask)[1] + EPSILON)
        lag = rows_lag(state, batch.version, mask)
    return {
        "loss/policy": policy_loss.detach(),
        "loss/critic": critic_loss.detach(),
        "grad_norm/policy": norm,
        "policy/entropy": entropy.detach(),
        "policy/kl": kl.detach(),
        "policy/lr": state.optimizer.lr,
        "vtrace/weight": (share * weight).sum(),
        "value/explained_variance": explained,
        **lag.measures(),
    }


def correct(settings: ImpalaConfig, batch: Unroll, log_ratio: Tensor, values: Tensor) -> Corrected:
    """Compute targets, advantages and weights by V-trace, or by one of its baselines (section 5.2.2 of the paper).

    ``one_step`` weights only the policy gradient; ``none`` treats the behaviour policy as the current one (A2C).

    Args:
        log_ratio: log of current over behaviour probability, [T, B].
        values: [T + 1 + K + 1, B].
    """
    plain = torch.zeros_like(log_ratio)
    traced = log_ratio if settings.correction == "vtrace" else plain
    out = vtrace(traced, valued_rows(batch, settings.gamma, values), settings.vtrace, settings.trace_lambda)
    if settings.correction == "one_step":
        return out._replace(weight=log_ratio.exp().clamp(max=settings.vtrace.pg_rho_bar))
    return out


FAMILY = OnPolicy(ImpalaConfig, make_state, draw_impala, impala_update).family()
