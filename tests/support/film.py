"""A simulator of frame stacks for tests of remote actors, with only NumPy."""

import time

import numpy as np

from pql.contract.plain import Discrete, EnvSpec, ObsSpec, Step


class Film:
    """Stacks of three 2 x 2 frames whose pixels count the rows of an episode, which ends after ``length`` rows.

    Args:
        hangs_at: number of the step that never ends.
        fill: of the stacks.
    """

    def __init__(self, num_envs, device="cpu", length=4, hangs_at=None, fill="zeros"):
        self.hangs_at, self.steps, self.repeats = hangs_at, 0, fill == "first"
        obs = {"policy": ObsSpec((3, 2, 2), "uint8", 3, (), fill)}
        self.spec = EnvSpec("film", num_envs, obs, Discrete(2), device, max_episode_steps=length, final_obs="always")
        self.length, self.shown = length, np.zeros((num_envs, 3, 2, 2), np.uint8)

    def reset(self, seed=None):
        self.at = np.arange(len(self.shown)) % self.length  # so that episodes end at different times
        self.shown[:] = 10 + self.at[:, None, None, None]
        self.shown[:, :-1] *= self.repeats
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
        shown[over, :-1], shown[over, -1] = 10 * self.repeats, 10
        self.shown = shown
        return Step(
            {"policy": shown.copy()}, action.astype(np.float32), no, over, over, {"policy": final}, ~no, ~no, {}
        )

    def close(self):
        pass
