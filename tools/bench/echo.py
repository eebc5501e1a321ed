"""Simulator without dynamics, for ``process.py``: needs only NumPy, in any Python from 3.8 on."""

import ctypes

import numpy as np

from pql.contract.plain import Box, EnvSpec, ObsSpec, Step

OBS, ACTIONS = 60, 8  # sizes of Isaac Gym's Ant


class Echo:
    """Rows of Ant's size that never change and never end.

    Args:
        hold: seconds for which each step waits with the interpreter's lock held, as a library that does not release it.
    """

    def __init__(self, num_envs, device="cpu", hold=0.0):
        self.spec = EnvSpec("echo", num_envs, {"policy": ObsSpec((OBS,))}, Box(ACTIONS), "cpu")
        obs = {"policy": np.random.RandomState(0).rand(num_envs, OBS).astype(np.float32)}
        no, yes = np.zeros(num_envs, bool), np.ones(num_envs, bool)
        self.answer = Step(obs, np.zeros(num_envs, np.float32), no, no, no, obs, yes, yes, {})
        self.hold = hold

    def reset(self, seed=None):
        return self.answer.obs

    def step(self, action):
        if self.hold:
            ctypes.PyDLL(None).usleep(int(self.hold * 1e6))
        return self.answer

    def close(self):
        pass
