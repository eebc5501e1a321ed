"""``task.reward_clip``: rewards are clipped before they are summed, scaled or counted; reports show raw ones."""

import random

import pytest
import torch
from conftest import small_config, start
from histories import CPU, SPECS, Column, Recorded
from ppo_runs import config_of
from test_rollout import record

from pql.config.compose import compose
from pql.contract.env import Box, EnvSpec
from pql.data.normalize import Normalizer
from pql.data.rollout import Rollout
from pql.engine.executors import Inline
from pql.errors import ConfigError


@pytest.mark.parametrize("n", [1, 3])
def test_windows_sum_clipped_rewards(n):
    ring = Recorded(3, 40, 1)
    ring.replay.reward_clip = 1.0
    rng = random.Random(0)
    for _ in range(35):
        ring.insert([rng.choice(("step", "step", "terminate", "truncate")) for _ in range(3)])
    ring.seal()
    ring.replay.reward -= 2  # some are below -1, some above 1
    raw = [e.reward - 2 for events in ring.events for e in events]
    ring.events = [[e._replace(reward=max(-1.0, min(e.reward - 2, 1.0))) for e in events] for events in ring.events]
    assert min(sum(r > 1 for r in raw), sum(r < -1 for r in raw)) > 20
    kinds = ring.check(ring.everything(n, 0.9), int(ring.cursor.lost), n, 0.9)
    assert kinds["plain"] > 20
    assert ring.replay.reward.max() > 2  # stored raw


def test_rollouts_clip_before_they_scale():
    spec = EnvSpec("made up", 4, SPECS, Box(1), CPU)
    rollout = Rollout(spec, Normalizer(SPECS, 4, CPU, False, 0.5, reward_clip=0.75), 11, 2, CPU)
    events = record(rollout, [Column(i, False) for i in range(4)], 11, random.Random(0))
    want = [[max(min(e.reward, 0.75), -0.75) * 0.5 for e in column] for column in events]
    assert rollout.segment().reward.T.tolist() == want
    assert max(map(max, want)) == 0.375


def test_the_spread_of_returns_is_that_of_clipped_rewards():
    clipped, plain = Normalizer({}, 2, CPU, reward_gamma=0.5, reward_clip=1.0), Normalizer({}, 2, CPU, reward_gamma=0.5)
    no, yes = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    for reward in ([3.0, -0.5], [0.25, -9.0], [2.0, 0.0]):
        clipped.observe_reward(torch.tensor(reward), no, yes)
        plain.observe_reward(torch.tensor(reward).clamp(-1, 1), no, yes)
    assert torch.equal(clipped.returns.m2, plain.returns.m2)
    assert clipped.running_return.tolist() == [1.375, -0.625]


@pytest.mark.parametrize("algo", ["pql", "ppo"])
def test_learners_draw_clipped_rewards_and_the_log_shows_raw_ones(algo):
    """A pendulum's rewards are around -5."""
    task = {"name": "pendulum", "reward_clip": 0.25, "reward_scale": 2.0, "kwargs": {"max_episode_steps": 10}}
    config = config_of({"task": task}) if algo == "ppo" else small_config(task=task, algo={"n_step": 2, "gamma": 0.5})
    parts = start(config, Inline())
    parts.schedule.tick()
    if algo == "ppo":
        reward, floor = parts.collector.stores[0].segment().reward, -0.5
    else:
        learner = parts.learners["v"]
        reward, floor = next(iter(learner.draw(1, learner.gen))).reward, -0.75  # 2 (.25 + .5 .25)
    assert reward.min().item() == floor
    assert reward.mean() < floor * 0.8
    assert parts.collector.episodes.drain()["train/return_mean"] < -10


def test_a_clip_is_a_positive_number():
    assert compose(["task=pendulum", "device=cpu", "task.reward_clip=1"]).task.reward_clip == 1.0
    with pytest.raises(ConfigError, match=r"task\.reward_clip=0\.0: expected a number above 0"):
        compose(["task=pendulum", "device=cpu", "task.reward_clip=0"])
