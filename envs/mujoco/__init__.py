"""Locomotion on MuJoCo's C thread pool: ``halfcheetah``, ``hopper``, ``walker2d`` and ``ant``.

env = halfcheetah(num_envs=128, device="cpu", threads=0, max_episode_steps=1000)
spec = halfcheetah.describe(num_envs=128, device="cpu")
"""

from dataclasses import dataclass

import torch

from pql.env import EnvSpec
from pql.envs.mujoco import tasks
from pql.envs.mujoco.env import MujocoVec, describe
from pql.errors import ConfigError


@dataclass(frozen=True)
class Robot:
    """Environment factory of one task: call it for the ``VecEnv``, or ``describe`` it for the spec alone.

    Keywords: ``threads`` (physics threads, 0 for one per core) and ``max_episode_steps`` (time limit).

    Raises:
        ConfigError: a value out of range.
    """

    task: tasks.Task

    def __call__(
        self, num_envs: int = 64, device: str | torch.device = "cpu", threads: int = 0, max_episode_steps: int = 1000
    ) -> MujocoVec:
        _check(num_envs, threads, max_episode_steps)
        return MujocoVec(self.task, num_envs, torch.device(device), threads, max_episode_steps)

    def describe(
        self, num_envs: int = 64, device: str | torch.device = "cpu", threads: int = 0, max_episode_steps: int = 1000
    ) -> EnvSpec:
        """What ``self(...).spec`` would be; nothing is loaded or started."""
        _check(num_envs, threads, max_episode_steps)
        return describe(self.task, num_envs, torch.device(device), max_episode_steps)


def _check(num_envs: int, threads: int, max_episode_steps: int) -> None:
    for name, value, least in (
        ("num_envs", num_envs, 1),
        ("threads", threads, 0),
        ("max_episode_steps", max_episode_steps, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(name, value, f"an integer >= {least}")


halfcheetah = Robot(tasks.HALFCHEETAH)
hopper = Robot(tasks.HOPPER)
walker2d = Robot(tasks.WALKER2D)
ant = Robot(tasks.ANT)
