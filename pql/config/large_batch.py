"""Scaling rules of value-based methods for large batches (Stooke & Abbeel 2018, section 4.2).

Rows are used equally often whatever the batch, so larger batches mean fewer updates; beyond 1,024 rows more
environments keep the updates evenly spread. What an update does must then change with the batch: a target network of a
constant age in env steps, and an Adam whose epsilon falls as gradients become less noisy.
"""

import math
from dataclasses import dataclass
from typing import Any

from pql.errors import ConfigError, nearest

INTENSITY = 8  # average number of updates per row
STEPS = 4  # largest number of steps of all environments between updates
FEWEST_ENVS = 32
BASE = 32  # reference batch of the learning rates


@dataclass(frozen=True)
class Recipe:
    """The reference point of an algorithm's scaling rules."""

    lr: float  # at a batch of 32
    target_period: int  # env steps
    warmup: int  # env steps
    eps: float | None = None  # Adam's epsilon is this / batch; None: not Adam


RECIPES = {
    "dqn": Recipe(2.5e-4, 10_000, 50_000),
    "c51": Recipe(2.5e-4, 10_000, 50_000, 0.01),
    "eps_rainbow": Recipe(6.25e-5, 8_000, 20_000, 0.005),
    "rainbow": Recipe(6.25e-5, 8_000, 20_000, 0.005),
}
"""By preset; the numbers of Stooke & Abbeel's code (accel_rl)."""


def large_batch(algo: str, batch: int) -> dict[str, Any]:
    """Settings for ``algo`` with batches of ``batch`` rows.

    * num_envs = max(32, batch / 32): an update at least every 4 steps of all environments.
    * algo.v_per_step = 8 num_envs / batch: every row is used 8 times, so an update comes every batch / 8 env steps.
    * algo.target_period: the recipe's env steps, rounded to a whole number of updates.
    * algo.critic.eps = .01 / batch (C51), .005 / batch (Rainbow).
    * algo.critic.lr: the recipe's times sqrt(batch / 32), but at most three times it. The paper's code leaves the
      learning rate to the user; three times is the larger of the two that its example tries at 512.

    Raises:
        ConfigError: an algorithm without such rules, or a batch that is no power of two.
    """
    if algo not in RECIPES:
        raise ConfigError("batch", batch, f"algo={' or '.join(RECIPES)} with it, not {algo}{nearest(algo, RECIPES)}")
    if not isinstance(batch, int) or batch < BASE or batch & (batch - 1):
        raise ConfigError("batch", batch, f"a power of two from {BASE} on")
    recipe, num_envs = RECIPES[algo], max(FEWEST_ENVS, batch // (INTENSITY * STEPS))
    per_update = batch // INTENSITY  # env steps
    settings = {
        "num_envs": num_envs,
        "algo.batch_size": batch,
        "algo.v_per_step": num_envs / per_update,
        "algo.warmup_steps": math.ceil(recipe.warmup / num_envs),
        "algo.target_period": per_update * round(recipe.target_period / per_update),
        "algo.critic.lr": recipe.lr * min(3.0, math.sqrt(batch / BASE)),
    }
    return settings if recipe.eps is None else {**settings, "algo.critic.eps": recipe.eps / batch}
