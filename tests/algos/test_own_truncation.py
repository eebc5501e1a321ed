"""Environments that truncate episodes themselves: what they announce as ``max_episode_steps`` changes nothing."""

from dataclasses import replace

import pytest
import torch

from pql.config.compose import compose
from pql.contract.env import Discrete
from pql.engine.executors import Inline
from pql.envs.toy import Counter
from pql.run.build import build
from pql.run.store.checkpoint import flatten

SMALL = {
    "sac": ("algo.batch_size=16",),
    "pql2": ("algo.batch_size=16",),
    "fastsac": ("algo.batch_size=16", "algo.critic.atoms=11"),
    "dqn": ("algo.batch_size=16", "algo.priority.alpha=0.6", "algo.target_period=64"),
    "r2d2": (
        "algo.batch_size=4",
        "algo.burn_in=2",
        "algo.length=6",
        "algo.period=3",
        "algo.lstm=8",
        "algo.target_period=48",
    ),
    "ppo": ("algo.horizon=11", "algo.minibatches=2", "algo.epochs=1"),
    "impala": ("algo.horizon=11",),
}


def trained(algo, limit, mode):
    """State of a short run on episodes of four steps that are all cut off, and the bootstrap targets lost."""
    env = Counter(8, episode_length=4, terminate_every=0, autoreset=mode, stagger=True)
    env.spec = replace(env.spec, max_episode_steps=limit)
    if algo in ("dqn", "r2d2"):
        env.spec = replace(env.spec, action=Discrete(3))
    replay = () if algo in ("ppo", "impala") else ("replay.capacity=2048", "algo.warmup_steps=16")
    words = ["device=cpu", "scale=cpu", f"algo={algo}", "num_envs=8", "graphs=off", "algo.critic.hidden=[8]"]
    config = compose([*words, *replay, *SMALL[algo]])
    parts = build(config, env=env, executor=Inline())
    parts.start()
    parts.warm_up(config.algo.warmup_steps)
    parts.begin()
    for _ in range(4 if not replay else 12):
        parts.schedule.tick()
    lost = next(float(v) for k, v in parts.gauges.items() if k.endswith("bootstrap_lost"))
    state = {k: v for k, v in flatten(parts.state_dict()).items() if not k.startswith("collector/env")}
    return state, lost


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("algo", SMALL)
def test_the_announced_limit_changes_no_bit_and_nothing_is_lost(algo, mode):
    first, lost = trained(algo, 4, mode)
    assert lost == 0
    for limit in (None, 1000):
        state, lost = trained(algo, limit, mode)
        assert lost == 0
        assert all(torch.equal(v, first[k]) for k, v in state.items())
