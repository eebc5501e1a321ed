"""Small value-based runs, in every variant, for the tests."""

from functools import partial

import pytest
from conftest import configured

BASE = {
    "task": {"name": "cartpole", "kwargs": {"max_episode_steps": 11, "stagger": True}},
    "placement": {"matmul": "exact"},
    "algo": {
        "family": "dqn",
        "name": "dqn",
        "schedule": "lockstep",
        "n_step": 3,
        "critic": {"hidden": [16, 16], "lr": 1e-3, "weight_decay": 0.0},
        "target_period": 32,
        "epsilon": {"steps": 2000},
    },
}
PRIORITIES = {"alpha": 0.6, "beta": 0.4, "beta_steps": 4000}
C51 = {"critic": {"atoms": 11, "v_min": 0.0, "v_max": 20.0}}
VARIANTS = {
    "dqn": {"optimizer": "rmsprop"},
    "fraction": {"v_per_step": 0.5, "double": True, "huber": None},
    "prioritized": {"double": True, "dueling": True, "shared_grad": 0.7, "priority": PRIORITIES},
    "c51": C51,
    "residual": {"dueling": True, "critic": {"trunk": "residual", "norm": "rms"}},
    "rainbow": {
        **C51,
        "double": True,
        "dueling": True,
        "noisy": 0.5,
        "priority": PRIORITIES,
        "epsilon": {"kind": "fixed", "end": 0.0},
    },
    "munchausen": {"munchausen": {"alpha": 0.9}, "epsilon": {"kind": "decayed", "steps": 300, "until": 400}},
    "btr": {
        "critic": {"quantiles": 4, "cosines": 6},
        "munchausen": {"alpha": 0.9},
        "dueling": True,
        "noisy": 0.5,
        "priority": PRIORITIES,
        "epsilon": {"kind": "decayed", "end": 0.01, "steps": 300, "until": 400},
    },
    "bfloat16": {"amp": True, "critic": {"quantiles": 4, "cosines": 6}, "dueling": True, "noisy": 0.5},
    "ape-x": {
        "schedule": "concurrent",
        "double": True,
        "epsilon": {"kind": "ladder"},
        "priority": {**PRIORITIES, "initial": "actor"},
    },
}
PIXELS = {
    "task": {"name": "catch", "kwargs": {}},
    "algo": {"encoder": {"kind": "resnet", "channels": [4], "features": 0, "pool": 3, "spectral_norm": True}},
}
"""With a variant: images, and an encoder whose convolutions have vectors as state."""
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


config_of = partial(configured, BASE)
