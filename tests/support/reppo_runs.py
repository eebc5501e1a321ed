"""Small runs of REPPO, in every variant, for the tests."""

from functools import partial

import pytest
from conftest import configured, merge

BASE = {
    "task": {"name": "pendulum"},
    "placement": {"matmul": "exact"},
    "algo": {
        "family": "reppo",
        "name": "reppo",
        "schedule": "lockstep",
        "warmup_steps": 8,
        "horizon": 8,
        "epochs": 2,
        "minibatches": 4,
        "critic": {"hidden": [16, 8], "atoms": 21, "v_min": -20.0, "v_max": 20.0, "lr": 1e-3},
        "policy": {"hidden": [16, 16], "lr": 1e-3},
    },
}
VARIANTS = {
    "exact": {},
    "sampled, annealed": {"kl_samples": 3, "anneal_steps": 640, "kl_bound": 1e-4, "policy": {"layer_norm": False}},
    "bfloat16, layer norm": {"amp": True, "normalize_reward": True, "critic": {"norm": "layer", "activation": "relu"}},
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


SHORT = {"task": {"kwargs": {"max_episode_steps": 11, "stagger": True}}}  # time limits in every rollout

config_of = partial(configured, BASE)
short_of = partial(configured, merge(BASE, SHORT))
