"""Every algorithm learns: the closed-form Q* of a linear-quadratic regulator, and a pendulum swing-up."""

import pytest
import torch
from conftest import fit, small_config, start
from gates import score, train_until
from regulator import q_value
from sampling import sample

from pql.engine.executors import Inline
from pql.envs.toy import LQR

LQR_RUN = {
    "task": {"name": "lqr", "kwargs": {"stagger": True}},
    "num_envs": 32,
    "graphs": "auto",
    "replay": {"capacity": 100_000},
    "algo": {
        "gamma": 0.9,
        "n_step": 1,
        "batch_size": 256,
        "v_per_step": 2.0,
        "p_per_v": 0.5,
        "smoothing": 0.0,
        "warmup_steps": 100,
        "explore": {"low": 0.05, "high": 0.6},
        "critic": {"hidden": [64, 64], "activation": "silu", "lr": 2e-3, "tau": 0.02, "grad_clip": None, "ensemble": 1},
        "policy": {"hidden": [64, 64], "activation": "silu", "lr": 1e-3},
    },
}


@pytest.mark.parametrize("schedule", sample(["concurrent", "lockstep"], keep=["concurrent"]))
def test_the_critic_converges_to_the_regulators_closed_form(schedule, learns):
    learns(lambda seed: closeness_to_the_closed_form(schedule, seed), 0.95)


def closeness_to_the_closed_form(schedule, seed):
    config = small_config(**{**LQR_RUN, "algo": {**LQR_RUN["algo"], "schedule": schedule}, "seed": seed})
    parts = start(config, Inline())
    env = parts.env
    assert isinstance(env, LQR)

    def closeness():
        """1 less the critic's relative error, on what the replay holds."""
        ring = parts.collector.replays[0]
        batch = ring.sample(ring.live, 4096, 1, 0.9, torch.Generator().manual_seed(0))
        truth = q_value(env, batch.obs["policy"], batch.action, gamma=0.9).float()
        with torch.no_grad():
            learned = parts.learners["v"].state.critic.module(parts.collector.normalizer(batch.obs), batch.action)[0]
        assert truth.abs().mean() > 0.1
        return 1 - ((learned - truth).norm() / truth.norm()).item()

    assert closeness() < 0.5
    return train_until(parts, 0.95, 4000, closeness)


PENDULUM = {
    "num_envs": 32,
    "graphs": "auto",
    "replay": {"capacity": 200_000},
    "task": {"reward_scale": 0.1, "kwargs": {"stagger": True}},
    "algo": {
        "batch_size": 256,
        "v_per_step": 2.0,
        "p_per_v": 0.5,
        "warmup_steps": 50,
        "critic": {"hidden": [64, 64], "activation": "relu", "lr": 1e-3, "tau": 0.02},
        "policy": {"hidden": [64, 64], "activation": "relu", "lr": 1e-3, "tau": 0.02},
    },
}
SAC = {"family": "sac", "explore": {"kind": "none"}, "alpha": 0.1}
ALGOS = {
    "pql": {},
    "pql_d": {"critic": {"atoms": 51, "v_min": -80.0, "v_max": 0.0}},
    "pql_sac": SAC,
    "ddpg": {"schedule": "lockstep"},
    "td3": {
        "schedule": "lockstep",
        "n_step": 1,
        "smoothing_clip": 0.5,
        "policy": {"target": True, "reduce": "first"},
        "explore": {"kind": "fixed", "low": 0.1, "high": 0.1},
    },
    "sac": {**SAC, "schedule": "lockstep"},
}


@pytest.mark.parametrize("algo", sample(ALGOS, keep=["pql", "pql_sac"]))
def test_every_algorithm_swings_the_pendulum_up(algo, learns):
    learns(lambda seed: swing_up(algo, seed), -200)  # the best possible is about -150


def swing_up(algo, seed):
    parts = start(small_config(**fit(PENDULUM, {"algo": ALGOS[algo], "seed": seed})), Inline())
    assert score(parts) < -700  # untrained: it hangs
    return train_until(parts, -200, 1500)
