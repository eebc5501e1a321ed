"""Shared parts of the wrapper tests: environments in which every off-by-one error shows, and a score."""

from dataclasses import replace

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import pql
from pql.contract.env import Discrete
from pql.envs.toy import Counter
from pql.run.episodes import run_episodes

N = 5


class Clock(gymnasium.Env):
    """obs = [seed, episode, step, action], all exact in float32. Episodes last 2, 3, 4, 5 rows in turn; the limit of 5
    truncates the last kind, the others terminate."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def __init__(self):
        self.seed, self.episode = 0, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seed, self.episode = seed, -1
        self.episode, self.now = self.episode + 1, 0
        return np.array([self.seed, self.episode, 0, 0], np.float32), {}

    def step(self, action):
        self.now += 1
        obs = np.array([self.seed, self.episode, self.now, action[0]], np.float32)
        reward, over = self.now + round(8 * float(action[0])) / 16, self.now == 2 + self.episode % 4 and self.now < 5
        return obs, reward, over, False, {}


gymnasium.register("PqlClock-v0", Clock, max_episode_steps=5, disable_env_checker=True)


class Groups(Counter):
    """Counter with a second group, image-like, and discrete actions."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        extra = {"critic": pql.ObsSpec((2, 3), torch.uint8)}
        self.spec = replace(self.spec, obs={**self.spec.obs, **extra}, action=Discrete(4))

    def _more(self, obs):
        return obs | {"critic": obs["policy"].to(torch.uint8)[:, :, None].expand(-1, -1, 3).contiguous()}

    def reset(self, seed=None):
        return self._more(super().reset(seed))

    def step(self, action):
        assert action.shape == (self.spec.num_envs,)
        assert action.dtype == torch.int64
        step = super().step(action)
        return step._replace(obs=self._more(step.obs), final_obs=self._more(step.final_obs))


def score(task, act):
    """Return the mean return of ``act(obs [N, D])`` over 100 steps, on evaluation environments."""
    env = pql.make_env(task, num_envs=64, max_episode_steps=100)
    return run_episodes(env, lambda obs: act(obs["policy"]), seed=9).mean
