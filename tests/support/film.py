"""A simulator of frame stacks for tests of remote actors, with only NumPy."""

import time

import numpy as np

from pql.contract.plain import Discrete, EnvSpec, ObsSpec, Step


class Film:
    """Stacks of three 2 x 2 frames whose pixels count the rows of an episode, which ends after ``length`` rows.

    Args:
        hangs_at: number of the step that never ends.
    """

    def __init__(self, num_envs, device="cpu", length=4, hangs_at=None):
        self.hangs_at, self.steps = hangs_at, 0
        obs = {"policy": ObsSpec((3, 2, 2), "uint8", 3)}
        self.spec = EnvSpec("film", num_envs, obs, Discrete(2), device, max_episode_steps=length, final_obs="always")
        self.length, self.shown = length, np.zeros((num_envs, 3, 2, 2), np.uint8)

    def reset(self, seed=None):
        self.at = np.arange(len(self.shown)) % self.length  # so that episodes end at different times
        self.shown[:] = 0
        self.shown[:, -1] = 10 + self.at[:, None, None]
        return {"policy": self.shown.copy()}

    def step(self, action):
        self.steps += 1
        if self.steps == self.hangs_at:
            time.sleep(1000)
        self.at += 1
        shown = np.concatenate(
            (self.shown[:, 1:], (10 + self.at).astype(np.uint8)[:, None, None, None].repeat(2, 2).repeat(2, 3)), 1
        )
        over, no = self.at >= self.length, np.zeros(len(self.at), bool)
        final = shown.copy()
        self.at[over] = 0
        shown[over, :-1], shown[over, -1] = 0, 10
        self.shown = shown
        return Step(
            {"policy": shown.copy()}, action.astype(np.float32), no, over, over, {"policy": final}, ~no, ~no, {}
        )

    def close(self):
        pass


class Reel(Film):
    """Its stacks begin with copies of the first frame; ``past`` is a flat history of two terms: a pixel, its square."""

    def __init__(self, num_envs, device="cpu"):
        super().__init__(num_envs, device)
        obs = {
            "policy": ObsSpec((3, 2, 2), "uint8", 3, (), "first"),
            "past": ObsSpec((6,), "float32", 3, (1, 1), "first"),
        }
        self.spec = EnvSpec("reel", num_envs, obs, Discrete(2), device, max_episode_steps=4, final_obs="always")

    def reset(self, seed=None):
        return self.filled(super().reset(seed))

    def step(self, action):
        row = super().step(action)
        return row._replace(obs=self.filled(row.obs), final_obs=self.filled(row.final_obs))

    def filled(self, obs):
        frames = obs["policy"]
        first = frames[np.arange(len(frames)), (frames[:, :, 0, 0] > 0).argmax(1)]
        frames = np.where(frames > 0, frames, first[:, None])
        x = frames[:, :, 0, 0].astype(np.float32)
        return {"policy": frames, "past": np.concatenate((x, x * x), 1)}
