"""Small R2D2 runs for the tests."""

from functools import partial

from conftest import configured

BASE = {
    "task": {"name": "tmaze", "kwargs": {"length": 3, "max_episode_steps": 9, "stagger": True}},
    "placement": {"matmul": "exact"},
    "replay": {"capacity": 8 * 60},
    "algo": {
        "family": "r2d2",
        "name": "r2d2",
        "schedule": "lockstep",
        "n_step": 2,
        "gamma": 0.9,
        "batch_size": 6,
        "warmup_steps": 16,
        "critic": {"hidden": [16], "lr": 1e-3, "weight_decay": 0.0},
        "lstm": 8,
        "burn_in": 3,
        "length": 8,
        "period": 4,
        "replay_ratio": 2.0,
        "double": True,
        "dueling": True,
        "huber": None,
        "target_period": 24,
        "epsilon": {"kind": "ladder"},
        "priority": {"alpha": 0.9, "beta": 0.6},
    },
}


config_of = partial(configured, BASE)
