"""Small runs of IMPALA and APPO, in every variant, for the tests."""

from functools import partial

import pytest
from conftest import configured, merge

BASE = {
    "task": {"name": "cartpole", "kwargs": {"max_episode_steps": 11, "stagger": True}},
    "placement": {"matmul": "exact"},
    "algo": {
        "family": "impala",
        "name": "impala",
        "schedule": "concurrent",
        "warmup_steps": 4,
        "critic": {"hidden": [16]},
        "policy": {"hidden": [16], "lr": 3e-3, "eps": 0.01, "weight_decay": 0.0},
        "horizon": 6,
    },
}
APPO = {"family": "ppo", "name": "appo", "vtrace": {"enabled": True}, "horizon": 6, "epochs": 2, "minibatches": 2}
CATCH = {"task": {"name": "catch", "kwargs": {}}, "algo": {"policy": {"hidden": []}, "critic": {"hidden": []}}}
VARIANTS = {
    "summed, rmsprop": {},
    "averaged, adam, two parts": {
        "algo": {"reduce": "mean", "optimizer": "adam", "minibatches": 2, "kl_coef": 0.1, "shared": False}
    },
    "lstm": {"algo": {"lstm": 8, "minibatches": 2, "anneal_steps": 5000}},
    "continuous, rewards scaled": {
        "task": {"name": "pendulum"},
        "algo": {"normalize_reward": True, "vtrace": {"rho_bar": 2.0, "pg_rho_bar": 1.5}},
    },
    "shallow": merge(CATCH, {"algo": {"encoder": {"kind": "small", "channels": [4], "features": 8}}}),
    "deep": merge(
        CATCH,
        {
            "num_envs": 4,
            "algo": {"encoder": {"kind": "resnet", "channels": [4], "features": 8}, "horizon": 3, "lstm": 4},
        },
    ),
    "appo": {"algo": APPO},
    "appo, lstm": {"algo": merge(APPO, {"lstm": 8, "lr_schedule": "fixed"})},
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


config_of = partial(configured, BASE)
