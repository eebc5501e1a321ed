"""Locomotion on MuJoCo's C thread pool: ``halfcheetah``, ``hopper``, ``walker2d`` and ``ant``.

env = halfcheetah(num_envs=128, device="cpu", threads=0, max_episode_steps=1000)
spec = halfcheetah.describe(num_envs=128, device="cpu")
"""

from dataclasses import dataclass
from typing import Any

import torch

from pql.env import EnvSpec
from pql.envs.mujoco import tasks
from pql.envs.mujoco.env import MujocoVec, describe
from pql.errors import ConfigError, nearest

_DEFAULTS = {"threads": 0, "max_episode_steps": 1000}


@dataclass(frozen=True)
class Robot:
    """Environment factory of one task: call it for the ``VecEnv``, or ``describe`` it for the spec alone.

    Keywords: ``threads`` (physics threads, 0 for one per core) and ``max_episode_steps`` (time limit).

    Raises:
        ConfigError: a keyword that does not exist, or a value out of range.
    """

    task: tasks.Task

    def __call__(self, num_envs: int = 64, device: str | torch.device = "cpu", **kwargs: Any) -> MujocoVec:
        settings = _checked(num_envs, kwargs)
        return MujocoVec(self.task, num_envs, torch.device(device), **settings)

    def describe(self, num_envs: int = 64, device: str | torch.device = "cpu", **kwargs: Any) -> EnvSpec:
        """What ``self(num_envs, device, **kwargs).spec`` would be; nothing is loaded or started."""
        settings = _checked(num_envs, kwargs)
        return describe(self.task, num_envs, torch.device(device), settings["max_episode_steps"])


def _checked(num_envs: int, kwargs: dict[str, Any]) -> dict[str, int]:
    for name in kwargs:
        if name not in _DEFAULTS:
            allowed = f"one of the keywords {', '.join(_DEFAULTS)}{nearest(name, _DEFAULTS)}"
            raise ConfigError(name, kwargs[name], allowed)
    settings = {**_DEFAULTS, **kwargs}
    for name, value, least in (
        ("num_envs", num_envs, 1),
        ("threads", settings["threads"], 0),
        ("max_episode_steps", settings["max_episode_steps"], 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(name, value, f"an integer >= {least}")
    return settings


halfcheetah = Robot(tasks.HALFCHEETAH)
hopper = Robot(tasks.HOPPER)
walker2d = Robot(tasks.WALKER2D)
ant = Robot(tasks.ANT)
