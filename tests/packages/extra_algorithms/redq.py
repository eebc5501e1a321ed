"""DDPG(n) with a randomised ensemble: targets are the least of a few critics, drawn anew for each update.

Source: Chen et al. 2021 (REDQ), without its entropy bonus and its update-to-data ratio. It is an example of an
algorithm in its own package; for training use ``algo.critic.subset``, which the library has.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, nn

from pql.algos.critics import CriticState, loss_share
from pql.algos.ddpg import (
    ValueInputs,
    ddpg_policy_trainer,
    ddpg_value_trainer,
    deterministic_action,
    deterministic_policy,
)
from pql.algos.off_policy import OffPolicy, Trainer
from pql.config import Config, DdpgConfig
from pql.config.fields import setting
from pql.engine.optim import polyak
from pql.errors import ConfigError
from pql.nets.mlp import Critic
from pql.types import Batch, Metrics


@dataclass(frozen=True)
class RedqConfig(DdpgConfig):
    """Settings: those of DDPG, and one more."""

    family: str = setting("redq", "Update functions.", weights="policy")
    subset: int = setting(2, "Critics of the ensemble that form a target.", low=1, high=100)

    def check(self, config: Config) -> None:
        super().check(config)
        if self.subset > self.critic.ensemble:
            raise ConfigError("algo.subset", self.subset, f"at most algo.critic.ensemble={self.critic.ensemble}")


def value_update(state: CriticState, inputs: ValueInputs, batch: Batch, gen: Generator, subset: int) -> Metrics:
    """One step of every critic towards r + discount * min over ``subset`` of Q'(s', pi(s'))."""
    share = loss_share(batch.mask, batch.weight)
    with torch.no_grad():
        values = state.target.module(batch.next_obs, inputs.policy(batch.next_obs))  # [E, B]
        drawn = torch.rand(values.shape[0], generator=gen, device=values.device).argsort()[:subset]
        target = torch.addcmul(batch.reward, batch.discount, values.index_select(0, drawn).amin(0))
    q = state.critic.module(batch.obs, batch.action)
    total = ((q - target).square() * share).sum()
    state.optimizer.zero_grad()
    total.backward()
    norm = state.optimizer.step(mask=batch.mask)
    polyak(state.target, state.critic, state.tau)
    return {"loss/critic": total.detach(), "value/q": (q.detach()[0] * share).sum(), "grad_norm/critic": norm}


def trainer(config: Config[RedqConfig], critic: Critic, policy: nn.Module, device: torch.device) -> Trainer:
    """The V-learner's side: DDPG's, with another update."""
    made = ddpg_value_trainer(config, critic, policy, device)
    made.update = partial(value_update, subset=config.algo.subset)
    return made


FAMILY = OffPolicy(RedqConfig, deterministic_policy, deterministic_action, trainer, ddpg_policy_trainer).family()
