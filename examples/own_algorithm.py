"""An algorithm of your own: DDPG(n) whose policy is also trained to give similar actions at similar observations.

    python examples/own_algorithm.py                      # Pendulum, 20 seconds, under PQL's concurrent schedule
    python examples/own_algorithm.py algo.smoothness=0    # without the new loss: compare policy/roughness in the log

The loss is the spatial term of CAPS (Mysore et al. 2021). Critics, schedules, replay and export are those of DDPG.
"""

import sys
from dataclasses import dataclass, replace

import torch

import pql
from pql.algos import ddpg
from pql.algos.critics import loss_share
from pql.algos.policies import ensemble_value
from pql.config import DdpgConfig
from pql.config.fields import setting


@dataclass(frozen=True)
class SmoothConfig(DdpgConfig):
    family: str = setting("smooth", "Update functions.", weights="policy")
    smoothness: float = setting(1.0, "Weight of the squared change of actions under noise.", low=0, high=100)


def policy_update(state, batch, settings, gen):
    """One step on smoothness |pi(s + noise) - pi(s)|^2 - Q(s, pi(s)); noise has 0.1 of the observations' deviation."""
    share, policy = loss_share(batch.mask, batch.weight), state.policy.module
    near = {k: x + 0.1 * torch.randn(x.shape, generator=gen, device=x.device) for k, x in batch.obs.items()}
    action = policy(batch.obs)
    change = (policy(near) - action).square().sum(-1)
    q = ensemble_value(state, batch.obs, action, settings.policy.reduce)
    loss = ((settings.smoothness * change - q) * share).sum()
    norm = state.optimizer.minimize(loss, mask=batch.mask)
    state.update_average(settings.policy.average)
    roughness = (change.detach() * share).sum().sqrt()
    return {"loss/policy": loss.detach(), "grad_norm/policy": norm, "policy/roughness": roughness}


def policy_learner(setup, policy, critic, draw):
    """DDPG's P-learner with another update."""
    return replace(ddpg.ddpg_policy_learner(setup, policy, critic, draw), update=policy_update)


def main(*overrides):
    family = replace(ddpg.DDPG, settings=SmoothConfig, policy_learner=policy_learner).family()
    pql.register_algorithm(family, {"scales": {"cpu": {"like": "pql"}, "gpu": {"like": "pql"}}})  # PQL's sizes
    return pql.train("task=pendulum", "algo=smooth", "algo.schedule=concurrent", "budget.seconds=20", *overrides)


if __name__ == "__main__":
    main(*sys.argv[1:])
