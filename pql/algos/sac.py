"""SAC(n): a stochastic policy and a temperature that keeps its entropy near a target.

Haarnoja et al. 2018b, with n-step targets; the entropy bonus enters at the bootstrap state only, as is usual with
n-step SAC. The critic's step is DDPG's.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.ddpg import PolicyInputs, ValueInputs, ValueState, critic_step, ensemble_value, loss_share
from pql.dist import squashed_gaussian
from pql.nets import Flat
from pql.optim import AdamW
from pql.types import Batch, Metrics, ObsBatch
from pql.worker import State


class Temperature(nn.Module):
    """log(alpha) as a parameter."""

    def __init__(self, initial: float):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([initial]).log())


@dataclass
class SacValueInputs(ValueInputs):
    log_alpha: Tensor  # [1]


@dataclass
class SacPolicyState(State):
    """What SAC's P-learner owns: the policy and the temperature."""

    policy: Flat
    optimizer: AdamW
    temperature: Flat  # of a Temperature
    temperature_optimizer: AdamW
    target_entropy: float
    auto_temperature: bool = True
    reduce: str = "min"


def value_update(state: ValueState, inputs: SacValueInputs, batch: Batch, gen: Generator) -> Metrics:
    """One critic step towards r + discount * (Q'(s', a') - alpha log pi(a'|s')), a' ~ pi. Mutates ``state`` only."""
    with torch.no_grad():
        mean, log_std = inputs.policy(batch.next_obs)
        action, log_prob = squashed_gaussian(mean, log_std, gen)
        bonus = -inputs.log_alpha.exp() * log_prob
    return critic_step(state, batch, action, bonus)


def policy_update(state: SacPolicyState, inputs: PolicyInputs, batch: ObsBatch, gen: Generator) -> Metrics:
    """One step on alpha log pi - Q, then one on the temperature. Mutates ``state`` only."""
    share = loss_share(batch.mask, batch.weight)
    mean, log_std = state.policy.module(batch.obs)
    action, log_prob = squashed_gaussian(mean, log_std, gen)
    q = ensemble_value(inputs, batch.obs, action, state.reduce)
    log_alpha = cast(Temperature, state.temperature.module).log_alpha
    loss = (share * (log_alpha.detach().exp() * log_prob - q)).sum()
    state.optimizer.zero_grad()
    loss.backward()
    norm = state.optimizer.step(mask=batch.mask)
    entropy = -(share * log_prob.detach()).sum()
    if state.auto_temperature:
        state.temperature_optimizer.zero_grad()
        (log_alpha * (entropy - state.target_entropy)).sum().backward()
        state.temperature_optimizer.step(mask=batch.mask)
    return {
        "loss/policy": loss.detach(),
        "grad_norm/policy": norm,
        "policy/entropy": entropy,
        "policy/alpha": log_alpha.detach().exp().squeeze(0),
    }
