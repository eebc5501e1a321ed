"""Small on-policy runs, in every variant, for the tests."""

from functools import partial

import pytest
from conftest import configured, start

from pql.config import Config
from pql.engine.executors import Inline
from pql.run.components import Parts

BASE = {
    "replay": {"capacity": 4096},
    "placement": {"matmul": "exact"},
    "algo": {
        "family": "ppo",
        "name": "ppo",
        "schedule": "lockstep",
        "warmup_steps": 8,
        "critic": {"hidden": [16, 16]},
        "policy": {"hidden": [16, 16], "lr": 1e-3, "weight_decay": 0.0, "grad_clip": 1.0},
        "horizon": 8,
        "epochs": 2,
        "minibatches": 4,
    },
}
A2C = {"epochs": 1, "minibatches": 1, "gae_lambda": 1.0, "clip": None, "entropy_coef": 0.01, "lr_schedule": "fixed"}
A2C |= {"normalize_advantage": False, "normalize_value": False}
"""Settings with which PPO is A2C."""
VARIANTS = {
    "gaussian": {},
    "squashed": {"algo": {"squash": True, "entropy_coef": 0.01}},
    "categorical": {"task": {"name": "cartpole"}},
    "residual": {"algo": {"policy": {"trunk": "residual"}, "critic": {"trunk": "residual", "norm": "rms"}}},
    "shared trunk": {"algo": {"shared": True, "value_clip": 0.2}},
    "lstm": {"algo": {"lstm": 8}},
    "shared lstm": {"task": {"name": "cartpole"}, "algo": {"lstm": 8, "shared": True}},
    "annealed, stopped": {
        "algo": {"lr_schedule": "linear", "anneal_steps": 640, "anneal_clip": True, "kl_stop": 0.005}
    },
    "a2c": {"algo": {**A2C, "normalize_reward": True, "horizon": 5, "optimizer": "rmsprop"}},
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


config_of = partial(configured, BASE)


def learned_with(config: Config, steps: int, **junk: float) -> Parts:
    """Run ``steps``: collect and learn, with ``junk`` in the named columns of every masked row."""
    parts = start(config, Inline())
    parts.workers["collector"].run(steps)
    rollout = parts.collector.stores[0]
    masked = rollout.segment().mask == 0
    assert steps // 2 < masked.sum() < 40
    for name, value in junk.items():
        getattr(rollout, name)[masked] = value
    parts.workers["learner"].run(1)
    return parts
