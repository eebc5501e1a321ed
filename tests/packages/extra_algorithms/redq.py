"""DDPG(n) with a randomised ensemble: targets are the least of a few critics, drawn anew for each update.

Source: Chen et al. 2021 (REDQ), without its entropy bonus and its update-to-data ratio. It is an example of an
algorithm in its own package; for training use ``algo.critic.subset``, which the library has.
"""

from dataclasses import dataclass, replace

import torch
from torch import Generator, nn

from pql.algos import ddpg
from pql.algos.critics import CriticState, loss_share
from pql.algos.off_policy import ValueDraw
from pql.algos.registry import Setup
from pql.config import Config, DdpgConfig
from pql.config.fields import setting
from pql.engine.optim import polyak
from pql.engine.worker import Learner
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


def value_update(state: CriticState, batch: Batch, settings: RedqConfig, gen: Generator) -> Metrics:
    """One step of every critic towards r + discount * min over ``subset`` of Q'(s', pi(s'))."""
    share = loss_share(batch.mask, batch.weight)
    with torch.no_grad():
        values = state.target.module(batch.next_obs, state.policy(batch.next_obs))  # [E, B]
        drawn = torch.rand(values.shape[0], generator=gen, device=values.device).argsort()[: settings.subset]
        target = torch.addcmul(batch.reward, batch.discount, values.index_select(0, drawn).amin(0))
    q = state.critic.module(batch.obs, batch.action)
    total = ((q - target).square() * share).sum()
    norm = state.optimizer.minimize(total, mask=batch.mask)
    polyak(state.target, state.critic, settings.critic.tau)
    return {"loss/critic": total.detach(), "value/q": (q.detach()[0] * share).sum(), "grad_norm/critic": norm}


def value_learner(setup: Setup[RedqConfig], critic: Critic, policy: nn.Module, draw: ValueDraw) -> Learner:
    """DDPG's V-learner with another update."""
    return replace(ddpg.ddpg_value_learner(setup, critic, policy, draw), update=value_update)


FAMILY = replace(ddpg.DDPG, settings=RedqConfig, value_learner=value_learner).family()
