"""Small runs of IMPALA and APPO, in every variant, for the tests."""

import pytest
from conftest import merge, small_config

from pql.validate import validate

BASE = {
    "task": {"name": "cartpole", "kwargs": {"max_episode_steps": 11, "stagger": True}},
    "placement": {"matmul": "exact"},
    "algo": {
        "family": "impala", "name": "impala", "schedule": "concurrent", "warmup_steps": 4,
        "critic": {"hidden": [16]}, "policy": {"hidden": [16], "lr": 3e-3, "eps": 0.01, "weight_decay": 0.0},
        "impala": {"horizon": 6},
    },
}  # fmt: skip
APPO = {"family": "ppo", "name": "appo", "ppo": {"vtrace": True, "horizon": 6, "epochs": 2, "minibatches": 2}}
CATCH = {"task": {"name": "catch", "kwargs": {}}, "algo": {"policy": {"hidden": []}, "critic": {"hidden": []}}}
VARIANTS = {
    "summed, rmsprop": {},
    "averaged, adam, two parts": {
        "algo": {"impala": {"reduce": "mean", "optimizer": "adam", "minibatches": 2, "kl_coef": 0.1, "shared": False}}
    },
    "lstm": {"algo": {"impala": {"lstm": 8, "minibatches": 2, "anneal_steps": 5000}}},
    "continuous, rewards scaled": {
        "task": {"name": "pendulum"},
        "algo": {"normalize_reward": True, "vtrace": {"rho_bar": 2.0, "pg_rho_bar": 1.5}},
    },
    "shallow": merge(CATCH, {"algo": {"encoder": {"kind": "small", "channels": [4], "features": 8}}}),
    "deep": merge(CATCH, {"num_envs": 4, "algo": {"encoder": {"kind": "resnet", "channels": [4], "features": 8},
                                                  "impala": {"horizon": 3, "lstm": 4}}}),
    "appo": {"algo": APPO},
    "appo, lstm": {"algo": merge(APPO, {"ppo": {"lstm": 8, "lr_schedule": "fixed"}})},
}  # fmt: skip
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def config_of(*changes):
    tree = BASE
    for change in changes:
        tree = merge(tree, change)
    return validate(small_config(**tree))


def ticks(parts, count):
    for _ in range(count):
        parts.schedule.tick()
    return parts
