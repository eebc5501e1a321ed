"""Environments that truncate episodes themselves: what they announce as ``max_episode_steps`` changes nothing.

``pytest -m slow tests/algos/test_own_truncation.py -s`` prints returns of runs with and without an announced limit.
"""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import pql
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


# -- returns ----------------------------------------------------------------------------------------------------------


class Reach(gymnasium.Env):
    """Four steps; the last one pays for being near a target that changes at every step, and cuts the episode off."""

    observation_space = spaces.Box(-1, 2, (3,), np.float32)  # time, target

    def __init__(self, discrete=False):
        self.discrete = discrete
        self.action_space = spaces.Discrete(4) if discrete else spaces.Box(-1, 1, (2,), np.float32)

    def _obs(self):
        self.goal = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return np.concatenate(([self.t / 4], self.goal)).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        if self.discrete:
            action = np.float32([[-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]])[action]
        late, reward = self.t >= 4, 1 - float(np.abs(action - self.goal).mean())
        return self._obs(), reward if late else 0.0, False, late, {}


for _kind in ("continuous", "discrete"):
    for _name, _limit in (("Announced", 4), ("Own", None)):
        gymnasium.register(
            f"Pql{_name}{_kind.title()}-v0",
            entry_point=Reach,
            max_episode_steps=_limit,
            kwargs={"discrete": _kind == "discrete"},
        )


SIZES = {
    "ppo": (),
    "r2d2": (
        *("replay.capacity=20_000", "algo.burn_in=4", "algo.length=8", "algo.period=4", "algo.target_period=512"),
        *("algo.replay_ratio=16", "algo.batch_size=16", "algo.critic.lr=1e-3"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("algo", ["sac", "pql2", "fastsac", "r2d2", "ppo"])
def test_returns_do_not_depend_on_the_announced_limit(algo, mode, tmp_path):
    kind = "Discrete" if algo == "r2d2" else "Continuous"
    base = ("scale=cpu", "device=cpu", "num_envs=16", "algo.gamma=0.9", "budget.env_steps=20_000")
    base += ("eval.every_seconds=null", "eval.final=false", f"task.kwargs.autoreset={mode}", f"algo={algo}")
    found = {}
    for name in ("Announced", "Own"):
        task = ("task=gymnasium", f"task.id=Pql{name}{kind}-v0", *SIZES.get(algo, ("replay.capacity=100_000",)))
        for seed in range(3):
            run = pql.train(*base, *task, f"seed={seed}", f"run_dir={tmp_path}/{name}{seed}")
            found[name, seed] = pql.evaluate(run.run_dir, episodes=200)["return_mean"]
        print(f"{algo:8} {mode:10} {name:10}", [round(found[name, seed], 3) for seed in range(3)])
        assert [found[name, s] for s in range(3)] == [found["Announced", s] for s in range(3)]
