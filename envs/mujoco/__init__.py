"""The MuJoCo tasks: Gymnasium's suite on MuJoCo's C thread pool.

env = halfcheetah(num_envs=128, device="cpu", threads=0, max_episode_steps=1000, model="fast")
spec = halfcheetah.describe(num_envs=128, device="cpu")
"""

from dataclasses import dataclass

import torch

from pql.env import EnvSpec
from pql.envs.mujoco import control, locomotion
from pql.envs.mujoco.env import MujocoVec, describe
from pql.envs.mujoco.task import Task
from pql.errors import ConfigError


@dataclass(frozen=True)
class Maker:
    """Environment factory of one task: call it for the ``VecEnv``, or ``describe`` it for the spec alone.

    Keywords: ``threads`` (physics threads, 0 for one per core), ``max_episode_steps`` (time limit; None: the task's)
    and ``model`` (``shipped``, ``fast``, or None for what the task does best with).

    Raises:
        ConfigError: a value out of range, or a model that the task cannot use.
    """

    task: type[Task]

    def __call__(
        self,
        num_envs: int = 64,
        device: str | torch.device = "cpu",
        threads: int = 0,
        max_episode_steps: int | None = None,
        model: str | None = None,
    ) -> MujocoVec:
        _check(num_envs, threads, max_episode_steps)
        return MujocoVec(self.task, num_envs, torch.device(device), threads, max_episode_steps, model)

    def describe(
        self,
        num_envs: int = 64,
        device: str | torch.device = "cpu",
        threads: int = 0,
        max_episode_steps: int | None = None,
        model: str | None = None,
    ) -> EnvSpec:
        """What ``self(...).spec`` would be; nothing is loaded or started."""
        _check(num_envs, threads, max_episode_steps)
        return describe(self.task, num_envs, torch.device(device), max_episode_steps, model)


def _check(num_envs: int, threads: int, max_episode_steps: int | None) -> None:
    for name, value, least in (
        ("num_envs", num_envs, 1),
        ("threads", threads, 0),
        ("max_episode_steps", 1 if max_episode_steps is None else max_episode_steps, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(name, value, f"an integer >= {least}")


halfcheetah = Maker(locomotion.HalfCheetah)
hopper = Maker(locomotion.Hopper)
walker2d = Maker(locomotion.Walker2d)
ant = Maker(locomotion.Ant)
humanoid = Maker(locomotion.Humanoid)
humanoidstandup = Maker(locomotion.HumanoidStandup)
swimmer = Maker(locomotion.Swimmer)
reacher = Maker(control.Reacher)
pusher = Maker(control.Pusher)
invertedpendulum = Maker(control.InvertedPendulum)
inverteddoublependulum = Maker(control.InvertedDoublePendulum)

TASKS = {name: value for name, value in globals().items() if isinstance(value, Maker)}
"""Factory by task name."""
