"""MuJoCo environments for the tests."""

import math
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from pql.contract.env import make_env
from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.robots import model_file
from pql.envs.mujoco.task import Task
from pql.errors import ConfigError

ROBOT_OF = {
    "anymal": "anymal_c",
    "go1_velocity": "go1",
    "g1_velocity": "g1",
    "shadow_hand": "shadow_hand",
    "shadow_hand_openai": "shadow_hand",
    "allegro_hand": "allegro_hand",
    "dclaw": "dclaw",
    "franka_cube_stack": "panda",
    "franka_cube_stack_torque": "panda",
}
"""Tasks whose robot is a file of somebody's package."""


def build(name: str, num_envs: int, **kwargs: Any) -> MujocoVec:
    env = make_env(name, num_envs, "cpu", **{"threads": 1, **kwargs})
    assert isinstance(env, MujocoVec)
    return env


def derived(task: Task, fields: Fields) -> Fields:
    """``fields`` as the task's functions get them."""
    return {**fields, **task.derive(fields)}


def random_actions(env: MujocoVec, steps: int, seed: int = 0) -> Tensor:
    """[steps, N, A] in [-1, 1]."""
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(steps, env.spec.num_envs, env.task.action_size, generator=gen) * 2 - 1


def needs(*robots: str) -> pytest.MarkDecorator:
    """Skips a test where a robot's model is not installed, with the command that installs it as the reason."""
    missing = ""
    for robot in robots:
        try:
            model_file(robot)
        except ConfigError as error:
            missing = str(error)
    return pytest.mark.skipif(bool(missing), reason=missing)


def task(name: str, *marks: pytest.MarkDecorator) -> Any:
    """A parameter of tests: a task, skipped where its robot is not installed."""
    found = [needs(ROBOT_OF[name])] if name in ROBOT_OF else []
    return pytest.param(name, marks=[*marks, *found])


class Base:
    """What a robot's free body does, from its row of ``qpos`` and ``qvel`` and MuJoCo's own matrix."""

    def __init__(self, qpos: Tensor, qvel: Tensor):
        matrix = np.zeros(9)
        mujoco.mju_quat2Mat(matrix, qpos[3:7].double().numpy())
        self.frame = frame = matrix.reshape(3, 3)  # body -> world
        self.linear, self.angular = frame.T @ qvel[:3].double().numpy(), qvel[3:6].double().numpy()  # both in its frame
        self.roll, self.yaw = math.atan2(frame[2, 1], frame[2, 2]), math.atan2(frame[1, 0], frame[0, 0])
