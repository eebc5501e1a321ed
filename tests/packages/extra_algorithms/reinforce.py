"""REINFORCE with a learned baseline (Williams 1992; Sutton & Barto 2018, 13.4) on fixed-length rollouts.

A rollout's end is bootstrapped with the baseline's value, as an episode seldom fits into one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator

from pql.algos.on_policy import OnPolicy
from pql.algos.ppo import PpoState, begin_ppo_tick, make_state
from pql.config import Config
from pql.config.algorithms import StochasticConfig
from pql.config.fields import setting
from pql.data.returns import lambda_returns, valued_rows
from pql.data.rollout import Segment
from pql.engine.flat import Flat
from pql.engine.optim import Optimizer
from pql.types import Metrics


@dataclass(frozen=True)
class ReinforceConfig(StochasticConfig):
    """Settings: those of every stochastic policy on rollouts."""

    family: str = setting("reinforce", "Update functions.", weights="policy")
    schedule: str = setting("lockstep", "One after the other.", choices=("lockstep",))
    minibatches: int = setting(1, "One update on the whole rollout.", low=1, high=1)


def draw(state: PpoState, segment: Segment, settings: ReinforceConfig, gen: Generator) -> Iterator[dict[str, Any]]:
    """One batch: the rollout's rows, [T, N], with their returns."""
    begin_ppo_tick(state, segment, settings)
    rows = segment.mask.shape[0]
    with torch.no_grad():
        values = state.net.values(segment.obs)  # [T + 1 + K + 1, N]
        target = lambda_returns(valued_rows(segment, settings.gamma, values), 1.0)
    obs = {k: v[:rows] for k, v in segment.obs.items()}
    yield {"obs": obs, "action": segment.action, "target": target, "baseline": values[:rows], "mask": segment.mask}


def update(state: PpoState, batch: dict[str, Any], settings: ReinforceConfig, gen: Generator) -> Metrics:
    """One step on -E[(G - b) log pi] + value_coef E[(G - b)^2]."""
    params, value = state.net(batch["obs"])
    share = batch["mask"] / batch["mask"].sum().clamp(min=1)
    log_prob = state.net.policy.dist.log_prob(params, batch["action"])
    policy_loss = -(share * (batch["target"] - batch["baseline"]) * log_prob).sum()
    critic_loss = (share * (batch["target"] - value).square()).sum()
    loss = policy_loss + settings.value_coef * critic_loss
    norm = state.optimizer.minimize(loss, mask=batch["mask"])
    return {
        "loss/policy": policy_loss.detach(),
        "loss/critic": critic_loss.detach(),
        "grad_norm/policy": norm,
        "policy/lr": state.optimizer.lr,
    }


def state(config: Config, flat: Flat, optimizer: Optimizer, num_envs: int) -> PpoState:
    """Parameters and optimiser; values are not normalised."""
    return make_state(config, flat, optimizer, num_envs)


FAMILY = OnPolicy(ReinforceConfig, state, draw, update).family()
